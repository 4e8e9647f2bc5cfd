"""The score that one process, two ranks and two Ray workers end with.

``python -m tests.benchmarks.distributed_learning`` trains five seeds of each with
``tutorials/distributed_ppo.py`` and writes ``docs/benchmarks/distributed_learning.{csv,md,png}``.
Each run leaves its result in ``--results``; runs that are there are skipped. It needs the extra
``ray``.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import numpy as np
from tqdm import tqdm

from ppokit.plotting import read_run
from tests.benchmarks.curves import bootstrap
from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.runs import Row, read_json, write_json
from tests.benchmarks.tables import markdown, versions

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

TASKS = ("CartPole-v1", "Pendulum-v1")
SCRIPT = str(ROOT / "tutorials" / "distributed_ppo.py")
RANKS = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
RAY = ["--collector", "ray"]
ARMS: dict[str, tuple[list[str], list[str]]] = {
    # as many environments as both ranks, or both workers, have together
    "one process": ([], ["--num-envs", "16"]),
    "two ranks": (RANKS, []),
    "two Ray workers": ([], RAY),
    "two Ray workers, asynchronous": ([], [*RAY, "--asynchronous"]),
}
SCORE = re.compile(r"Return of \d+ episodes after (\d+) frames: (-?[\d.]+)")


def train(task: str, arm: str, seed: int, result: Path, quick: bool) -> Row:
    """Run an arm, unless its result is there, and return its score and its curve.

    Raises:
        RuntimeError: it failed; with the last that it printed.
    """
    if result.exists():
        return read_json(result)
    launcher, options = ARMS[arm]
    if launcher:
        launcher = [*launcher, f"--master-port={random.randint(20_000, 30_000)}"]
    out = result.with_suffix("")
    command = [sys.executable, *launcher, SCRIPT, "--env", task, *options, "--seed", str(seed)]
    command += ["--out", str(out), *(["--quick"] if quick else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    score = SCORE.search(done.stdout)
    if done.returncode or score is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    rows = read_run(out / "logs")
    curve = [[x["total_frames"], x["episode_return"]] for x in rows if x.get("episodes")]
    lag = float(np.mean([row["policy_lag"] for row in rows]))
    found = {"score": float(score[2]), "lag": lag, "curve": curve}
    write_json(result, found)
    return found


def table(runs: dict[tuple[str, str], list[Row]]) -> str:
    """Return the scores, and by how much they differ from one process's."""
    lines = []
    for (task, arm), results in runs.items():
        scores = np.array([result["score"] for result in results])
        alone = np.array([result["score"] for result in runs[task, "one process"]])
        difference = ""
        if arm != "one process":
            # of seeds that have nothing in common but their number
            rng = np.random.default_rng(0)
            means = [
                x[rng.integers(len(x), size=(10_000, len(x)))].mean(1) for x in (scores, alone)
            ]
            low, high = np.percentile(means[0] - means[1], [2.5, 97.5])
            difference = f"{scores.mean() - alone.mean():+.1f} ({low:+.1f} to {high:+.1f})"
        each = ", ".join(f"{score:.0f}" for score in scores)
        lag = np.mean([result["lag"] for result in results])
        lines.append([f"{task}: {arm}", f"{scores.mean():.1f}", each, difference, f"{lag:.2f}"])
    return markdown(
        ["", "score", "each seed", "less one process's (95% interval)", "policy lag (updates)"],
        lines,
    )


def draw(path: Path, runs: dict[tuple[str, str], list[Row]]) -> None:
    """Draw the mean of the seeds' training returns, and its 95% interval."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 4.5), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        for i, arm in enumerate(arm for of, arm in runs if of == task):
            curves = [np.array(result["curve"]) for result in runs[task, arm]]
            ends = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
            frames = np.linspace(*ends, 60)
            returns = np.stack([np.interp(frames, *curve.T) for curve in curves])
            low, high = bootstrap(returns)
            axis.plot(frames, returns.mean(0), color=f"C{i}", label=arm, lw=1.5)
            axis.fill_between(frames, low, high, color=f"C{i}", alpha=0.15, lw=0)
        axis.set(title=task, xlabel="frames (environment steps) of all", ylabel="return")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle("Episodes while training: mean of the seeds, 95% interval of it")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_csv(path: Path, runs: dict[tuple[str, str], list[Row]]) -> None:
    """Write each run's score."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "arm", "seed", "score", "policy_lag"])
        for (task, arm), results in runs.items():
            for seed, result in enumerate(results):
                writer.writerow([task, arm, seed, result["score"], f"{result['lag']:.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    results = ROOT / "outputs" / "benchmarks" / "distributed_learning"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    if args.quick:
        args.seeds, args.results = 1, folder / "runs"
    arms = [arm for arm, (_, options) in ARMS.items() if "ray" not in options or find_spec("ray")]
    args.results.mkdir(parents=True, exist_ok=True)
    runs: dict[tuple[str, str], list[Row]] = {(task, arm): [] for task in TASKS for arm in arms}
    cells = [(seed, *cell) for seed in range(args.seeds) for cell in runs]
    for seed, task, arm in tqdm(cells, unit="run"):
        name = f"{task}-{'-'.join(re.findall('[a-zA-Z]+', arm))}-{seed}.json"
        runs[task, arm].append(train(task, arm, seed, args.results / name, args.quick))
    write_csv(folder / "distributed_learning.csv", runs)
    draw(folder / "distributed_learning.png", runs)
    text = f"""# What one process, two ranks and two Ray workers learn

`tutorials/distributed_ppo.py`, {args.seeds} seeds: in one process, with two ranks (torchrun), and
with Ray workers whose batches are waited for or taken as they are ready. Frames and minibatches are
those of all ranks together; and one process has as many environments as the others together, so
that batches are alike: 16 environments, 128 steps. (Where batches are not waited for, each is of
one worker.) The score is the mean return of 20 episodes with the most probable action after the
last update. `python -m tests.benchmarks.distributed_learning`

![Training curves](distributed_learning.png)

{table(runs)}

{versions("ray")}

{machine()}
"""
    (folder / "distributed_learning.md").write_text(text)
    print(f"{folder / 'distributed_learning.md'}\n\n{text}")


if __name__ == "__main__":
    main()
