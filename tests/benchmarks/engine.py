"""The tutorial's loop written out, and the same run by ``PPOUpdate`` and ``GymCollector``.

``python -m tests.benchmarks.engine`` trains five seeds of each on three tasks and writes
``docs/benchmarks/engine.{csv,md,png}``. Each run leaves its history in ``--results``; finished
runs are skipped.
"""

from __future__ import annotations

import itertools

import numpy as np

from tests.benchmarks.curves import (
    JOBS,
    Curves,
    Plan,
    area,
    bootstrap,
    evaluations,
    train,
    with_interval,
    write_curves,
)
from tests.benchmarks.figures import draw_band, panels
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import markdown

ARMS = {"by hand": [], "engine": ["--engine"], "torchrl": ["--engine", "torchrl"]}
LABELS = {
    "by hand": "loop written out",
    "engine": "--engine: PPOUpdate, GymCollector",
    "torchrl": "PPOUpdate, torchrl's Collector",
}
TASKS = {"CartPole-v1": 50_000, "Pendulum-v1": 80_000, "InvertedDoublePendulum-v5": 100_000}


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the share of evaluations at which the intervals of two arms' means overlap."""
    (low_a, high_a), (low_b, high_b) = bootstrap(a), bootstrap(b)
    return float(((low_a <= high_b) & (low_b <= high_a)).mean())


def section(task: str, frames: np.ndarray, curves: Curves) -> str:
    lines = [
        [LABELS[arm], with_interval(area(frames, returns)), with_interval(returns[:, -1])]
        for arm, returns in curves.items()
    ]
    head = ["", "mean return while learning (95% interval)", "final return (95% interval)"]
    text = f"## {task}, {frames[-1]:,.0f} frames\n\n{markdown(head, lines)}\n\n"
    for one, other in itertools.combinations(curves, 2):
        a, b = (area(frames, curves[arm])[:, None] for arm in (one, other))
        verdict = "overlap" if overlap(a, b) else "**do not overlap**"
        share = overlap(curves[one], curves[other])
        text += (
            f"- {LABELS[one]} against {LABELS[other]}: the intervals of the mean return while "
            f"learning {verdict}; along the curves they do at {share:.0%} of the evaluations.\n"
        )
    return text


def main() -> None:
    bench = Benchmark("engine", __doc__, keeps_results=True, seeds=5, jobs=JOBS)
    arms = {arm: (bench.options.seeds, options) for arm, options in ARMS.items()}
    plans = {task: Plan(frames, ["--env", task], arms) for task, frames in TASKS.items()}
    trained = train(bench, "coding_ppo", plans)
    found = {task: evaluations(histories) for task, histories in trained.items()}
    write_curves(bench.file("csv"), found)
    title = "Mean of the seeds, and its 95% bootstrap interval"
    with panels(bench.file("png"), len(found), (14, 4.2), title) as axes:
        for axis, (task, (frames, curves)) in zip(axes, found.items(), strict=True):
            for arm, returns in curves.items():
                band = bootstrap(returns)
                draw_band(axis, frames / 1_000, returns.mean(0), band, LABELS[arm])
            axis.set(title=task, xlabel="thousand frames (environment steps)")
        axes[0].set_ylabel("evaluation return (raw reward)")
        axes[0].legend(loc="lower right")
    sections = "\n".join(section(task, *of_task) for task, of_task in found.items())
    bench.write_page(f"""# Learning with `PPOUpdate` and with a loop written out

`tutorials/coding_ppo.py` with its loop written out, with `--engine`, and with `--engine torchrl`:
{bench.options.seeds} seeds of each, the mean return of five episodes under the deterministic policy
every second batch, in raw reward. The runs differ in the order of their minibatches and in
rounding, so single curves differ; the comparison is of their means.
`python -m tests.benchmarks.engine`

![Evaluation return over frames](engine.png)

{sections}
""")


if __name__ == "__main__":
    main()
