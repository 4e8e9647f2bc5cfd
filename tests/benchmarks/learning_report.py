"""Table, figure and rows of the learning benchmark."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib
import numpy as np
from scipy.stats import bootstrap, trim_mean

from tests.benchmarks.learning_tasks import TASKS
from tests.benchmarks.tables import markdown

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"ppokit": "#08519c", "Stable-Baselines3": "#d95f02"}
FEWEST = 4  # seeds that an interval is given for; of fewer, the range
Result = dict[str, Any]


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


def _of(results: Sequence[Result], task: str, arm: str) -> list[Result]:
    return [x for x in results if x["task"] == task and x["arm"] == arm]


def _final(runs: Sequence[Result]) -> np.ndarray:
    return np.array([mean(run["final"]) for run in runs])


def _tasks(results: Sequence[Result]) -> list[str]:
    return [task for task in TASKS if any(x["task"] == task for x in results)]


def table(results: Sequence[Result]) -> str:
    """Return final returns and seconds, a task a line."""
    lines = []
    for task in _tasks(results):
        cells, lowest = [], None
        for arm in COLORS:
            runs = _of(results, task, arm)
            if not runs:
                cells += ["", ""]
                continue
            final = _final(runs)
            low, high = interval(final)
            if arm != "ppokit":
                lowest = low
            cells += [
                f"{iqm(final):,.0f} ({low:,.0f} to {high:,.0f}; {len(runs)})",
                f"{median(run['seconds'] for run in runs):,.0f}",
            ]
        ours, verdict = _of(results, task, "ppokit"), ""
        if ours and lowest is not None:
            verdict = "yes" if iqm(_final(ours)) >= lowest else "**no**"
        bar = TASKS[task].bar
        cells += [f"{bar:,.0f}" if np.isfinite(bar) else "", verdict]
        lines.append([f"{task}, {TASKS[task].frames:,}", *cells])
    head = ["task, frames", "ppokit", "s", "Stable-Baselines3", "s", "bar", "not below"]
    return markdown(head, lines)


def speed_table(speeds: Sequence[Result]) -> str:
    """Return frames a second, a task a line."""
    lines, arms = [], list(dict.fromkeys([*COLORS, *(run["arm"] for run in speeds)]))
    for task in _tasks(speeds):
        found = {arm: [run["frames_per_second"] for run in _of(speeds, task, arm)] for arm in arms}
        cells = [
            f"{median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})" if each else ""
            for each in found.values()
        ]
        theirs = found["Stable-Baselines3"]
        ratios = [
            f"{median(found[arm]) / median(theirs):.2f}" if found[arm] and theirs else ""
            for arm in arms
            if arm != "Stable-Baselines3"
        ]
        lines.append([task, *cells, " / ".join(filter(None, ratios))])
    return markdown(["task", *arms, "over Stable-Baselines3"], lines)


def _curves(runs: Sequence[Result]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frames ``[points]``, median seconds ``[points]`` and returns ``[seeds, points]``."""
    rows = np.array([run["curve"] for run in runs], dtype=float)
    seen = np.isfinite(rows[..., 2]).all(0)
    return rows[0, seen, 0], np.median(rows[:, seen, 1], axis=0), rows[:, seen, 2]


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw the curves over frames and over seconds, a column for each task."""
    tasks = _tasks(results)
    figure, axes = plt.subplots(
        2, len(tasks), figsize=(3.6 * len(tasks), 6.4), layout="constrained", squeeze=False
    )
    for column, task in zip(axes.T, tasks, strict=True):
        for arm, color in COLORS.items():
            runs = _of(results, task, arm)
            if not runs:
                continue
            frames, seconds, returns = _curves(runs)
            middle, (low, high) = iqm(returns), interval(returns)
            for axis, x in zip(column, (frames / 1e3, seconds), strict=True):
                axis.plot(x, middle, color=color, label=arm)
                axis.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
        column[0].set_title(task)
        column[0].set_xlabel("thousand frames (environment steps)")
        column[1].set_xlabel("seconds of training, other runs beside it")
        for axis in column:
            axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("return of the last 100 episodes")
    axes[0, 0].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def write_csv(path: Path, results: Sequence[Result], speeds: Sequence[Result]) -> None:
    """Write curves, final returns and speeds."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "arm", "seed", "what", "frames", "seconds", "value"])
        for run in results:
            name = [run["task"], run["arm"], run["seed"]]
            for frames, seconds, value in run["curve"]:
                if value is not None:
                    row = ["training return", frames, f"{seconds:.1f}", f"{value:.2f}"]
                    writer.writerow([*name, *row])
            frames, final = run["curve"][-1][0], mean(run["final"])
            row = ["final return", frames, f"{run['seconds']:.1f}", f"{final:.2f}"]
            writer.writerow([*name, *row])
        for run in speeds:
            row = ["frames a second", "", "", f"{run['frames_per_second']:.0f}"]
            writer.writerow([run["task"], run["arm"], run["seed"], *row])


def write_report(
    folder: Path, results: Sequence[Result], speeds: Sequence[Result], machine: str
) -> Path:
    """Write ``learning.{csv,md,png}`` and return the page."""
    write_csv(folder / "learning.csv", results, speeds)
    if results:
        draw(folder / "learning.png", results)
    text = f"""# Learning, beside Stable-Baselines3

Both arms have the settings that rl-baselines3-zoo tuned for Stable-Baselines3's PPO, at commit
22e3ff2, of the task or of its nearest older version: networks and their initial weights, batches,
minibatches, epochs, rates. `VecNormalize` is `ObservationNormalizer` and `RewardNormalizer` in
ours. Where the zoo has gSDE (Pendulum), both arms are without. Actions are clipped to their range.
No environment renders: `make_vec_env` would have them do so, and LunarLander simulates sparks then.
`python -m tests.benchmarks.learning`, then `--speed`

![Returns over frames and over seconds](learning.png)

Final returns: 20 episodes under the deterministic policy, in raw reward; the interquartile mean
over the seeds, its 95% bootstrap interval (of three seeds their range), and the number of seeds.
"not below": whether ours is at or above the lower end of Stable-Baselines3's interval. "s": seconds
of training, the median, with other runs beside it; the table after this one compares speeds. On
InvertedDoublePendulum the zoo's settings hold their return in neither arm;
[the tutorial's](coding_ppo.md) reach 9,000 within its 100,000 frames.

{table(results)}

Frames a second of the same assemblies, collecting and training, on one thread with nothing else
running, the arms in turn, median (lowest to highest) of three rounds; the ratio of the
medians:

{speed_table(speeds)}

{machine}
"""
    (folder / "learning.md").write_text(text)
    return folder / "learning.md"
