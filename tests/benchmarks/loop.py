"""Whole training loops of PPO: ppokit's, TorchRL's and others', and what none can do without.

``python -m tests.benchmarks.loop`` takes about twenty-five minutes and writes
``docs/benchmarks/loop.{csv,md,png}``. Each contender runs in a process of its own, one after the
other, every round all of them. Each leaves its result in ``--results``; those that are there
already are skipped, so an interrupted benchmark goes on where it was. Other libraries take part
where they are installed (``pip install 'ppokit[bench]'``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks import loop_report
from tests.benchmarks.loop_contenders import (
    COMPILED,
    CONTENDERS,
    EXCHANGED,
    FLOOR,
    QUICK_TASKS,
    TASKS,
    Job,
)
from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.runs import read_json
from tests.benchmarks.tables import versions

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "RL_LOGGING_LEVEL": "WARNING",
}
SECONDS, SECONDS_IN_PARTS = 3.0, 1.0  # of timing, at least
QUICK_SECONDS = 0.2


def jobs(rounds: int, quick: bool) -> list[Job]:
    """Return what is to be measured, in the order in which it is."""
    tasks, seconds = TASKS, (SECONDS, SECONDS_IN_PARTS)
    names = [name for name, contender in CONTENDERS.items() if contender.is_there]
    if quick:
        tasks, seconds = QUICK_TASKS, (QUICK_SECONDS, QUICK_SECONDS)
        names = [name for name in names if name not in (COMPILED, EXCHANGED)]  # take half a minute
    return [
        Job(task, name, number, *seconds)
        for number in range(rounds)
        for task in tasks
        for name in (*names, FLOOR)
    ]


def run(job: Job, results: Path) -> None:
    """Measure in a new process, unless the result is there."""
    file = results / job.file
    if file.exists():
        return
    command = [sys.executable, "-m", "tests.benchmarks.loop_measure"]
    command += [json.dumps(asdict(job)), str(file.absolute())]
    log = file.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT, cwd=ROOT
        )
    if done.returncode:
        last = "\n".join(log.read_text().splitlines()[-20:])
        raise RuntimeError(f"{job.contender} on {job.task.name} failed:\n{last}")


def run_all(everything: Sequence[Job], results: Path, at_once: int) -> None:
    """Run the jobs in their order, behind a progress bar."""
    with ThreadPoolExecutor(at_once) as pool, tqdm(total=len(everything), unit="run") as bar:
        futures = {pool.submit(run, job, results): job for job in everything}
        try:
            for future in as_completed(futures):
                future.result()
                bar.set_postfix_str(futures[future].contender)
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "benchmarks" / "loop")
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true", help="tiny batches, a temporary folder")
    args = parser.parse_args()
    folder = args.out or output_folder(args.quick)
    folder.mkdir(parents=True, exist_ok=True)
    if args.quick:
        args.rounds, args.results = 1, folder / "runs"
    args.results.mkdir(parents=True, exist_ok=True)
    if not (started := args.results / "machine.txt").exists():
        # what the runs ran on, not what is there when they are read
        started.write_text(f"{machine()}\n{versions('stable-baselines3')}\n")
    everything = jobs(args.rounds, args.quick)
    run_all(everything, args.results, at_once=2 if args.quick else 1)
    found = [read_json(args.results / job.file) for job in everything]
    report = loop_report.write_report(folder, found, started.read_text())
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
