"""Learning curves of ppokit and Stable-Baselines3, with the same tuned settings.

``python -m tests.benchmarks.learning`` trains every task, arm and seed, two at a time: some ten
hours of one core. Each run leaves its result in ``--results``; finished runs are skipped.
``--speed`` measures frames a second instead, one run at a time. ``--report`` writes
``docs/benchmarks/learning.{csv,md,png}`` from the finished runs. Stable-Baselines3 is in
``pip install 'ppokit[bench]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks import learning_report
from tests.benchmarks.learning_tasks import TASKS
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import kept, read_json, run_all, run_module

ARMS = ("ppokit", "Stable-Baselines3")
COMPILED = "ppokit, compiled"  # only its speed is measured
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
        kind = "" if self.seconds is None else "speed-"
        return results / f"{kind}{self.task}-{self.arm}-{self.seed}.json"

    def run(self, results: Path) -> None:
        job = vars(self) | {"frames": self.frames or 10**9}
        kept(self.file(results), partial(run_module, "learning_arms", job))


def learning_jobs(tasks: Sequence[str], arms: Sequence[str], quick: bool) -> list[Job]:
    return [
        Job(name, arm, seed, 2_000 if quick else TASKS[name].frames)
        for seed in range(1 if quick else 5)
        for name in tasks
        for arm in arms
        if seed < TASKS[name].seeds
    ]


def speed_jobs(tasks: Sequence[str], arms: Sequence[str], quick: bool) -> list[Job]:
    rounds, seconds = (1, 0.5) if quick else (3, 20.0)
    return [
        Job(name, arm, number, 0, seconds)
        for number in range(rounds)
        for name in tasks
        for arm in (arms if number % 2 == 0 else arms[::-1])
    ]


def read(jobs: Sequence[Job], results: Path) -> list[dict[str, Any]]:
    return [
        {"task": job.task, "arm": job.arm, "seed": job.seed} | read_json(file)
        for job in jobs
        if (file := job.file(results)).exists()
    ]


def main() -> None:
    bench = Benchmark(
        "learning",
        __doc__,
        keeps_results=True,
        packages=("stable-baselines3", "mujoco", "box2d"),
        tasks=list(TASKS),
        jobs=2,
        speed=False,
        report=False,
    )
    given, quick = bench.options, bench.quick
    tasks = [task for task in given.tasks if not quick or task in QUICK_TASKS]
    arms = [arm for arm in ARMS if arm == "ppokit" or find_spec("stable_baselines3")]
    learning = learning_jobs(tasks, arms, quick)
    speed = speed_jobs(tasks, arms if quick else [*arms, COMPILED], quick)
    if not given.report:
        if quick or not given.speed:
            run_all([partial(job.run, bench.results) for job in learning], given.jobs)
        if quick or given.speed:
            run_all([partial(job.run, bench.results) for job in speed])
    learning_report.write(bench, read(learning, bench.results), read(speed, bench.results))


if __name__ == "__main__":
    main()
