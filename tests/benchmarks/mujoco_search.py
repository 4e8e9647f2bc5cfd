"""Search for a PPO setting over four MuJoCo tasks at once, with two seeds of 500,000 frames.

Commit ``mujoco_search.csv`` meanwhile: finished runs are not repeated. ``--pages`` writes the page
of the runs so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.benchmarks.figures import draw_bands
from tests.benchmarks.mujoco_record import (
    Job,
    RecordedBenchmark,
    Run,
    evaluations,
    final,
    last_training,
    shown,
)
from tests.benchmarks.mujoco_runs import OPTIONS
from tests.benchmarks.runs import CORES
from tests.benchmarks.tables import markdown

TASKS = ("Hopper-v5", "HalfCheetah-v5", "Swimmer-v5", "Reacher-v5")
SEEDS, FRAMES, PREFIX = range(2), 500_000, "search: "
HEAD = ["", "final evaluation", "highest evaluation", "last 100 training episodes"]
# Written by hand, from the tables.
CHOICE = """The choice follows when all runs are finished."""


def jobs(bench: RecordedBenchmark) -> list[Job]:
    """Return the runs, a seed of every task and option first; a quick search has one task."""
    return [
        (task, PREFIX + option, seed)
        for seed in (SEEDS[:1] if bench.quick else SEEDS)
        for task in (TASKS[-1:] if bench.quick else TASKS)
        for option in OPTIONS
    ]


def cells(option: str, runs: Sequence[Run]) -> list[str]:
    """Return the line of an option: the figures of each seed."""
    highest = [max(run.values("evaluation")) for run in runs]
    measures = (final(runs), highest, last_training(runs))
    return [option, *(" / ".join(map(shown, values)) for values in measures)]


def mean_and_range(returns: np.ndarray) -> tuple[np.ndarray, ...]:
    return returns.mean(0), returns.min(0), returns.max(0)


def main() -> None:
    bench = RecordedBenchmark("mujoco_search")
    if not bench.options.pages:
        bench.record.run(jobs(bench), CORES, 4_000 if bench.quick else FRAMES)
    groups = {
        task: {option: arms[arm] for option in OPTIONS if (arm := PREFIX + option) in arms}
        for task, arms in bench.record.by_task(TASKS).items()
    }
    curves = {
        task: {option: evaluations(runs) for option, runs in options.items()}
        for task, options in groups.items()
    }
    label = ["mean return of 10 evaluation episodes"]
    title = "Mean of the seeds, and their range"
    draw_bands(bench.file("png"), curves, mean_and_range, title, label)
    tried = [
        [option, ", ".join(f"`{name}={value!r}`" for name, value in changes.items()) or "unchanged"]
        for option, changes in OPTIONS.items()
    ]
    tables = [
        f"## {task}\n\n{markdown(HEAD, [cells(*item) for item in options.items()])}\n"
        for task, options in groups.items()
    ]
    sections = "\n".join(tables)
    bench.write_page(f"""# Search for the MuJoCo setting

Each option changes one point of the setting in [`mujoco`](mujoco.md), with advantages computed once
for each batch. The search has four tasks and two seeds, {FRAMES:,} frames each. The scores in
`mujoco` come from other seeds.

{markdown(["option", "change"], tried, "---")}

## Choice

{CHOICE}

![Evaluation over frames](mujoco_search.png)

The line is the mean over the seeds, and the band their range.

{sections}
Each cell has the figure of each seed. Final evaluation: mean of 20 episodes under the deterministic
policy. Highest evaluation: the highest mean of 10 episodes while learning.

Commits of the runs: {bench.record.commits()}.
""")


if __name__ == "__main__":
    main()
