"""Statistics of the rounds of the loop benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tests.benchmarks import loop_tasks as config


class Results:
    """The rounds of one task, for each contender that took part."""

    def __init__(self, task: config.Task, runs: Sequence[Mapping[str, Any]]) -> None:
        self.task = task
        #: frames per second of each round
        self.speeds: dict[str, list[float]] = {}
        #: median seconds of the first batch, with capturing
        self.first_batch: dict[str, float] = {}
        in_a_row = 0.0
        for name in dict.fromkeys(run["contender"] for run in runs):
            own = [run for run in runs if run["contender"] == name]
            if name == config.FLOOR:
                figures = [run["us_per_frame"] for run in own]
                #: median microseconds per frame of each part of the floor
                self.parts = {part: median(f[part] for f in figures) for part in figures[0]}
                in_a_row = median(run["in_a_row_us_per_frame"] for run in own)
            else:
                self.speeds[name] = [run["frames_per_second"] for run in own]
                self.first_batch[name] = median(run["first_batch_seconds"] for run in own)
        self.floor = sum(self.parts.values())
        self.floor_in_a_row = self.parts["environment"] + self.parts["acting"] + in_a_row
        self.peers = [name for name in (config.SB3, config.CLEANRL) if name in self.speeds]

    def speed(self, name: str) -> float:
        return median(self.speeds[name])

    def over(self, name: str, *others: str) -> float:
        return self.speed(name) / max(self.speed(x) for x in others if x in self.speeds)

    def of_floor(self, name: str) -> float:
        return self.floor * self.speed(name) / 1e6

    def capture(self) -> tuple[float, float]:
        """Return the seconds to capture, and the frames after which the compiled loop is ahead."""
        compiled, eager = self.speed(config.COMPILED), self.speed(config.PPOKIT)
        seconds = self.first_batch[config.COMPILED] - self.task.frames / compiled
        saved = 1 / eager - 1 / compiled
        return seconds, seconds / saved if saved > 0 else math.inf
