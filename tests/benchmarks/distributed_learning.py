"""Scores after training of one process, two ranks and two Ray workers (extra ``ray``)."""

from __future__ import annotations

import random
from functools import partial
from importlib.util import find_spec
from statistics import mean
from typing import Any

import numpy as np

from tests.benchmarks.curves import with_interval
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import file_name, run_all, run_script
from tests.benchmarks.tables import markdown, write_lines

TASKS = ("CartPole-v1", "Pendulum-v1")
RANKS = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
RAY = ["--collector", "ray"]
ALONE = "one process"
ARMS: dict[str, tuple[list[str], list[str]]] = {
    # as many environments as both ranks, or both workers, have together
    ALONE: ([], ["--num-envs", "16"]),
    "two ranks": (RANKS, []),
    "two Ray workers": ([], RAY),
    "two Ray workers, asynchronous": ([], [*RAY, "--asynchronous"]),
}


def main() -> None:
    bench = Benchmark("distributed_learning", keeps_results=True, packages=("ray",))
    arms = [arm for arm, (_, options) in ARMS.items() if "ray" not in options or find_spec("ray")]
    seeds = 1 if bench.quick else 5
    cells = [(task, arm, seed) for seed in range(seeds) for task in TASKS for arm in arms]

    def run(task: str, arm: str, seed: int) -> dict[str, Any]:
        launcher, options = ARMS[arm]
        if launcher:
            launcher = [*launcher, f"--master-port={random.randint(20_000, 30_000)}"]
        given = ["--env", task, *options, "--seed", seed, *["--quick"] * bench.quick]
        out = (bench.results / file_name(task, arm, seed)).with_suffix("")
        history = run_script("distributed_ppo", given, out, launcher)
        lag = mean(row["policy_lag"] for row in history)
        found = {"score": history[-1]["eval_return"], "policy_lag": lag}
        return {"task": task, "arm": arm, "seed": seed} | found

    results = run_all([partial(run, *cell) for cell in cells])
    write_lines(bench.file("csv"), results)
    table = []
    for task, arm in [(task, arm) for task in TASKS for arm in arms]:
        found = [result for result in results if (result["task"], result["arm"]) == (task, arm)]
        scores = np.array([result["score"] for result in found])
        each = ", ".join(f"{score:.0f}" for score in scores)
        lag = mean(result["policy_lag"] for result in found)
        table.append([f"{task}: {arm}", with_interval(scores, ".1f"), each, f"{lag:.2f}"])
    bench.write_page(f"""# Learning in one process, with two ranks and with two Ray workers

`tests/benchmarks/assemblies/distributed_ppo.py`, {seeds} seeds: in one process, with two ranks
(torchrun), and with Ray workers whose batches are waited for or taken as they are ready. Frames
and minibatches count
all ranks together. One process has the environments of the others together, so batches are
alike: 16 environments, 128 steps. An asynchronous batch is of one worker. The score is the mean
return of 20 episodes with the most probable action after the last update.

{markdown(["", "score (95% interval)", "each seed", "policy lag (updates)"], table)}
""")


if __name__ == "__main__":
    main()
