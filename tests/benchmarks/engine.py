"""The tutorial's loop written out, and the same run by the engine: learning is the same.

``python -m tests.benchmarks.engine`` trains five seeds of each on three tasks and writes
``docs/benchmarks/engine.{csv,md,png}``. Each run leaves its history in ``--results``; runs that are
there already are skipped, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import matplotlib
import numpy as np

from tests.benchmarks.curves import Curves, Run, area, bootstrap, returns_of, train_all, write_csv
from tests.benchmarks.report import ROOT, machine, output_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ARMS = {"by hand": [], "engine": ["--engine"], "torchrl": ["--engine", "torchrl"]}
LABELS = {
    "by hand": "loop written out",
    "engine": "--engine: PPOUpdate, GymCollector",
    "torchrl": "PPOUpdate, torchrl's Collector",
}
TASKS = {"CartPole-v1": 50_000, "Pendulum-v1": 80_000, "InvertedDoublePendulum-v5": 100_000}


def runs_of(task: str, results: Path, seeds: int, quick: bool) -> dict[str, list[Run]]:
    """Return the runs of each arm on a task."""
    frames = 2_000 if quick else TASKS[task]
    more = ["--env", task, *(["--quick"] if quick else [])]
    return {
        arm: [
            Run(
                results / f"{task}-{arm.replace(' ', '-')}-{seed}",
                frames,
                [*options, "--seed", str(seed), *more],
            )
            for seed in range(seeds)
        ]
        for arm, options in ARMS.items()
    }


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Share of the evaluations at which the intervals of the means of two arms overlap."""
    (low_a, high_a), (low_b, high_b) = bootstrap(a), bootstrap(b)
    return float(((low_a <= high_b) & (low_b <= high_a)).mean())


def _with_interval(values: np.ndarray) -> str:
    low, high = bootstrap(values)
    return f"{values.mean():,.0f} ({low:,.0f} to {high:,.0f})"


def table(task: str, frames: np.ndarray, curves: Curves) -> str:
    """The figures of a task as a Markdown table, and how the arms compare pairwise."""
    lines = [
        f"## {task}, {frames[-1]:,.0f} frames\n",
        "| | mean return while learning (95% interval) | final return (95% interval) |",
        "|---|---|---|",
    ]
    for arm, returns in curves.items():
        areas, final = area(frames, returns), returns[:, -1]
        lines.append(f"| {LABELS[arm]} | {_with_interval(areas)} | {_with_interval(final)} |")
    lines.append("")
    for one, other in itertools.combinations(curves, 2):
        a, b = (area(frames, curves[arm])[:, None] for arm in (one, other))
        verdict = "overlap" if overlap(a, b) else "**do not overlap**"
        share = overlap(curves[one], curves[other])
        lines.append(
            f"- {LABELS[one]} against {LABELS[other]}: the intervals of the mean return while "
            f"learning {verdict}; along the curves they do at {share:.0%} of the evaluations."
        )
    return "\n".join(lines)


def draw(found: dict[str, tuple[np.ndarray, Curves]], path: Path) -> None:
    """Mean of the seeds and its 95% interval, a panel for each task."""
    figure, axes = plt.subplots(1, len(found), figsize=(14, 4.2), layout="constrained")
    for axis, (task, (frames, curves)) in zip(axes, found.items(), strict=True):
        for arm, returns in curves.items():
            (line,) = axis.plot(frames / 1_000, returns.mean(0), label=LABELS[arm])
            axis.fill_between(
                frames / 1_000, *bootstrap(returns), color=line.get_color(), alpha=0.2
            )
        axis.set(title=task, xlabel="thousand frames (environment steps)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("evaluation return (raw reward)")
    axes[0].legend(loc="lower right")
    seeds = len(next(iter(next(iter(found.values()))[1].values())))
    figure.suptitle(f"Mean of {seeds} seeds, and its 95% bootstrap interval")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "benchmarks" / "engine")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    if args.quick:
        args.seeds, args.results = 1, folder / "runs"
    args.results.mkdir(parents=True, exist_ok=True)
    if not (started := args.results / "machine.txt").exists():
        started.write_text(machine())  # what the runs ran on, not what is there when they are read

    runs = {task: runs_of(task, args.results, args.seeds, args.quick) for task in TASKS}
    each_seed = [
        arms[arm][seed] for seed in range(args.seeds) for arms in runs.values() for arm in ARMS
    ]
    train_all(each_seed, args.jobs)
    found: dict[str, tuple[np.ndarray, Curves]] = {}
    for task, arms in runs.items():
        curves = {arm: returns_of(of_arm) for arm, of_arm in arms.items()}
        frames = next(iter(curves.values()))[0]
        found[task] = frames, {arm: returns for arm, (_, returns) in curves.items()}
    write_csv(found, folder / "engine.csv")
    draw(found, folder / "engine.png")
    tables = "\n\n".join(table(task, *of_task) for task, of_task in found.items())
    text = f"""# The engine learns what the loop learns

`tutorials/coding_ppo.py` with its loop written out, with `--engine`, and with `--engine torchrl`:
{args.seeds} seeds of each, the mean return of five episodes under the deterministic policy every
second batch, in the environment's own reward. The runs differ in the order of their minibatches and
in the rounding of their sums, so single curves differ; what is compared is their mean.
`python -m tests.benchmarks.engine`

![Evaluation return over frames](engine.png)

{tables}

{started.read_text()}
"""
    (folder / "engine.md").write_text(text)
    print(f"{folder / 'engine.md'}\n\n{text}")


if __name__ == "__main__":
    main()
