"""The blocks of the tutorial, and TorchRL's classes in the loop that the tutorial begins with."""

from __future__ import annotations

from statistics import median

import numpy as np

from tests.benchmarks.curves import Curve, Curves, Plan, area, with_interval
from tests.benchmarks.figures import draw_bands
from tests.benchmarks.runs import CORES
from tests.benchmarks.tables import reached, with_range

TASK, THRESHOLD = "InvertedDoublePendulum-v5", 9_000
ARMS = {"ppokit": (5, []), "TorchRL's classes": (5, ["--baseline"])}
HEAD = ["", "median frames to 9,000", "each seed", "area under the curve (95% interval)"]
HEAD += ["final return, median", "frames/s, median (range)"]


def cells(bench: Curves, arm: str, curve: Curve) -> list[str]:
    runs, never = bench.histories[TASK, arm], {"total_frames": np.inf}
    ends = [reached(run, "eval_return", THRESHOLD) or never for run in runs]
    frames = [end["total_frames"] for end in ends]
    middle, *each = ["never" if np.isinf(x) else f"{x:,.0f}" for x in (median(frames), *frames)]
    speed = [run[-1]["total_frames"] / run[-1]["seconds"] for run in runs]
    return [
        arm,
        middle,
        ", ".join(each),
        with_interval(area(curve)),
        f"{np.median(curve[1][:, -1]):,.0f}",
        with_range(speed, ".0f"),
    ]


def median_and_range(returns: np.ndarray) -> tuple[np.ndarray, ...]:
    return np.median(returns, 0), returns.min(0), returns.max(0)


def main() -> None:
    bench = Curves("coding_ppo", "coding_ppo", {TASK: Plan(100_000, [], ARMS)})
    title, label = "Median of the seeds, and their range", ["evaluation return (raw reward)"]
    draw_bands(bench.file("png"), bench.evaluations, median_and_range, title, label)
    sections = bench.sections(HEAD, lambda _, arm, curve: cells(bench, arm, curve))
    bench.write_page(f"""# The tutorial, five seeds of each

The mean return of five episodes under the deterministic policy every 2,000 frames, in raw reward.

![Evaluation return over frames](coding_ppo.png)

{sections}
`tests/benchmarks/assemblies/coding_ppo.py` makes the runs. The arms differ in the algorithm:
TorchRL's loop has no scaled rewards, no dual clip and no KL stop, computes the advantage in each
epoch, and standardizes observations by 1,000 random steps. Frames/s are of collection and updates,
{CORES} runs at a time, one thread each; ppokit's are compiled.
""")


if __name__ == "__main__":
    main()
