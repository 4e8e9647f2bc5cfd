"""Learning curves of the tutorials over seeds, and statistics to compare them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import Row, file_name, run_all, run_tutorial
from tests.benchmarks.tables import write_csv

JOBS = max(1, os.cpu_count() or 1)
Histories = dict[str, list[list[Row]]]
"""The rows of each batch, of each arm and seed."""
Curves = dict[str, np.ndarray]
"""The evaluation returns of each arm, ``[seeds, evaluations]``."""


@dataclass(frozen=True)
class Plan:
    """The runs of a task: its options for the tutorial, and the seeds and options of each arm."""

    frames: int
    options: Sequence[str]
    arms: Mapping[str, tuple[int, Sequence[str]]]
    quick_frames: int = 2_000


def train(bench: Benchmark, tutorial: str, plans: Mapping[str, Plan]) -> dict[str, Histories]:
    """Train every task, arm and seed, ``--jobs`` at a time; finished runs are read."""
    cells, jobs = [], []
    for task, plan in plans.items():
        frames = plan.quick_frames if bench.quick else plan.frames
        for arm, (seeds, options) in plan.arms.items():
            for seed in range(1 if bench.quick else seeds):
                out = bench.results / Path(file_name(task, arm, seed)).stem
                given = [*plan.options, *options, "--seed", str(seed)]
                given += ["--total-frames", str(frames), *(["--quick"] if bench.quick else [])]
                is_done = partial(_reaches, frames=frames)
                cells.append((task, arm, seed))
                jobs.append(partial(run_tutorial, tutorial, given, out, is_done))
    order = sorted(range(len(cells)), key=lambda index: cells[index][2])  # a seed of each first
    results = dict(zip(order, run_all([jobs[i] for i in order], bench.options.jobs), strict=True))
    found: dict[str, Histories] = {task: {arm: [] for arm in plans[task].arms} for task in plans}
    for index, (task, arm, _) in enumerate(cells):
        found[task][arm].append(results[index])
    return found


def _reaches(rows: list[Row], *, frames: int) -> bool:
    return rows[-1]["total_frames"] >= frames


def evaluations(histories: Histories) -> tuple[np.ndarray, Curves]:
    """Return the frames of the evaluations, and their returns for each arm."""
    frames, curves = np.array([]), {}
    for arm, seeds in histories.items():
        rows = [[row for row in history if "eval_return" in row] for history in seeds]
        frames = np.array([row["total_frames"] for row in rows[0]])
        curves[arm] = np.array([[row["eval_return"] for row in seed] for seed in rows])
    return frames, curves


def bootstrap(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean over the first dimension, from 10,000 resamples."""
    low, high = np.percentile(
        resampled_means(values, np.random.default_rng(0)), [2.5, 97.5], axis=0
    )
    return low, high


def resampled_means(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return 10,000 bootstrap means over the first dimension."""
    return values[random.integers(len(values), size=(10_000, len(values)))].mean(1)


def with_interval(values: np.ndarray, style: str = ",.0f") -> str:
    """Return the mean and its 95% interval as text."""
    low, high = bootstrap(values)
    return f"{values.mean():{style}} ({low:{style}} to {high:{style}})"


def area(frames: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """Area under each curve over the frames: the mean return while learning."""
    between = (curves[..., 1:] + curves[..., :-1]) / 2
    return (between * np.diff(frames)).sum(-1) / (frames[-1] - frames[0])


def write_curves(path: Path, found: Mapping[str, tuple[np.ndarray, Curves]]) -> None:
    """Write every evaluation of every run of every task."""
    lines = [
        [task, arm, seed, int(frame), value]
        for task, (frames, curves) in found.items()
        for arm, returns in curves.items()
        for seed, curve in enumerate(returns)
        for frame, value in zip(frames, curve, strict=True)
    ]
    write_csv(path, ["task", "arm", "seed", "frames", "eval_return"], lines)
