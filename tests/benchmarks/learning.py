"""Learning curves over seeds: ppokit's blocks and Stable-Baselines3, with the same tuned settings.

``python -m tests.benchmarks.learning`` trains every task, arm and seed, two at a time: some ten
hours of one core. Each run leaves its result in ``--results``; those that are there are skipped, so
an interrupted benchmark goes on where it was. ``--speed`` measures frames a second instead, one run
at a time, the arms in turn. ``--report`` writes ``docs/benchmarks/learning.{csv,md,png}`` from what
is there. Stable-Baselines3 is in ``pip install 'ppokit[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.benchmarks import learning_report
from tests.benchmarks.learning_tasks import TASKS
from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.runs import read_json
from tests.benchmarks.tables import versions

ARMS = ("ppokit", "Stable-Baselines3")
COMPILED = "ppokit, compiled"  # measured for speed alone: it learns the same
SPEED_ROUNDS, SPEED_SECONDS = 3, 20.0
QUICK_TASKS = ("CartPole-v1", "InvertedDoublePendulum-v5")


@dataclass(frozen=True)
class Job:
    """A run: to its end, or for some seconds of its steady state."""

    task: str
    arm: str
    seed: int
    frames: int
    seconds: float | None = None

    def file(self, results: Path) -> Path:
        """Return where the result goes."""
        kind = "" if self.seconds is None else "speed-"
        return results / f"{kind}{self.task}-{self.arm}-{self.seed}.json"

    def run(self, results: Path, bar: tqdm) -> None:
        """Train in a new process, unless the result is there; move the bar by frames."""
        file = self.file(results)
        if file.exists():
            return
        job: dict[str, Any] = {"task": self.task, "arm": self.arm, "seed": self.seed}
        if self.seconds is None:
            job["frames"] = self.frames
        else:
            job |= {"seconds": self.seconds, "frames": 10**9}
        command = [sys.executable, "-m", "tests.benchmarks.learning_arms", json.dumps(job)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RL_LOGGING_LEVEL": "WARNING"}
        with file.with_suffix(".log").open("w+") as log:
            process = subprocess.Popen(
                [*command, str(file.absolute())],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
            )
            done = 0
            try:
                for line in process.stdout or ():
                    bar.update(int(line) - done)
                    done = int(line)
            finally:
                if process.poll() is None and sys.exc_info()[0] is not None:
                    process.kill()
            if process.wait():
                log.seek(0)
                last = "\n".join(log.read().splitlines()[-20:])
                raise RuntimeError(f"{self.arm} on {self.task}, seed {self.seed}, failed:\n{last}")


def learning_jobs(tasks: Sequence[str], arms: Sequence[str], quick: bool) -> list[Job]:
    """Return the training runs: every task's first seed before any second one."""
    return [
        Job(name, arm, seed, 2_000 if quick else TASKS[name].frames)
        for seed in range(1 if quick else 5)
        for name in tasks
        for arm in arms
        if seed < TASKS[name].seeds
    ]


def speed_jobs(tasks: Sequence[str], arms: Sequence[str], quick: bool) -> list[Job]:
    """Return the runs that are timed, the arms in turn."""
    rounds, seconds = (1, 0.5) if quick else (SPEED_ROUNDS, SPEED_SECONDS)
    return [
        Job(name, arm, number, 0, seconds)
        for number in range(rounds)
        for name in tasks
        for arm in (arms if number % 2 == 0 else arms[::-1])
    ]


def run_all(jobs: Sequence[Job], results: Path, at_once: int) -> None:
    """Run those without a result, in their order, behind a progress bar."""
    missing = [job for job in jobs if not job.file(results).exists()]
    total = sum(job.frames for job in missing)
    with ThreadPoolExecutor(at_once) as pool, tqdm(total=total, unit="frame", smoothing=0) as bar:
        futures = {pool.submit(job.run, results, bar): job for job in missing}
        try:
            for count, future in enumerate(as_completed(futures), 1):
                future.result()
                bar.set_postfix_str(f"{count} of {len(missing)} runs")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def read(jobs: Sequence[Job], results: Path) -> list[dict[str, Any]]:
    """Return the results that are there, each with its job's task, arm and seed."""
    return [
        {"task": job.task, "arm": job.arm, "seed": job.seed} | read_json(file)
        for job in jobs
        if (file := job.file(results)).exists()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--results", type=Path, default=ROOT / "outputs" / "benchmarks" / "learning"
    )
    parser.add_argument("--jobs", type=int, default=2, help="training runs at once")
    parser.add_argument("--speed", action="store_true", help="measure frames a second instead")
    parser.add_argument("--report", action="store_true", help="of what is there, without running")
    parser.add_argument("--quick", action="store_true", help="few frames, a temporary folder")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    if args.quick:
        args.tasks, args.results = [t for t in args.tasks if t in QUICK_TASKS], folder / "runs"
    args.results.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in ARMS if arm == "ppokit" or find_spec("stable_baselines3")]
    if not (started := args.results / "machine.txt").exists():
        # what the runs ran on, not what is there when they are read
        started.write_text(f"{machine()}\n{versions('stable-baselines3', 'mujoco', 'box2d')}\n")
    learning = learning_jobs(args.tasks, arms, args.quick)
    speed = speed_jobs(args.tasks, arms if args.quick else [*arms, COMPILED], args.quick)
    if not args.report:
        if args.quick or not args.speed:
            run_all(learning, args.results, args.jobs)
        if args.quick or args.speed:
            run_all(speed, args.results, 1)
    report = learning_report.write_report(
        folder, read(learning, args.results), read(speed, args.results), started.read_text()
    )
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
