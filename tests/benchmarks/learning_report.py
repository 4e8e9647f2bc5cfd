"""The page, the figure and the CSV file of the learning benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.stats import bootstrap, trim_mean

from tests.benchmarks.figures import draw_band, panels
from tests.benchmarks.learning_tasks import TASKS
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import markdown, write_csv

COLORS = {"ppokit": "#08519c", "Stable-Baselines3": "#d95f02"}
FEWEST = 4  # seeds for an interval; for fewer, the table has the range
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
    tasks = _tasks(results)
    with panels(path, len(tasks), (3.6 * len(tasks), 6.4), rows=2) as flat:
        axes = np.array(flat).reshape(2, len(tasks))
        for column, task in zip(axes.T, tasks, strict=True):
            for arm, color in COLORS.items():
                if runs := _of(results, task, arm):
                    frames, seconds, returns = _curves(runs)
                    for axis, x in zip(column, (frames / 1e3, seconds), strict=True):
                        draw_band(axis, x, iqm(returns), interval(returns), arm, color=color)
            column[0].set(title=task, xlabel="thousand frames (environment steps)")
            column[1].set_xlabel("seconds of training, other runs beside it")
        for axis in axes[:, 0]:
            axis.set_ylabel("return of the last 100 episodes")
        axes[0, 0].legend()


def csv_lines(results: Sequence[Result], speeds: Sequence[Result]) -> list[list[Any]]:
    lines = []
    for run in results:
        name = [run["task"], run["arm"], run["seed"]]
        for frames, seconds, value in run["curve"]:
            if value is not None:
                row = ["training return", frames, f"{seconds:.1f}", f"{value:.2f}"]
                lines.append([*name, *row])
        frames, final = run["curve"][-1][0], mean(run["final"])
        lines.append([*name, "final return", frames, f"{run['seconds']:.1f}", f"{final:.2f}"])
    for run in speeds:
        row = ["frames a second", "", "", f"{run['frames_per_second']:.0f}"]
        lines.append([run["task"], run["arm"], run["seed"], *row])
    return lines


def write(bench: Benchmark, results: Sequence[Result], speeds: Sequence[Result]) -> None:
    """Write ``learning.{csv,md,png}``."""
    head = ["task", "arm", "seed", "what", "frames", "seconds", "value"]
    write_csv(bench.file("csv"), head, csv_lines(results, speeds))
    if results:
        draw(bench.file("png"), results)
    bench.write_page(f"""# Learning, beside Stable-Baselines3

Both arms have the settings that rl-baselines3-zoo tuned for Stable-Baselines3's PPO, at commit
22e3ff2, for the task or its nearest older version: networks and initial weights, batches,
minibatches, epochs, rates. `ObservationNormalizer` and `RewardNormalizer` replace `VecNormalize`.
Neither arm has the zoo's gSDE (Pendulum). Actions are clipped to their range, and no environment
renders. `python -m tests.benchmarks.learning`, then `--speed`

![Returns over frames and over seconds](learning.png)

Final returns: 20 episodes under the deterministic policy, in raw reward; the interquartile mean
over the seeds, its 95% bootstrap interval (for three seeds the range), and the number of seeds.
"not below": ppokit's mean is at or above the lower end of Stable-Baselines3's interval. "s": median
seconds of training, with other runs beside it. On InvertedDoublePendulum neither arm keeps its
return with the zoo's settings; [the tutorial's](coding_ppo.md) reach 9,000 within 100,000 frames.

{table(results)}

Frames a second of the same assemblies, collecting and training, on one thread with nothing else
running, the arms in turn: median (lowest to highest) of three rounds; the ratio of the medians:

{speed_table(speeds)}
""")
