"""Whole training loops of PPO: ppokit's, TorchRL's, other libraries', and their common floor.

It takes about twenty-five minutes. Each contender runs in a process of its own, one after the
other, all of them in every round.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from tests.benchmarks import loop_tasks as config
from tests.benchmarks.loop_report import draw, page
from tests.benchmarks.loop_results import Results
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import file_name, kept, run_all, run_function
from tests.benchmarks.tables import write_lines


def measure(bench: Benchmark, task: config.Task, contender: str, seed: int) -> dict[str, Any]:
    job: dict[str, Any] = {"task": asdict(task), "seed": seed}
    job["seconds"] = 0.2 if bench.quick else 4.0
    function = "loop_floor.measure_floor"
    if contender != config.FLOOR:
        function, job["contender"] = "loop_measure.measure", contender
    file = bench.results / file_name(task.name, contender, seed)
    make = partial(run_function, function, job, OMP_WAIT_POLICY="passive")
    return {"task": task, "contender": contender, "round": seed} | kept(file, make)


def lines_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of the CSV file: the whole loop, and the parts of the floor."""
    parts, speed = run.get("us_per_frame", {}), run.get("frames_per_second")
    parts = {"whole": sum(parts.values()) if speed is None else 1e6 / speed} | parts
    name = {"task": run["task"].name, "contender": run["contender"], "round": run["round"]}
    return [name | {"part": part, "us_per_frame": us} for part, us in parts.items()]


def main() -> None:
    bench = Benchmark("loop", keeps_results=True, packages=("stable-baselines3",))
    names = [name for name, contender in config.CONTENDERS.items() if contender.is_there]
    if bench.quick:  # capturing takes half a minute
        names = [name for name in names if name not in (config.COMPILED, config.EXCHANGED)]
    tasks = config.QUICK_TASKS if bench.quick else config.TASKS
    jobs = [
        partial(measure, bench, task, name, number)
        for number in range(1 if bench.quick else 5)
        for task in tasks
        for name in (*names, config.FLOOR)
    ]
    runs = run_all(jobs, at_once=2 if bench.quick else 1)
    write_lines(bench.file("csv"), [line for run in runs for line in lines_of(run)])
    found = [Results(task, [run for run in runs if run["task"] == task]) for task in tasks]
    draw(bench.file("png"), found)
    bench.write_page(page(found, runs))


if __name__ == "__main__":
    main()
