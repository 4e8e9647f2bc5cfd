"""Whole training loops of PPO: ppokit's, TorchRL's, other libraries', and their common floor.

It takes about twenty-five minutes. Each contender runs in a process of its own, one after the
other, all of them in every round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from statistics import median
from typing import Any

from tests.benchmarks import loop_tasks as config
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import run_jobs
from tests.benchmarks.tables import bullets, markdown, with_range, write_lines

FLOOR_ABOUT = (
    "the sum of its parts, each timed alone: steps and resets of the environments with random "
    "actions; the actor, a draw and its log-probability in plain torch; both networks forward "
    f"and backward at {config.MINIBATCH} frames; `clip_grad_norm_`; `Adam(fused=True)`"
)
METHOD = f"""The networks have tanh layers. Minibatches have {config.MINIBATCH} frames, gradients
are clipped at {config.MAX_GRAD_NORM:g}, Adam has a rate of {config.LEARNING_RATE:g}; there is no KL
stop and no reward normalization. All contenders make the same number of optimizer steps. Other
settings are each program's own: only ppokit has fused Adam, Stable-Baselines3 and the CleanRL-style
loop have a normal distribution instead of tanh-normal, and only the tutorial's environments
normalize observations.

Every contender has a process of its own, one at a time. The first batch is not timed. The floor's
parts run on memory in the cache; the last column times its networks, clipping and optimizer one
after the other."""


class Results:
    """The rounds of one task, for each contender that took part.

    Attributes:
        speeds: frames per second of each round.
        first_batch: median seconds of the first batch, with capturing.
        parts: median microseconds per frame of each part of the floor.
    """

    def __init__(self, task: config.Task, runs: Sequence[Mapping[str, Any]]) -> None:

        def figures(contender: str, name: str) -> list[Any]:
            return [run[name] for run in runs if run["contender"] == contender]

        self.task = task
        names = dict.fromkeys(run["contender"] for run in runs if run["contender"] != config.FLOOR)
        self.speeds = {name: figures(name, "frames_per_second") for name in names}
        self.first_batch = {name: median(figures(name, "first_batch_seconds")) for name in names}
        floor = figures(config.FLOOR, "us_per_frame")
        self.parts = {part: median(x[part] for x in floor) for part in config.FLOOR_PARTS}
        self.floor = sum(self.parts.values())
        in_a_row = median(figures(config.FLOOR, "in_a_row_us_per_frame"))
        self.floor_in_a_row = self.parts["environment"] + self.parts["acting"] + in_a_row
        self.peers = [name for name in (config.SB3, config.CLEANRL) if name in self.speeds]

    def speed(self, name: str) -> float:
        return median(self.speeds[name])

    def over(self, name: str, *others: str) -> float:
        return self.speed(name) / max(self.speed(x) for x in others if x in self.speeds)

    def capture(self) -> tuple[float, float]:
        """Return the seconds to capture, and the frames after which the compiled loop is ahead."""
        compiled, eager = self.speed(config.COMPILED), self.speed(config.PPOKIT)
        seconds = self.first_batch[config.COMPILED] - self.task.frames / compiled
        saved = 1 / eager - 1 / compiled
        return seconds, seconds / saved if saved > 0 else math.inf


def page(found: Sequence[Results], runs: Sequence[Mapping[str, Any]]) -> str:
    rounds = 1 + max(run["seed"] for run in runs)
    about = {name: config.CONTENDERS[name][0] for name in found[0].speeds}
    about[config.FLOOR] = FLOOR_ABOUT
    floors = []
    for results in found:
        parts = [results.parts[part] for part in config.FLOOR_PARTS]
        figures = (*parts, results.floor, results.floor_in_a_row)
        floors.append([results.task.name, *(f"{us:,.0f}" for us in figures)])
    return f"""# Whole PPO loops: frames a second

Collecting and training in steady state, one thread, medians of {rounds} round(s).

![Frames a second of each loop](loop.png)

{"".join(_speeds(results) for results in found)}{_capture(found)}The floor in microseconds a frame:

{markdown(["", *config.FLOOR_PARTS, "together", "together, training in a row"], floors)}

{bullets(about)}

{METHOD}
"""


def _speeds(results: Results) -> str:
    lines = []
    for name, speeds in results.speeds.items():
        ratios = (
            results.over(name, config.TUTORIAL),
            results.over(name, *results.peers),
            results.floor * results.speed(name) / 1e6,
        )
        lines.append([name, with_range(speeds), *(f"{ratio:.2f}" for ratio in ratios)])
    lines.append([f"*{config.FLOOR}*", f"{1e6 / results.floor:,.0f}", "", "", "1.00"])
    peers = " or ".join(results.peers) + (", the better" if len(results.peers) > 1 else "")
    head = ["", "frames/s (range)", f"over {config.TUTORIAL}", f"over {peers}", "of the floor"]
    return f"## {results.task.name}\n\n{markdown(head, lines)}\n\n"


def _capture(found: Sequence[Results]) -> str:
    lines = []
    for results in found:
        if config.COMPILED in results.speeds:
            seconds, frames = results.capture()
            lines.append([results.task.name, f"{seconds:.1f}", f"{frames:,.0f}"])
    text = "Frames from which the compiled loop is ahead of the eager one, including the capture"
    table = markdown(["", "capture, s", "frames"], lines)
    return f"{text} with a warm cache:\n\n{table}\n\n" if lines else ""


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
    seconds, at_once = (0.2, 2) if bench.quick else (4.0, 1)
    jobs = [
        {"task": asdict(task), "contender": name, "seed": number, "seconds": seconds}
        for number in range(1 if bench.quick else 5)
        for task in tasks
        for name in (*names, config.FLOOR)
    ]
    runs = run_jobs("loop_tasks.measure", jobs, bench.results, at_once, OMP_WAIT_POLICY="passive")
    write_lines(bench.file("csv"), [line for run in runs for line in lines_of(run)])
    found = [Results(task, [run for run in runs if run["task"] == asdict(task)]) for task in tasks]
    speeds = {
        x.task.name: {name: x.speed(name) for name in x.speeds} | {config.FLOOR: 1e6 / x.floor}
        for x in found
    }
    draw_bars(bench.file("png"), speeds)
    bench.write_page(page(found, runs))


if __name__ == "__main__":
    main()
