"""Learning curves of ppokit and Stable-Baselines3, with the same tuned settings.

All runs take some ten hours of one core: first every task, arm and seed, as many at a time as there
are cores, then the rounds that measure frames a second, one at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median

import numpy as np

from tests.benchmarks.curves import interval, iqm, iqm_and_interval, iqm_text
from tests.benchmarks.figures import draw_bands
from tests.benchmarks.learning_arms import TASKS
from tests.benchmarks.mujoco_record import SPEED, Groups, Job, Record, curves, final, rounds
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import CORES
from tests.benchmarks.tables import markdown, with_range

OURS, SB3, COMPILED = "ppokit", "Stable-Baselines3", "ppokit, compiled"
QUICK_TASKS = ("CartPole-v1", "InvertedDoublePendulum-v5")


def score_table(groups: Groups) -> str:
    lines = []
    for task, arms in groups.items():
        returns = {arm: final(runs) for arm, runs in arms.items()}
        cells = {arm: f"{iqm_text(x)}; {len(x)}" for arm, x in returns.items()}
        verdict = ""
        if SB3 in returns:
            verdict = "yes" if iqm(returns[OURS]) >= interval(returns[SB3])[0] else "**no**"
        bar = f"{TASKS[task].bar:,.0f}" if np.isfinite(TASKS[task].bar) else ""
        name = f"{task}, {TASKS[task].frames:,}"
        lines.append([name, cells[OURS], cells.get(SB3, ""), bar, verdict])
    return markdown(["task, frames", OURS, SB3, "bar", "not below"], lines)


def speed_table(groups: Groups, arms: Sequence[str]) -> str:
    lines = []
    for task, runs in groups.items():
        found = {arm: [run.values(SPEED)[0] for run in runs[arm]] for arm in arms}
        cells = [with_range(x) for x in found.values()]
        ratios = [
            f"{median(found[arm]) / median(found[SB3]):.2f}"
            for arm in arms
            if SB3 in arms and arm != SB3
        ]
        lines.append([task, *cells, " / ".join(ratios)])
    return markdown(["task", *arms, f"over {SB3}"], lines)


def main() -> None:
    packages = ("stable-baselines3", "mujoco", "box2d")
    bench = Benchmark("learning", keeps_results=True, packages=packages)
    arms = [OURS, SB3] if find_spec("stable_baselines3") else [OURS]
    record = Record(bench.results / "record.csv", bench.results, "learning_arms.run")
    jobs: list[Job] = [
        (name, arm, seed)
        for seed in range(1 if bench.quick else 5)
        for name, task in TASKS.items()
        for arm in arms
        if seed < task.seeds and (not bench.quick or name in QUICK_TASKS)
    ]
    record.run(jobs, CORES, 2_000 if bench.quick else None)
    timed = arms if bench.quick else [*arms, COMPILED]
    turns = rounds(QUICK_TASKS, arms, 1) if bench.quick else rounds([*TASKS], timed, 3)
    record.run(turns, 1, 10**9, 0.5 if bench.quick else 20.0)
    shutil.copy(record.file, bench.file("csv"))
    groups = record.by_task([*TASKS])
    title = "Interquartile mean of the seeds, and its 95% interval"
    label = ["return of the last 100 episodes"]
    draw_bands(bench.file("png"), curves(groups, "training"), iqm_and_interval, title, label)
    bench.write_page(f"""# Learning, beside Stable-Baselines3

Both arms have the settings that rl-baselines3-zoo tuned for Stable-Baselines3's PPO, at commit
22e3ff2, for the task or its nearest older version: networks and initial weights, batches,
minibatches, epochs, rates. `ObservationNormalizer` and `RewardNormalizer` replace `VecNormalize`.
Neither arm has the zoo's gSDE (Pendulum). Actions are clipped to their range, and no environment
renders.

![Returns over frames](learning.png)

Final returns: 20 episodes under the deterministic policy, in raw reward; the interquartile mean
over the seeds, its 95% bootstrap interval (for three seeds the range), and the number of seeds.
"not below": ppokit's mean is at or above the lower end of Stable-Baselines3's interval. On
InvertedDoublePendulum neither arm keeps its return with the zoo's settings; [the
tutorial's](coding_ppo.md) reach 9,000 within 100,000 frames. On Hopper both arms are far below
published figures. For the MuJoCo tasks use the setting of [mujoco](mujoco.md).

{score_table(groups)}

Frames a second of the same assemblies, collecting and training, on one thread with nothing else
running, the arms in turn: median (lowest to highest) of three rounds; the ratio of the medians:

{speed_table(record.by_task([*TASKS], speed=True), timed)}
""")


if __name__ == "__main__":
    main()
