"""RLlib's CartPole example, by RLlib and by ``tutorials/rllib_ppo.py``: frames and seconds to 450.

``python -m tests.benchmarks.rllib`` trains three seeds of each arm to a mean return of 450 or for
1M frames, measures frames a second in three rounds, and writes ``docs/benchmarks/rllib.{csv,md,
png}``. Each run leaves its result in ``--results``; runs that are there are skipped, so an
interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from tqdm import tqdm

from tests.benchmarks import peers
from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.tables import markdown

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TARGET = 450.0
SPEED_FRAMES, WARM_UP = 100_000, 3  # frames of a round, of which so many batches are left out
THEIRS: dict[str, dict[str, int]] = {
    "RLlib, its example": {"workers": 4, "envs": 16, "learners": 1},
    "RLlib in one process": {"workers": 0, "envs": 64, "learners": 0},
}
OURS = {
    "ppokit, RLlib's settings": ["--settings", "rllib"],
    "ppokit, own settings": ["--settings", "ppokit"],
}
ABOUT = {
    "RLlib, its example": "4 environment runners with 16 environments each, 1 learner",
    "RLlib in one process": "`num_env_runners=0`, `num_learners=0`, 64 environments",
    "ppokit, RLlib's settings": "the same 64 environments, networks and hyper-parameters",
    "ppokit, own settings": "16 environments, batches of 1,024 frames, 8 epochs, minibatches of "
    "256, learning rate 0.003, lambda 0.95, policy and critic with a hidden layer of 64 tanh each, "
    "critic loss not clamped, its coefficient 0.5",
}
COLORS = dict(zip([*THEIRS, *OURS], ("#d62728", "#ff7f0e", "#6baed6", "#08306b"), strict=True))
NAMES = ["frames", "seconds", "return", "return_100", "kl", "kl_coeff"]
Result = dict[
    str, Any
]  # of a run: "rows" with frames, seconds and return of each batch, or "error"


def train(arm: str, seed: int, frames: int, target: float | None, result: Path) -> Result:
    """Run an arm, unless its result is there, and return the result."""
    if arm in THEIRS:
        arguments = {**THEIRS[arm], "seed": seed, "total_frames": frames, "target": target}
        try:
            return peers.run("rllib", arguments, result)
        except peers.PeerError as error:
            return {"error": str(error), "rows": []}
    if not result.exists():
        out = result.with_suffix(f".{os.getpid()}")
        command = [sys.executable, str(ROOT / "tutorials" / "rllib_ppo.py"), *OURS[arm]]
        command += ["--total-frames", str(frames), "--seed", str(seed), "--eval-every", "0"]
        command += ["--out", str(out), *([] if target is None else ["--target", str(target)])]
        started = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        wall = time.perf_counter() - started
        history = json.loads((out / "history.json").read_text())
        names = {name: name for name in NAMES} | {"return": "episode_return"}
        rows = [{name: row.get(key) for name, key in names.items()} for row in history]
        text = json.dumps({"seconds_starting": wall - rows[-1]["seconds"], "rows": rows})
        result.write_text(text)
    return json.loads(result.read_text())


def reached_at(result: Result, name: str) -> dict[str, float] | None:
    """Return the first row in which a mean return has the target, or None."""
    return next((row for row in result["rows"] if (row[name] or 0.0) >= TARGET), None)


def speed_of(result: Result) -> float:
    """Return frames a second after the first batches."""
    first, last = result["rows"][WARM_UP - 1], result["rows"][-1]
    return (last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"])


def write_csv(path: Path, runs: dict[str, list[Result]]) -> None:
    """Write every batch of every run to the target."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *NAMES])
        for arm, results in runs.items():
            for seed, result in enumerate(results):
                for row in result["rows"]:
                    values = (row[name] for name in NAMES)
                    writer.writerow([arm, seed, *("" if x is None else f"{x:.5g}" for x in values)])


def _each(values: list[float | None], style: str) -> str:
    """Return the median, and each seed's in brackets; a run that did not get there is the worst."""
    middle = median(float("inf") if x is None else x for x in values)
    each = ", ".join("-" if x is None else format(x, style) for x in values)
    return f"{'-' if middle == float('inf') else format(middle, style)} ({each})"


def _when(results: list[Result], name: str) -> list[str]:
    """Return after how many frames and seconds the runs reached the target."""
    ends = [reached_at(result, name) or {} for result in results]
    styles = {"frames": ",.0f", "seconds": ",.1f"}
    return [_each([end.get(unit) for end in ends], style) for unit, style in styles.items()]


def table(runs: dict[str, list[Result]], rounds: dict[str, list[Result]]) -> str:
    """Return frames and seconds to the target, and speed, an arm a line."""
    speeds = {arm: [speed_of(x) for x in rounds[arm] if x["rows"]] for arm in runs}
    best = max((median(speeds[arm]) for arm in THEIRS if speeds.get(arm)), default=None)
    lines = []
    for arm, results in runs.items():
        failed = next((x["error"] for x in results + rounds[arm] if "error" in x), None)
        if failed is not None:
            lines.append([f"{arm}: `{' '.join(failed.split())[-300:]}`", *[""] * 6])
            continue
        # A batch of our own settings ends two or three long episodes: that is no mean.
        own = ["", ""] if arm == "ppokit, own settings" else _when(results, "return")
        speed, spread = median(speeds[arm]), f"{min(speeds[arm]):,.0f} to {max(speeds[arm]):,.0f}"
        over = "" if best is None else f"{speed / best:.1f}"
        measured = [*own, *_when(results, "return_100"), f"{speed:,.0f} ({spread})", over]
        lines.append([f"{arm}: {ABOUT[arm]}", *measured])
    of_batch, of_100 = "of the iteration", "of the last 100"
    head = ["arm", f"frames, {of_batch}", "seconds", f"frames, {of_100}", "seconds"]
    return markdown([*head, "frames a second", "over the faster RLlib"], lines)


def draw(path: Path, runs: dict[str, list[Result]]) -> None:
    """Draw the returns over frames and over seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for axis, name in zip(axes, ("frames", "seconds"), strict=True):
        for arm, results in runs.items():
            for seed, result in enumerate(results):
                points = [(row[name], row["return_100"]) for row in result["rows"]]
                label = arm if seed == 0 else None
                axis.plot(*zip(*points, strict=True), color=COLORS[arm], lw=1.2, label=label)
        axis.axhline(TARGET, color="black", ls=":", lw=1)
        axis.set_xscale("log")
        axis.set_xlabel("frames (environment steps)" if name == "frames" else "seconds")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return of the last 100 episodes")
    axes[0].legend()
    figure.suptitle("CartPole-v1: RLlib's example until it has its target")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--total-frames", type=int, default=1_000_000)
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "benchmarks" / "rllib")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    arms, note, speed_frames = [*THEIRS, *OURS], "", SPEED_FRAMES
    if args.quick:
        args.seeds, args.total_frames, args.results = 1, 16_000, folder / "runs"
        speed_frames = 20_000
        arms.remove("RLlib, its example")
        if not (peers.folder_of("rllib") / "installed.txt").exists():
            arms.remove("RLlib in one process")
            note = "RLlib is not installed and left out of this quick run.\n\n"
    args.results.mkdir(parents=True, exist_ok=True)
    if not (started := args.results / "machine.txt").exists():
        started.write_text(machine())  # what the runs ran on, not what is there when they are read

    runs: dict[str, list[Result]] = {arm: [] for arm in arms}
    rounds: dict[str, list[Result]] = {arm: [] for arm in arms}
    cells = [(seed, arm) for seed in range(args.seeds) for arm in arms]
    for seed, arm in tqdm([*cells, *cells], unit="run"):
        name = f"{'-'.join(re.findall(r'[a-zA-Z]+', arm))}-{seed}"
        if len(runs[arm]) < args.seeds:
            result = args.results / f"{name}.json"
            runs[arm].append(train(arm, seed, args.total_frames, TARGET, result))
        else:
            result = args.results / f"speed-{name}.json"
            rounds[arm].append(train(arm, seed, speed_frames, None, result))
    write_csv(folder / "rllib.csv", runs)
    draw(folder / "rllib.png", runs)
    found = {x.get("version") for results in runs.values() for x in results} - {None}
    text = f"""# RLlib's CartPole example, by RLlib and by its assembly from blocks

`rllib/examples/algorithms/ppo/cartpole_ppo.py` of RLlib (github.com/ray-project/ray, commit
438af5cd), transcribed without Tune (`tests/benchmarks/originals/rllib.py`), against
`tutorials/rllib_ppo.py`: CartPole-v1, {args.seeds} seeds, arms in turn, each run until the mean
return of the last 100 episodes is {TARGET:.0f}, the example's target, or for {args.total_frames:,}
frames. RLlib's own figure, by which its example stops, is the mean of the episodes that ended in
the iteration (of each environment runner 25 of them at most): 8 to 20 where they are long, so that
it is reached earlier, by chance. The table has both, as the median of the seeds and each of them.
Seconds are from the first iteration on, without the start of Python and of Ray. Frames a second are
of other runs of {speed_frames:,} frames without a target, in {args.seeds} rounds, without their
first {WARM_UP} batches. `python -m tests.benchmarks.rllib`

![Returns over frames and over seconds](rllib.png)

{table(runs, rounds)}

{note}RLlib {", ".join(sorted(map(str, found))) or "was not run"}, in a virtual environment of its
own, with as many processes as its arm says on {os.cpu_count()} cores; the assembly is one process
with one thread. {started.read_text()}
"""
    (folder / "rllib.md").write_text(text)
    print(f"{folder / 'rllib.md'}\n\n{text}")


if __name__ == "__main__":
    main()
