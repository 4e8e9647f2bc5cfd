"""The scores of one process, two ranks and two Ray workers after training.

``python -m tests.benchmarks.distributed_learning`` trains five seeds of each with
``tutorials/distributed_ppo.py`` and writes ``docs/benchmarks/distributed_learning.{csv,md,png}``.
Each run leaves its result in ``--results``; finished runs are skipped. It needs the extra ``ray``.
"""

from __future__ import annotations

import random
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter

from ppokit.plotting import read_run
from tests.benchmarks.curves import bootstrap, resampled_means
from tests.benchmarks.figures import draw_band, panels
from tests.benchmarks.report import ROOT, Benchmark
from tests.benchmarks.runs import file_name, kept, run_all, run_python
from tests.benchmarks.tables import markdown, write_csv

TASKS = ("CartPole-v1", "Pendulum-v1")
SCRIPT = str(ROOT / "tutorials" / "distributed_ppo.py")
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
SCORE = re.compile(r"Return of \d+ episodes after (\d+) frames: (-?[\d.]+)")
Results = dict[tuple[str, str], list[dict[str, Any]]]
"""The score, the policy lag and the curve of each task and arm, seed by seed."""


def train(task: str, arm: str, seed: int, out: Path, quick: bool) -> dict[str, Any]:
    launcher, options = ARMS[arm]
    if launcher:
        launcher = [*launcher, f"--master-port={random.randint(20_000, 30_000)}"]
    given = ["--env", task, *options, "--seed", seed, "--out", out, *["--quick"] * quick]
    score = SCORE.search(run_python([*launcher, SCRIPT, *given]))
    if score is None:
        raise RuntimeError(f"{arm} on {task}, seed {seed}, printed no score.")
    rows = read_run(out / "logs")
    curve = [[x["total_frames"], x["episode_return"]] for x in rows if x.get("episodes")]
    lag = float(np.mean([row["policy_lag"] for row in rows]))
    return {"score": float(score[2]), "lag": lag, "curve": curve}


def table(found: Results) -> str:
    lines = []
    for (task, arm), results in found.items():
        scores, alone = (
            np.array([result["score"] for result in found[task, name]]) for name in (arm, ALONE)
        )
        difference = ""
        if arm != ALONE:  # the seeds of two arms are independent
            rng = np.random.default_rng(0)
            means = resampled_means(scores, rng) - resampled_means(alone, rng)
            low, high = np.percentile(means, [2.5, 97.5])
            difference = f"{scores.mean() - alone.mean():+.1f} ({low:+.1f} to {high:+.1f})"
        each = ", ".join(f"{score:.0f}" for score in scores)
        lag = np.mean([result["lag"] for result in results])
        lines.append([f"{task}: {arm}", f"{scores.mean():.1f}", each, difference, f"{lag:.2f}"])
    head = ["", "score", "each seed", "less one process's (95% interval)", "policy lag (updates)"]
    return markdown(head, lines)


def draw(bench: Benchmark, found: Results) -> None:
    """Draw the mean of the seeds' training returns, and its 95% interval."""
    title = "Episodes while training: mean of the seeds, and its 95% interval"
    with panels(bench.file("png"), len(TASKS), (11, 4.5), title) as axes:
        for axis, task in zip(axes, TASKS, strict=True):
            for arm in [arm for of_task, arm in found if of_task == task]:
                curves = [np.array(result["curve"]) for result in found[task, arm]]
                ends = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
                frames = np.linspace(*ends, 60)
                returns = np.stack([np.interp(frames, *curve.T) for curve in curves])
                draw_band(axis, frames, returns.mean(0), bootstrap(returns), arm)
            axis.set(title=task, xlabel="frames (environment steps) of all", ylabel="return")
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0].legend()


def main() -> None:
    bench = Benchmark(
        "distributed_learning", __doc__, keeps_results=True, packages=("ray",), seeds=5
    )
    arms = [arm for arm, (_, options) in ARMS.items() if "ray" not in options or find_spec("ray")]
    found: Results = {(task, arm): [] for task in TASKS for arm in arms}
    seeds = 1 if bench.quick else bench.options.seeds
    cells = [(task, arm, seed) for seed in range(seeds) for task, arm in found]

    def run(task: str, arm: str, seed: int) -> dict[str, Any]:
        file = bench.results / file_name(task, arm, seed)
        return kept(file, partial(train, task, arm, seed, file.with_suffix(""), bench.quick))

    results = run_all([partial(run, *cell) for cell in cells])
    for (task, arm, _), result in zip(cells, results, strict=True):
        found[task, arm].append(result)
    lines = [
        [task, arm, seed, result["score"], f"{result['lag']:.3f}"]
        for (task, arm), results in found.items()
        for seed, result in enumerate(results)
    ]
    write_csv(bench.file("csv"), ["task", "arm", "seed", "score", "policy_lag"], lines)
    draw(bench, found)
    bench.write_page(f"""# Learning in one process, with two ranks and with two Ray workers

`tutorials/distributed_ppo.py`, {seeds} seeds: in one process, with two ranks (torchrun), and with
Ray workers whose batches are waited for or taken as they are ready. Frames and minibatches are
those of all ranks together. One process has the environments of the others together, so batches are
alike: 16 environments, 128 steps. An asynchronous batch is of one worker. The score is the mean
return of 20 episodes with the most probable action after the last update.
`python -m tests.benchmarks.distributed_learning`

![Training curves](distributed_learning.png)

{table(found)}
""")


if __name__ == "__main__":
    main()
