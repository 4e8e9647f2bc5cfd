"""Whole training loops of PPO: ppokit's, TorchRL's, other libraries', and their common floor.

It takes about twenty-five minutes. Each contender runs in a process of its own, one after the
other, all of them in every round.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from tests.benchmarks import loop_tasks as config
from tests.benchmarks.loop_report import Results, draw, page
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import run_jobs
from tests.benchmarks.tables import write_lines


def lines_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the CSV file: the whole loop, and the parts of the floor."""
    parts, speed = run.get("us_per_frame", {}), run.get("frames_per_second")
    parts = {"whole": sum(parts.values()) if speed is None else 1e6 / speed} | parts
    task = config.Task(**run["task"])
    name = {"task": task.name, "contender": run["contender"], "round": run["seed"]}
    return [name | {"part": part, "us_per_frame": us} for part, us in parts.items()]


def main() -> None:
    bench = Benchmark("loop", keeps_results=True, packages=("stable-baselines3",))
    names = [
        name for name in config.CONTENDERS if name != config.SB3 or find_spec("stable_baselines3")
    ]
    if bench.quick:  # capturing takes half a minute
        names = [name for name in names if name not in (config.COMPILED, config.EXCHANGED)]
    tasks = config.QUICK_TASKS if bench.quick else config.TASKS
    jobs: list[dict[str, Any]] = [
        {"task": asdict(task), "contender": name, "seed": number}
        for number in range(1 if bench.quick else 5)
        for task in tasks
        for name in (*names, config.FLOOR)
    ]
    seconds, at_once = (0.2, 2) if bench.quick else (4.0, 1)
    jobs = [job | {"seconds": seconds} for job in jobs]
    passive = {"OMP_WAIT_POLICY": "passive"}
    runs = run_jobs("loop_tasks.measure", jobs, bench.results, at_once, **passive)
    write_lines(bench.file("csv"), [line for run in runs for line in lines_of(run)])
    found = [Results(task, [run for run in runs if run["task"] == asdict(task)]) for task in tasks]
    draw(bench.file("png"), found)
    bench.write_page(page(found, runs))


if __name__ == "__main__":
    main()
