"""What the rounds of the whole-loop benchmark come to, and what is to be reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.benchmarks.loop_contenders import (
    CLEANRL,
    COLLECTOR,
    COMPILED,
    EXCHANGED,
    FLOOR,
    PPOKIT,
    SB3,
    TUTORIAL,
    Task,
)


@dataclass(frozen=True)
class Results:
    """What the rounds of one task found, for each contender that was there."""

    task: Task
    frames_per_second: Mapping[str, Sequence[float]]
    parts: Mapping[str, Mapping[str, float]]  #: microseconds a frame, medians; the floor's, too
    in_a_row: float  #: microseconds a frame of the floor's training
    first_batch: Mapping[str, float]  #: seconds, medians: what is compiled is captured there

    @classmethod
    def of(cls, task: Task, runs: Sequence[Mapping[str, Any]]) -> Results:
        """Return those of the runs of a task."""
        speeds: dict[str, list[float]] = {}
        first: dict[str, float] = {}
        parts: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(run["contender"] for run in runs):
            own = [run for run in runs if run["contender"] == name]
            if name != FLOOR:
                speeds[name] = [run["frames_per_second"] for run in own]
                first[name] = median(run["first_batch_seconds"] for run in own)
            figures = [run["us_per_frame"] for run in own]
            parts[name] = {part: median(f[part] for f in figures) for part in figures[0]}
        in_a_row = median(run["in_a_row_us_per_frame"] for run in runs if run["contender"] == FLOOR)
        return cls(task, speeds, parts, in_a_row, first)

    @property
    def peers(self) -> list[str]:
        """The other libraries, as far as they were there."""
        return [name for name in (SB3, CLEANRL) if name in self.frames_per_second]

    @property
    def floor(self) -> float:
        """Microseconds a frame that no loop can do without."""
        return sum(self.parts[FLOOR].values())

    @property
    def floor_in_a_row(self) -> float:
        """The same, but with what trains timed one after the other."""
        parts = self.parts[FLOOR]
        return parts["environment"] + parts["acting"] + self.in_a_row

    def speed(self, name: str) -> float:
        """Frames a second, the median of the rounds."""
        return median(self.frames_per_second[name])

    def over_tutorial(self, name: str) -> float:
        """Multiple of the tutorial's frames a second."""
        return self.speed(name) / self.speed(TUTORIAL)

    def over_peers(self, name: str) -> float:
        """Multiple of the frames a second of the fastest of the other libraries."""
        return self.speed(name) / max(self.speed(peer) for peer in self.peers)

    def over_sb3(self, name: str) -> float:
        """Multiple of Stable-Baselines3's frames a second."""
        return self.speed(name) / self.speed(SB3)

    @property
    def seconds_to_capture(self) -> float:
        """How much longer the first batch of the compiled loop takes than a later one."""
        return self.first_batch[COMPILED] - self.task.frames / self.speed(COMPILED)

    @property
    def frames_to_pay(self) -> float:
        """Frames from which the compiled loop is ahead of the eager one."""
        saved = 1 / self.speed(PPOKIT) - 1 / self.speed(COMPILED)
        return self.seconds_to_capture / saved if saved > 0 else math.inf

    def of_floor(self, name: str) -> float:
        """Share of its time that the floor would take, too."""
        return self.floor * self.speed(name) / 1e6


@dataclass(frozen=True)
class Bar:
    """What is to be reached."""

    text: str
    contender: str
    value: Callable[[Results, str], float]
    least: float
    applies: Callable[[Task], bool] = lambda task: True

    def verdict(self, results: Results) -> str:
        """Return what was reached, and whether that is enough."""
        if not self.applies(results.task) or self.contender not in results.frames_per_second:
            return ""
        value = self.value(results, self.contender)
        return f"{value:.2f}, {'met' if value >= self.least else 'missed'}"


BARS = (
    Bar(
        "at least 3 times the tutorial",
        *(PPOKIT, Results.over_tutorial, 3.0),
        applies=lambda task: task.num_envs == 1,
    ),
    Bar(
        "at least 1.6 times the better of the other libraries",
        *(PPOKIT, Results.over_peers, 1.6),
        applies=lambda task: task.num_envs == 1,
    ),
    Bar(
        "at least 1.2 times the better of the other libraries",
        *(PPOKIT, Results.over_peers, 1.2),
        applies=lambda task: task.num_envs > 1,
    ),
    Bar(
        "with torchrl's Collector, at least 1.8 times the tutorial",
        *(COLLECTOR, Results.over_tutorial, 1.8),
    ),
    Bar("aim: 0.85 of the floor", PPOKIT, Results.of_floor, 0.85),
    Bar(
        "compiled, at least 1.9 times the better of the other libraries",
        *(COMPILED, Results.over_peers, 1.9),
        applies=lambda task: task.num_envs == 1,
    ),
    Bar(
        "compiled, at least 3.6 times the tutorial",
        *(COMPILED, Results.over_tutorial, 3.6),
        applies=lambda task: task.num_envs == 1,
    ),
    Bar(
        "compiled, at least 1.7 times Stable-Baselines3",
        *(COMPILED, Results.over_sb3, 1.7),
        applies=lambda task: task.num_envs > 1 and task.width == 256,
    ),
    Bar(
        "compiled, at least 3 times Stable-Baselines3",
        *(COMPILED, Results.over_sb3, 3.0),
        applies=lambda task: task.width == 64,
    ),
    Bar(
        "our step in the tutorial, at least 1.4 times the tutorial",
        *(EXCHANGED, Results.over_tutorial, 1.4),
    ),
)
