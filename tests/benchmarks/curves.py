"""Runs of a tutorial, one folder each, and what their curves are compared by."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tests.benchmarks.report import ROOT
from tests.benchmarks.runs import read_json


@dataclass(frozen=True)
class Run:
    """A run of a tutorial: where its result goes, and its options."""

    out: Path
    frames: int
    options: Sequence[str]
    tutorial: str = "coding_ppo"

    def train(self) -> None:
        """Train, unless the result is there."""
        if self.is_done():
            return
        command = [sys.executable, str(ROOT / "tutorials" / f"{self.tutorial}.py"), *self.options]
        command += ["--out", str(self.out), "--total-frames", str(self.frames)]
        with self.out.with_name(f"{self.out.name}.log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)

    def is_done(self) -> bool:
        """Whether the result is there."""
        there = (self.out / "history.json").exists()
        return there and self.rows()[-1]["total_frames"] >= self.frames

    def rows(self) -> list[dict[str, float]]:
        """Return what was noted after each batch."""
        return read_json(self.out / "history.json")

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the frames and the returns of the evaluations."""
        rows = [row for row in self.rows() if "eval_return" in row]
        frames = [row["total_frames"] for row in rows]
        return np.array(frames), np.array([row["eval_return"] for row in rows])


Curves = dict[str, np.ndarray]
"""The returns of each arm, ``[seeds, evaluations]``."""


def train_all(runs: Sequence[Run], jobs: int) -> None:
    """Train so many at a time, with a progress bar."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run.train) for run in runs]
        for future in tqdm(as_completed(futures), total=len(runs), unit="run"):
            future.result()


def returns_of(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Return the frames of the evaluations, and the returns ``[runs, evaluations]``."""
    found = [run.evaluations() for run in runs]
    return found[0][0], np.stack([returns for _, returns in found])


def bootstrap(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean over the first dimension, from 10,000 resamples."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(10_000, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def area(frames: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """Area under each curve over the frames: the mean return while learning."""
    between = (curves[..., 1:] + curves[..., :-1]) / 2
    return (between * np.diff(frames)).sum(-1) / (frames[-1] - frames[0])


def write_csv(found: Mapping[str, tuple[np.ndarray, Curves]], path: Path) -> None:
    """Write every evaluation of every run of every task."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "arm", "seed", "frames", "eval_return"])
        for task, (frames, curves) in found.items():
            for arm, returns in curves.items():
                for seed, curve in enumerate(returns):
                    rows = zip(frames, curve, strict=True)
                    writer.writerows([task, arm, seed, int(f), r] for f, r in rows)
