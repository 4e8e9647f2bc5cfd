"""MuJoCo tasks with one setting: scores beside published ones, and Stable-Baselines3.

All runs take some ten hours of one core: first a seed of every task, then the next seed, two runs
at once; then the rounds that measure frames a second, one at a time. Commit ``mujoco.csv``
meanwhile: finished runs are not repeated. ``--pages`` writes the page of the runs so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median

import numpy as np

from tests.benchmarks.curves import common_points, iqm, iqm_and_interval, iqm_text
from tests.benchmarks.figures import draw_bands
from tests.benchmarks.mujoco_record import (
    SPEED,
    Groups,
    Job,
    Record,
    Run,
    curves,
    final,
    last_training,
    rounds,
    shown,
)
from tests.benchmarks.mujoco_runs import FALLING, OURS, SB3, TASKS
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import CORES
from tests.benchmarks.tables import markdown

ARMS = [OURS, SB3] if find_spec("stable_baselines3") else [OURS]
COMPARED = ("Hopper-v5", "Walker2d-v5", "Ant-v5")
QUICK_TASKS = ("Hopper-v5", "Reacher-v5")
SEEDS = {OURS: range(20, 25), FALLING: range(10, 15), SB3: range(10, 13)}
FRAMES = 1_000_000
LABELS = ["mean return of 10 evaluation episodes", "", ""] * 3

# Mean and standard deviation: SB3-zoo (benchmark.md; deviation over episodes), Tianshou
# (examples/mujoco), CleanRL (docs/rl-algorithms/ppo.md).
TABLE = """
HalfCheetah-v5            | 5,819 ± 664 | 5,784 ± 1,244 | 1,443 ± 46
Hopper-v5                 | 2,410 ± 10  | 2,609 ± 701   | 2,383 ± 272
Walker2d-v5               | 3,479 ± 822 | 3,589 ± 757   | 2,288 ± 572
Ant-v5                    | 1,327 ± 452 | 3,258 ± 1,079 |
Humanoid-v5               |             | 787 ± 194     | 716 ± 49
Swimmer-v5                | 282 ± 10    | 66.7 ± 99     |
Reacher-v5                |             | -4.1          |
InvertedPendulum-v5       |             | 1,000         | 963 ± 22
InvertedDoublePendulum-v5 |             | 9,231 ± 270   |
"""
LINES = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
PUBLISHED = {name: figures for name, *figures in LINES}
SOURCES = [
    ["final evaluation", "SB3-zoo", "v3", "1", "tuned for each task, but Ant"],
    ["highest evaluation", "Tianshou", "v3; Reacher and pendulums v2", "10", "one for all tasks"],
    ["last 100 training episodes", "CleanRL", "v4", "3", "one for all tasks"],
]
SETTING = {
    "networks": "policy and value separate, 2x64, tanh; orthogonal weights with gain √2, 0.01 in "
    "the last layer of the policy, 1 in the last layer of the value",
    "distribution": "`IndependentNormal`; log-scale independent of the state, starts at -0.5; a "
    "wrapper of the environment clips actions",
    "batch": "one environment, 2,048 frames",
    "update": "10 epochs, minibatches of 64; advantages recomputed in each epoch and normalized "
    "per minibatch",
    "loss": "clip range 0.2, no dual clip; squared critic loss, coefficient 0.25; no entropy bonus",
    "advantages": "gamma 0.99, lambda 0.95",
    "optimizer": "Adam, eps 1e-8; gradient norm at most 0.5; learning rate 3e-4 or less, by "
    "`AdaptiveLearningRate` with a target KL that falls linearly from 0.02 to 0.001",
    "normalization": "observations by running mean and standard deviation, clipped at 10; rewards "
    "by the running standard deviation of returns, clipped at 10",
}


def number(figure: str) -> float:
    """Return the mean of a published figure; for an empty one infinity."""
    return float(figure.split(" ")[0].replace(",", "")) if figure else np.inf


def mean_and_deviation(values: np.ndarray) -> str:
    """Return mean and standard deviation over the seeds as text."""
    if not len(values):
        return ""
    return shown(values.mean()) + (f" ± {shown(values.std(ddof=1))}" if len(values) > 1 else "")


def highest(runs: Sequence[Run]) -> np.ndarray:
    """Return the returns of the seeds at the highest point of their mean evaluation."""
    _, returns = common_points([run.points["evaluation"] for run in runs])
    return returns[:, returns.mean(0).argmax()]


def score_table(groups: Groups, arm: str = OURS) -> str:
    head = ["task", "seeds", "final evaluation", "SB3-zoo", "highest evaluation", "Tianshou"]
    lines = []
    for task, arms in groups.items():
        if not (runs := arms.get(arm)):
            continue
        ends, most, training = final(runs), highest(runs), last_training(runs)
        cells = [iqm_text(ends, shown), mean_and_deviation(most), mean_and_deviation(training)]
        means = [float(iqm(ends)), most.mean(), training.mean() if len(training) else -np.inf]
        line = [task, str(len(runs))]
        for cell, mean, figure in zip(cells, means, PUBLISHED[task], strict=True):
            line += [f"**{cell}**" if mean >= number(figure) else cell, figure]
        lines.append(line)
    return markdown([*head, "last 100 training episodes", "CleanRL"], lines)


def distance(groups: Groups) -> str:
    """Return a sentence for each of Ant and Humanoid, on the distance to Tianshou's maximum."""
    text = []
    for task in ("Ant-v5", "Humanoid-v5"):
        if runs := groups.get(task, {}).get(OURS):
            most, figure = highest(runs).mean(), number(PUBLISHED[task][1])
            side = "above" if most >= figure else "below"
            share = f"{abs(most - figure):,.0f} ({abs(most / figure - 1):.0%}) {side}"
            text += [f"On {task} the highest evaluation is {share} Tianshou's {figure:,.0f}."]
    return "\n".join(text)


def peer_table(groups: Groups, speeds: Groups) -> str:
    """Return the table of final returns and frames a second, beside Stable-Baselines3."""
    lines = []
    for task in COMPARED:
        runs, timed = groups.get(task, {}), speeds.get(task, {})
        line: list[str] = [task]
        for arm in (OURS, FALLING, SB3):
            own = runs.get(arm)
            line.append(f"{iqm_text(final(own), shown)}; {len(own)}" if own else "")
        rates = {arm: median([run.values(SPEED)[0] for run in timed[arm]]) for arm in timed}
        line += [f"{rates[arm]:,.0f}" if arm in rates else "" for arm in (OURS, SB3)]
        line.append(f"{rates[OURS] / rates[SB3]:.2f}" if len(rates) == 2 else "")
        lines += [line] if any(line[1:]) else []
    head = ["task", *(f"{arm}, final" for arm in (OURS, FALLING, SB3))]
    head += [f"{arm}, frames/s" for arm in (OURS, SB3)]
    return markdown([*head, "ratio"], lines)


def page(record: Record, unfinished: str) -> str:
    groups, speeds = record.by_task(TASKS), record.by_task(TASKS, speed=True)
    measures = ["measure", "published by", "versions of the tasks", "seeds", "setting"]
    return f"""# MuJoCo

{unfinished}One setting on nine tasks, {FRAMES:,} frames each.
[`mujoco_search`](mujoco_search.md) compares the options of this setting on four of the tasks, with
other seeds.

{markdown(["", "setting"], SETTING.items(), "---")}

![Evaluation over frames](mujoco.png)

The line is the interquartile mean over the seeds. The band is its 95% bootstrap interval, or the
range of fewer than four seeds. Evaluations use the deterministic policy and raw rewards.

## Published figures

Published figures use three measures, and older versions of the tasks. The table has each measure
beside the figures published in it. Bold: the figure of ppokit is at or above the published one.

- **Final evaluation**: 20 episodes after the last update; interquartile mean over the seeds (95%
  bootstrap interval).
- **Highest evaluation**: the highest point of the mean evaluation curve; mean ± standard deviation
  over the seeds at this point. A maximum over a noisy curve is biased upwards.
- **Last 100 training episodes**: mean ± standard deviation over the seeds, with exploration.

{score_table(groups)}

{markdown(measures, SOURCES, "---")}

The deviation of SB3-zoo is over episodes of one policy, the others are over seeds. On Ant, SB3-zoo
uses the defaults of Stable-Baselines3. On Swimmer it adds a gamma of 0.9999.
{distance(groups)}

## Learning rate that falls to 0

A rate that falls linearly from 3e-4 to 0, in place of the
[adaptive learning rate](../howto/which_kl_stop.md), with other seeds. The rest of the setting is
the same.

{score_table(groups, FALLING)}

## Stable-Baselines3

Stable-Baselines3 has neither an adaptive learning rate nor recomputed advantages: its rate falls
to 0, and it computes advantages once for each batch. The rest of the setting is the same. Final
evaluation: interquartile mean (interval; seeds). For fewer than four seeds the interval is the
range. Frames a second: collecting and training on one thread, with nothing else running, the arms
in turn; median of three rounds. ppokit is compiled.

{peer_table(groups, speeds)}

Commits of the runs: {record.commits()}.
"""


def main() -> None:
    packages = ("stable-baselines3", "mujoco")
    bench = Benchmark("mujoco", keeps_results=True, packages=packages, has_record=True)
    record = Record(bench.file("csv"), bench.results)
    jobs: list[Job] = [
        (task, arm, SEEDS[arm][number])  # a seed of every task first
        for number in range(1 if bench.quick else len(SEEDS[OURS]))
        for arm in (*ARMS, FALLING)
        for task in (QUICK_TASKS if bench.quick else TASKS)
        if arm != SB3 or (task in COMPARED and number < len(SEEDS[SB3]))
    ]
    if not bench.options.pages:
        record.run(jobs, CORES, 4_000 if bench.quick else FRAMES)
        turns = rounds(QUICK_TASKS[:1], ARMS, 1) if bench.quick else rounds(COMPARED, ARMS, 3)
        record.run(turns, 1, 10**9, 1.0 if bench.quick else 20.0)
    title = "Interquartile mean of the seeds, and its 95% interval"
    found = {
        task: {arm: arms[arm] for arm in SEEDS if arm in arms}
        for task, arms in curves(record.by_task(TASKS)).items()
    }
    draw_bands(bench.file("png"), found, iqm_and_interval, title, LABELS)
    bench.write_page(page(record, record.missing(jobs)))


if __name__ == "__main__":
    main()
