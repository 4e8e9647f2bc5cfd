"""The tutorial with ppokit's blocks against the same script on TorchRL's own pieces.

``python -m tests.benchmarks.coding_ppo`` trains five seeds of each and writes
``docs/benchmarks/coding_ppo.{csv,md,png}``. Each run leaves its history in ``--results``; runs that
are there already are skipped, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import matplotlib
import numpy as np

from tests.benchmarks.curves import Run, area, bootstrap, returns_of, train_all
from tests.benchmarks.report import ROOT, machine, output_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ARMS = {"ppokit": [], "torchrl": ["--baseline"]}
LABELS = {"ppokit": "ppokit", "torchrl": "TorchRL's own pieces (--baseline)"}
THRESHOLD = 9_000
Curves = dict[str, np.ndarray]  # arm -> [seeds, evaluations]


def runs_of(results: Path, seeds: int, frames: int, quick: bool) -> dict[str, list[Run]]:
    """Return the runs of each arm."""
    more = ["--quick"] if quick else []
    return {
        arm: [
            Run(results / f"{arm}-{seed}", frames, [*options, "--seed", str(seed), *more])
            for seed in range(seeds)
        ]
        for arm, options in ARMS.items()
    }


def frames_to_threshold(frames: np.ndarray, curve: np.ndarray) -> float:
    """Frames at the first evaluation that reaches the threshold; inf if none does."""
    reached = np.flatnonzero(curve >= THRESHOLD)
    return float(frames[reached[0]]) if len(reached) else float("inf")


def table(frames: np.ndarray, curves: Curves, speeds: dict[str, list[float]]) -> str:
    """The figures as a Markdown table."""
    head = (
        "| | median frames to 9,000 | each seed | area under the curve (95% interval) "
        "| final return, median | frames/s, median (spread) |\n|---|---|---|---|---|---|"
    )
    rows = [head]
    for arm, returns in curves.items():
        reached = [frames_to_threshold(frames, curve) for curve in returns]
        areas = area(frames, returns)
        low, high = bootstrap(areas)
        each = ", ".join("never" if np.isinf(r) else f"{r:,.0f}" for r in reached)
        middle = float(np.median(reached))
        median = "never" if np.isinf(middle) else f"{middle:,.0f}"
        speed = speeds[arm]
        rows.append(
            f"| {LABELS[arm]} | {median} | {each} | {areas.mean():,.0f} ({low:,.0f} to "
            f"{high:,.0f}) | {np.median(returns[:, -1]):,.0f} | {np.median(speed):.0f} "
            f"({min(speed):.0f} to {max(speed):.0f}) |"
        )
    return "\n".join(rows)


def draw(frames: np.ndarray, curves: Curves, path: Path) -> None:
    """All seeds and their median, side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (arm, returns), color in zip(axes, curves.items(), ("C0", "C1"), strict=True):
        axis.plot(frames, returns.T, color=color, alpha=0.35, lw=1)
        axis.plot(frames, np.median(returns, 0), color=color, lw=2.5, label="median of the seeds")
        axis.axhline(THRESHOLD, color="gray", ls="--", lw=1, label="9,000")
        axis.set(title=LABELS[arm], xlabel="frames (environment steps)")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    axes[0].set_ylabel("evaluation return (raw reward)")
    figure.suptitle("InvertedDoublePendulum-v5")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-frames", type=int, default=100_000)
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    if args.quick:
        args.seeds, args.total_frames, args.results = 1, 2_000, folder / "runs"
    args.results.mkdir(parents=True, exist_ok=True)
    if not (started := args.results / "machine.txt").exists():
        started.write_text(machine())  # what the runs ran on, not what is there when they are read

    runs = runs_of(args.results, args.seeds, args.total_frames, args.quick)
    train_all([run for of_seed in zip(*runs.values(), strict=True) for run in of_seed], args.jobs)
    frames, curves = np.array([]), {}
    for arm in ARMS:
        frames, curves[arm] = returns_of(runs[arm])
    speeds = {arm: [run.rows()[-1]["frames_per_second"] for run in runs[arm]] for arm in ARMS}
    with (folder / "coding_ppo.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "frames", "eval_return"])
        for arm, returns in curves.items():
            for seed, curve in enumerate(returns):
                writer.writerows([arm, seed, int(f), r] for f, r in zip(frames, curve, strict=True))
    draw(frames, curves, folder / "coding_ppo.png")
    text = f"""# The tutorial, five seeds of each

InvertedDoublePendulum-v5, {args.total_frames:,} frames, the mean return of five episodes under the
deterministic policy every 2,000 frames, in the environment's own reward.
`python -m tests.benchmarks.coding_ppo`

![Evaluation return over frames](coding_ppo.png)

{table(frames, curves, speeds)}

Frames/s are of the whole script, {args.jobs} runs at a time, one thread each. They include the
evaluations, which take longer the earlier a run learns to keep its episodes going: they say how
long to wait, not which loop is faster.

{started.read_text()}
"""
    (folder / "coding_ppo.md").write_text(text)
    print(f"{folder / 'coding_ppo.md'}\n\n{text}")


if __name__ == "__main__":
    main()
