"""Whole training loops of PPO: ppokit's, TorchRL's, other libraries', and their common floor.

``python -m tests.benchmarks.loop`` takes about twenty-five minutes and writes
``docs/benchmarks/loop.{csv,md,png}``. Each contender runs in a process of its own, one after the
other, all of them in every round. Each leaves its result in ``--results``; finished runs are
skipped. Other libraries take part if they are installed (``pip install 'ppokit[bench]'``).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from tests.benchmarks import loop_tasks as config
from tests.benchmarks.loop_report import draw, page
from tests.benchmarks.loop_results import Results
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import file_name, kept, run_all, run_module
from tests.benchmarks.tables import write_csv


def measure(bench: Benchmark, task: config.Task, contender: str, seed: int) -> dict[str, Any]:
    seconds = {"seconds": 0.2, "in_parts": 0.2} if bench.quick else {"seconds": 3.0, "in_parts": 1}
    job = {"task": asdict(task), "contender": contender, "seed": seed, **seconds}
    file = bench.results / file_name(task.name, contender, seed)
    make = partial(run_module, "loop_measure", job, OMP_WAIT_POLICY="passive")
    return {"task": task, "contender": contender, "round": seed} | kept(file, make)


def csv_lines(runs: list[dict[str, Any]]) -> list[list[Any]]:
    lines = []
    for run in runs:
        task, parts = run["task"], run["us_per_frame"]
        speed = run.get("frames_per_second")
        whole = sum(parts.values()) if speed is None else 1e6 / speed
        name = [task.env, task.num_envs, run["contender"], run["round"]]
        lines += [[*name, part, f"{us:.4g}"] for part, us in ({"whole": whole} | parts).items()]
    return lines


def main() -> None:
    packages = ("stable-baselines3",)
    bench = Benchmark("loop", __doc__, keeps_results=True, packages=packages, rounds=5)
    names = [name for name, contender in config.CONTENDERS.items() if contender.is_there]
    if bench.quick:  # capturing takes half a minute
        names = [name for name in names if name not in (config.COMPILED, config.EXCHANGED)]
    tasks = config.QUICK_TASKS if bench.quick else config.TASKS
    jobs = [
        partial(measure, bench, task, name, number)
        for number in range(1 if bench.quick else bench.options.rounds)
        for task in tasks
        for name in (*names, config.FLOOR)
    ]
    runs = run_all(jobs, at_once=2 if bench.quick else 1)
    head = ["env", "num_envs", "contender", "round", "part", "us_per_frame"]
    write_csv(bench.file("csv"), head, csv_lines(runs))
    found = [Results(task, [run for run in runs if run["task"] == task]) for task in tasks]
    draw(bench.file("png"), found)
    bench.write_page(page(found, runs))


if __name__ == "__main__":
    main()
