"""The tutorial with ppokit's blocks, and the same script with TorchRL's own classes.

``python -m tests.benchmarks.coding_ppo`` trains five seeds of each and writes
``docs/benchmarks/coding_ppo.{csv,md,png}``. Each run leaves its history in ``--results``; finished
runs are skipped.
"""

from __future__ import annotations

import numpy as np

from tests.benchmarks.curves import JOBS, Curves, Plan, area, evaluations, train, with_interval
from tests.benchmarks.figures import FRAMES, panels
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import markdown, write_csv

TASK, THRESHOLD = "InvertedDoublePendulum-v5", 9_000
ARMS = {"ppokit": [], "torchrl": ["--baseline"]}
LABELS = {"ppokit": "ppokit", "torchrl": "TorchRL's own pieces (--baseline)"}


def frames_to_threshold(frames: np.ndarray, curve: np.ndarray) -> float:
    """Frames at the first evaluation that reaches the threshold; inf if none does."""
    reached = np.flatnonzero(curve >= THRESHOLD)
    return float(frames[reached[0]]) if len(reached) else float("inf")


def table(frames: np.ndarray, curves: Curves, speeds: dict[str, list[float]]) -> str:
    lines = []
    for arm, returns in curves.items():
        reached = [frames_to_threshold(frames, curve) for curve in returns]
        middle, *each = [
            "never" if np.isinf(x) else f"{x:,.0f}" for x in (float(np.median(reached)), *reached)
        ]
        speed = speeds[arm]
        cells = [
            LABELS[arm],
            middle,
            ", ".join(each),
            with_interval(area(frames, returns)),
            f"{np.median(returns[:, -1]):,.0f}",
            f"{np.median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f})",
        ]
        lines.append(cells)
    head = ["", "median frames to 9,000", "each seed", "area under the curve (95% interval)"]
    return markdown([*head, "final return, median", "frames/s, median (range)"], lines)


def draw(bench: Benchmark, frames: np.ndarray, curves: Curves) -> None:
    with panels(bench.file("png"), 2, (10, 4), TASK, sharey=True) as axes:
        for axis, (arm, returns), color in zip(axes, curves.items(), ("C0", "C1"), strict=True):
            axis.plot(frames, returns.T, color=color, alpha=0.35, lw=1)
            median = np.median(returns, 0)
            axis.plot(frames, median, color=color, lw=2.5, label="median of the seeds")
            axis.axhline(THRESHOLD, color="gray", ls="--", lw=1, label="9,000")
            axis.set(title=LABELS[arm], xlabel=FRAMES)
            axis.legend(loc="lower right")
        axes[0].set_ylabel("evaluation return (raw reward)")


def main() -> None:
    options = {"seeds": 5, "total_frames": 100_000, "jobs": JOBS}
    bench = Benchmark("coding_ppo", __doc__, keeps_results=True, **options)
    given = bench.options
    arms = {arm: (given.seeds, options) for arm, options in ARMS.items()}
    histories = train(bench, "coding_ppo", {TASK: Plan(given.total_frames, [], arms)})[TASK]
    frames, curves = evaluations(histories)
    speeds = {arm: [run[-1]["frames_per_second"] for run in histories[arm]] for arm in ARMS}
    lines = [
        [arm, seed, int(frame), value]
        for arm, returns in curves.items()
        for seed, curve in enumerate(returns)
        for frame, value in zip(frames, curve, strict=True)
    ]
    write_csv(bench.file("csv"), ["arm", "seed", "frames", "eval_return"], lines)
    draw(bench, frames, curves)
    bench.write_page(f"""# The tutorial, five seeds of each

{TASK}, {frames[-1]:,.0f} frames, the mean return of five episodes under the deterministic policy
every 2,000 frames, in raw reward. `python -m tests.benchmarks.coding_ppo`

![Evaluation return over frames](coding_ppo.png)

{table(frames, curves, speeds)}

Frames/s are of the whole script, {given.jobs} runs at a time, one thread each. They include the
evaluations, which take longer for a better policy.
""")


if __name__ == "__main__":
    main()
