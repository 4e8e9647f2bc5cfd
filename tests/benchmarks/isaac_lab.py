"""Isaac Lab's loop with TorchRL's classes and with ppokit's. It takes 25 minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from tests import isaac_env
from tests.benchmarks.curves import Curve, common_points, mean_and_range
from tests.benchmarks.figures import draw_bands
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import run_jobs
from tests.benchmarks.tables import markdown, write_csv
from tests.isaac_lab import make_networks, page_program, settings, train_with_torchrl

ENVS, STEPS, SEEDS = 512, 16, 10
TASKS = {"CartPole": 60, "Pendulum": 100}  # iterations
PEER = "Isaac Lab's loop, on torchrl"
ARMS = {"ppokit, compiled": True, "ppokit, eager": False}
Points = dict[str, list[list[float]]]  # of each arm: iteration, mean return, seconds


def run(task: str, seed: int, envs: int, iterations: int) -> Points:
    """Train with each arm, an iteration of each in turn."""
    cfg = settings(seed=seed, max_iterations=iterations, num_steps_per_env=STEPS)
    arms: dict[str, Any] = {}
    for name in (PEER, *ARMS):
        env = getattr(isaac_env, task)(envs)
        env.set_seed(seed)
        parts = env, cfg, *make_networks(env, cfg)
        if name == PEER:
            arms[name] = env, train_with_torchrl(*parts)
        else:
            arms[name] = env, page_program()(*parts, compile=ARMS[name])
    points: Points = {name: [] for name in arms}
    for iteration in range(1, iterations + 1):
        for name, (env, loop) in arms.items():
            started = time.perf_counter()
            next(loop)
            seconds = time.perf_counter() - started
            returns = env.pop_returns()
            score = mean(returns) if returns else float("nan")
            points[name].append([float(iteration), score, seconds])
    return points


def final(points: Sequence[Sequence[float]]) -> float:
    """Return the mean return of the last tenth, over the iterations in which episodes ended."""
    scores = [score for _, score, _ in points[-(len(points) // 10 or 1) :]]
    scores = [score for score in scores if score == score]
    return mean(scores) if scores else float("nan")


def curve(runs: Sequence[Points], arm: str) -> Curve:
    """Return the frames after which episodes of every seed had ended, and their mean returns."""
    seeds = [[(n * ENVS * STEPS, x) for n, x, _ in run[arm] if np.isfinite(x)] for run in runs]
    return common_points(seeds)


def main() -> None:
    bench = Benchmark("isaac_lab", keeps_results=True)
    envs, seeds = (16, 1) if bench.quick else (ENVS, SEEDS)
    tasks = dict.fromkeys(TASKS, 4) if bench.quick else TASKS
    jobs = [
        {"task": task, "seed": seed, "envs": envs, "iterations": iterations}
        for seed in range(seeds)
        for task, iterations in tasks.items()
    ]
    runs = run_jobs("isaac_lab.run", jobs, bench.results)
    head = ["task", "arm", "seed", "iteration", "return", "seconds"]
    lines = [
        [run["task"], arm, run["seed"], int(n), score, seconds]
        for run in runs
        for arm in (PEER, *ARMS)
        for n, score, seconds in run[arm]
    ]
    write_csv(bench.file("csv"), head, lines)
    by_task = {task: [run for run in runs if run["task"] == task] for task in tasks}
    if not bench.quick:
        curves = {
            task: {arm: curve(runs, arm) for arm in (PEER, *ARMS)} for task, runs in by_task.items()
        }
        title, labels = "Mean over the seeds, and their range", ["mean return of ended episodes"]
        draw_bands(bench.file("png"), curves, mean_and_range, title, labels)

    def seconds(task: str, arm: str) -> float:
        return median(row[2] for points in by_task[task] for row in points[arm])

    rows = []
    for arm in (PEER, *ARMS):
        row = [arm]
        for task, runs in by_task.items():
            scores = [final(points[arm]) for points in runs]
            row += [f"{mean(scores):,.0f} ({min(scores):,.0f} to {max(scores):,.0f})"]
            row += [f"{seconds(task, PEER) / seconds(task, arm):.2f}"]
        rows.append(row)
    columns = [x for task in tasks for x in (f"{task}: return", "speed")]
    bench.write_page(f"""# Isaac Lab's loop

Isaac Lab's loop with TorchRL's classes, and [with ppokit's](../howto/isaac_lab.md), on the CPU with
one thread. The environments have the interface of Isaac Lab's wrapper: observation groups
`"policy"` and `"critic"`, actions without bounds (CartPole) and with bounds (Pendulum), time limits
as truncations. {envs} environments, {STEPS} steps, 5 epochs of 4 minibatches, two layers of 32
units, {seeds} seeds.

{markdown(["", *columns], rows)}

Return: mean of the episodes that ended in the last tenth of the iterations, and range over the
seeds; a perfect policy has 500 on CartPole. Speed: iterations a second as a multiple of the first
row's, collection included. The arms make an iteration each in turn.

{"" if bench.quick else "![Mean return over iterations](isaac_lab.png)"}

Neither loop scales rewards or normalizes observations. ppokit's computes the advantages once for
each batch, TorchRL's in each epoch.
""")


if __name__ == "__main__":
    main()
