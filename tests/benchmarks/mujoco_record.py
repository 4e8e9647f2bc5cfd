"""Record of training runs: a CSV file, rewritten after each run.

A run in the CSV file is not repeated. To repeat it, delete its lines in the CSV file, and its JSON
file below ``outputs/benchmarks``. The CSV files of the MuJoCo runs are those of the pages, so that
they can be committed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tests.benchmarks.curves import Curve, common_points
from tests.benchmarks.runs import file_name, kept, run_all, run_function
from tests.benchmarks.tables import write_csv

HEAD = ["task", "arm", "seed", "commit", "what", "frames", "value"]
SPEED = "frames a second"
Job = tuple[str, str, int]  # task, arm, seed; for a speed, the round instead of the seed


@dataclass
class Run:
    """A finished run: its points (frames, value) of each quantity."""

    job: Job
    commit: str
    points: dict[str, list[tuple[int, float]]]

    @classmethod
    def of(cls, job: Job, frames: int, result: Mapping[str, Any]) -> Run:
        """Return the run of a result of ``mujoco_runs.run`` or ``learning_arms.run``."""
        points = {
            "evaluation": result.get("evaluations", []),
            "training": result.get("training", []),
        }
        points["final"] = [(frames, value) for value in result.get("final", [])]
        points[SPEED] = [(0, result["frames_per_second"])] if "frames_per_second" in result else []
        return cls(job, result["commit"], points)

    @property
    def is_speed(self) -> bool:
        return bool(self.points.get(SPEED))

    def values(self, what: str) -> list[float]:
        """Return the values of a quantity."""
        return [value for _, value in self.points.get(what, [])]


Groups = dict[str, dict[str, list[Run]]]


class Record:
    """Runs in a CSV file.

    Args:
        file: the CSV file.
        results: folder of the JSON files of the results.
        function: makes a run, ``"module.function"`` of this folder.
    """

    def __init__(self, file: Path, results: Path, function: str = "mujoco_runs.run") -> None:
        self.file, self.results, self.function = file, results, function
        self._lock = Lock()

    def runs(self) -> list[Run]:
        """Return the runs in the order of the file."""
        found: dict[tuple[Job, bool], Run] = {}
        if self.file.exists():
            with self.file.open(newline="") as file:
                for line in csv.DictReader(file):
                    job, what = (line["task"], line["arm"], int(line["seed"])), line["what"]
                    run = found.setdefault((job, what == SPEED), Run(job, line["commit"], {}))
                    point = int(line["frames"] or 0), float(line["value"])
                    run.points.setdefault(what, []).append(point)
        return list(found.values())

    def add(self, run: Run) -> None:
        """Add a run, or replace an earlier one; an interruption leaves the file as it was."""
        part = self.file.with_suffix(".part")
        with self._lock:
            runs = [
                old for old in self.runs() if (old.job, old.is_speed) != (run.job, run.is_speed)
            ]
            lines = [
                [*run.job, run.commit, what, frames or "", f"{value:.2f}"]
                for run in (*runs, run)
                for what, points in run.points.items()
                for frames, value in points
            ]
            write_csv(part, HEAD, lines)
            part.replace(self.file)

    def run(
        self, jobs: Iterable[Job], at_once: int, frames: int | None, seconds: float | None = None
    ) -> None:
        """Run the jobs that are not in the file, so many at once, for frames or for seconds."""
        found = {run.job for run in self.runs() if run.is_speed == bool(seconds)}
        missing = [job for job in jobs if job not in found]
        run_all([partial(self._run, job, frames, seconds) for job in missing], at_once)

    def _run(self, job: Job, frames: int | None, seconds: float | None) -> None:
        given = dict(zip(("task", "arm", "seed"), job, strict=True))
        given |= {"frames": frames, "seconds": seconds}
        file = self.results / file_name("speed" if seconds else "run", *job)
        result = kept(file, partial(run_function, self.function, given))
        self.add(Run.of(job, frames or 0, result))

    def by_task(self, tasks: Sequence[str], *, speed: bool = False) -> Groups:
        """Return the runs of each task and arm, sorted by seed; a task without runs is left out."""
        groups: dict[str, dict[str, list[Run]]] = {task: {} for task in tasks}
        for run in sorted(self.runs(), key=lambda run: run.job[2]):
            if run.is_speed == speed:
                groups[run.job[0]].setdefault(run.job[1], []).append(run)
        if not speed and not any(groups.values()):
            raise SystemExit(f"{self.file} has no finished run.")
        return {task: arms for task, arms in groups.items() if arms}

    def missing(self, jobs: Sequence[Job]) -> str:
        """Return a sentence on the runs that are not finished; empty if all are."""
        done = len({run.job for run in self.runs() if not run.is_speed} & {*jobs})
        return "" if done == len(jobs) else f"**{done} of {len(jobs)} runs are finished.** "

    def commits(self) -> str:
        """Return the commits of the runs as text."""
        return ", ".join(dict.fromkeys(run.commit for run in self.runs()))


def rounds(tasks: Sequence[str], arms: Sequence[str], count: int) -> list[Job]:
    """Return the jobs that measure speeds; in every other round the arms are in reverse order."""
    return [
        (task, arm, turn)
        for turn in range(count)
        for task in tasks
        for arm in (arms if turn % 2 == 0 else arms[::-1])
    ]


def curves(groups: Groups, what: str = "evaluation") -> dict[str, dict[str, Curve]]:
    """Return the frames and the values ``[seeds, points]`` of a quantity of all seeds."""
    return {
        task: {arm: common_points([run.points[what] for run in runs]) for arm, runs in arms.items()}
        for task, arms in groups.items()
    }


def final(runs: Sequence[Run]) -> np.ndarray:
    """Return the mean final return of each seed."""
    return np.array([np.mean(run.values("final")) for run in runs])


def last_training(runs: Sequence[Run]) -> np.ndarray:
    """Return the mean return of the last 100 training episodes of each seed."""
    return np.array([run.values("training")[-1] for run in runs if run.values("training")])


def shown(value: float) -> str:
    """Return a return as text, with a decimal if it is small."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"
