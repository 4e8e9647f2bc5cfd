"""Learning curves of scripts over seeds, and statistics to compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.stats import bootstrap, trim_mean

from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import CORES, Row, file_name, run_all, run_script
from tests.benchmarks.tables import markdown, write_csv

Curve = tuple[np.ndarray, np.ndarray]
Histories = dict[tuple[str, str], list[list[Row]]]  # of each task and arm, seed by seed
FEWEST = 4  # seeds for an interval of the interquartile mean; for fewer, the range


@dataclass(frozen=True)
class Plan:
    """The runs of a task: its options for the script, and the seeds and options of each arm."""

    frames: int
    options: Sequence[str]
    arms: Mapping[str, tuple[int, Sequence[str]]]
    quick_frames: int = 2_000


class Curves(Benchmark):
    """The evaluations of a script while it learns, for each task, arm and seed.

    Attributes:
        histories: the rows of each batch, of each task, arm and seed.
        evaluations: frames ``[evaluations]`` and returns ``[seeds, evaluations]`` of each task and
            arm.
    """

    def __init__(self, name: str, script: str, plans: Mapping[str, Plan]) -> None:
        super().__init__(name, keeps_results=True)
        self.histories = self._train(script, plans)
        self.evaluations: dict[str, dict[str, Curve]] = {task: {} for task in plans}
        lines = []
        for (task, arm), histories in self.histories.items():
            rows = [[row for row in history if "eval_return" in row] for history in histories]
            frames = np.array([row["total_frames"] for row in rows[0]])
            returns = np.array([[row["eval_return"] for row in seed] for seed in rows])
            self.evaluations[task][arm] = frames, returns
            for (seed, index), value in np.ndenumerate(returns):
                lines.append([task, arm, seed, int(frames[index]), value])
        write_csv(self.file("csv"), ["task", "arm", "seed", "frames", "eval_return"], lines)

    def _train(self, script: str, plans: Mapping[str, Plan]) -> Histories:
        cells = [
            (seed, task, arm)
            for task, plan in plans.items()
            for arm, (seeds, _) in plan.arms.items()
            for seed in range(1 if self.quick else seeds)
        ]
        cells.sort(key=lambda cell: cell[0])  # a seed of each first

        def run(seed: int, task: str, arm: str) -> list[Row]:
            plan = plans[task]
            out = (self.results / file_name(task, arm, seed)).with_suffix("")
            given = [*plan.options, *plan.arms[arm][1], "--seed", seed, "--total-frames"]
            given += [plan.quick_frames, "--quick"] if self.quick else [plan.frames]
            return run_script(script, given, out)

        found: Histories = {cell[1:]: [] for cell in cells}
        histories = run_all([partial(run, *cell) for cell in cells], CORES)
        for cell, history in zip(cells, histories, strict=True):
            found[cell[1:]].append(history)
        return found

    def sections(
        self, head: Sequence[str], cells: Callable[[str, str, Curve], Sequence[str]]
    ) -> str:
        """Return a table for each task, with a line for each arm."""
        parts = []
        for task, arms in self.evaluations.items():
            table = markdown(head, [cells(task, arm, curve) for arm, curve in arms.items()])
            last = max(frames[-1] for frames, _ in arms.values())
            parts.append(f"## {task}, {last:,.0f} frames\n\n{table}\n")
        return "\n".join(parts)


def area(curve: Curve) -> np.ndarray:
    """Return the mean return while learning: the area under each seed's curve."""
    frames, returns = curve
    between = (returns[:, 1:] + returns[:, :-1]) / 2
    return (between * np.diff(frames)).sum(-1) / (frames[-1] - frames[0])


def mean_and_interval(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the mean over the first dimension, and its 95% bootstrap interval."""
    random = np.random.default_rng(0)
    means = values[random.integers(len(values), size=(10_000, len(values)))].mean(1)
    return values.mean(0), *np.percentile(means, [2.5, 97.5], axis=0)


def with_interval(values: np.ndarray, style: str = ",.0f") -> str:
    """Return the mean and its 95% interval as text."""
    mean, low, high = mean_and_interval(values)
    return f"{mean:{style}} ({low:{style}} to {high:{style}})"


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean (Agarwal et al., 2021, arXiv:2108.13264): without the outer quarters."""
    return trim_mean(values, 0.25, axis=axis)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% bootstrap interval of the IQM over the first dimension; the range of few seeds."""
    if len(values) < FEWEST or (values == values[0]).all():
        return values.min(0), values.max(0)
    found = bootstrap(
        (values,), iqm, axis=0, method="percentile", n_resamples=5_000, rng=np.random.default_rng(0)
    ).confidence_interval
    return found.low, found.high


def iqm_text(values: np.ndarray, write: Callable[[float], str] = "{:,.0f}".format) -> str:
    """Return the interquartile mean and its interval as text."""
    middle, low, high = (write(float(x)) for x in iqm_and_interval(values))
    return f"{middle} ({low} to {high})"


def iqm_and_interval(returns: np.ndarray) -> tuple[np.ndarray, ...]:
    return iqm(returns), *interval(returns)


def mean_and_range(returns: np.ndarray) -> tuple[np.ndarray, ...]:
    return returns.mean(0), returns.min(0), returns.max(0)


def common_points(seeds: Sequence[Sequence[Sequence[float]]]) -> Curve:
    """Return the frames at which every seed has a value, and the values ``[seeds, points]``."""
    points = [dict(map(tuple, seed)) for seed in seeds]
    frames = sorted(set.intersection(*map(set, points)))
    return np.array(frames), np.array([[seed[x] for x in frames] for seed in points])
