"""rl8 on its own cartpole example, and the same assembled from ppokit's blocks.

``python -m tests.benchmarks.rl8`` writes ``docs/benchmarks/rl8.{csv,md,png}``: learning curves, the
speed of a collection and of a step in steady state, and the parts of a step. Each run is a process
of its own, on one thread, and its result is kept under ``outputs/benchmarks/rl8``: a run that is
there is not made again. rl8 runs in an environment of its own (:mod:`tests.benchmarks.peers`).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from tqdm import tqdm

from tests.benchmarks import peers
from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.runs import Row, read_json, run_script, run_tutorial
from tests.benchmarks.tables import markdown

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

TARGET = -50.0  # mean return of an environment in a horizon
CHUNK = 2_048  # frames
WHOLE = "a whole step"
RL8, OURS = "rl8", "ppokit"
COMMIT = "f598c6d1bceaa07a43e083508608cffc2c64becf"
# In the steady state: whose, and with what options.
SPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "rl8": (RL8, {"chunk": None}),
    "ppokit, eager": (OURS, {"chunk": None, "compile": False}),
    "ppokit, compiled": (OURS, {"chunk": None, "compile": True}),
    "rl8, accumulated": (RL8, {"chunk": CHUNK}),
    "ppokit, accumulated, eager": (OURS, {"chunk": CHUNK, "compile": False}),
}
SHAPES = {False: (1_024, 32), True: (64, 8)}  # of the steady state; quick
PROFILED = {False: (8_192, 32), True: (64, 8)}

Curve = list[list[float]]  # frames, seconds and mean return of each collection
Speeds = dict[str, list[dict[str, float]]]  # of each arm, a round each


def measured(arguments: Mapping[str, Any], result: Path) -> dict[str, float]:
    """Return what ``rl8_assembly`` measures."""
    if not result.exists():
        part = result.absolute().with_suffix(".part")
        run_script(["-m", "tests.benchmarks.rl8_assembly", json.dumps(arguments), str(part)])
        part.replace(result)
    return read_json(result)


def curve_of(arm: str, seed: int, folder: Path, quick: bool) -> Curve:
    """Return the returns of a run until they reach the target."""
    result, steps = folder / f"{arm}-{seed}", 1 if quick else 60
    if arm == RL8:
        size = {"num_envs": 256, "horizon": 64, "target": TARGET, "steps": steps, "eager": quick}
        found = peers.run(RL8, {"mode": "curve", "seed": seed, **size}, result.with_suffix(".json"))
        return found["rows"]
    frames = steps * 256 * 64
    options = f"--target {TARGET} --seed {seed} --total-frames {frames}".split()

    def ended(rows: list[Row]) -> bool:
        return rows[-1]["return"] >= TARGET or rows[-1]["total_frames"] >= frames

    rows = run_tutorial("rl8_vectorized", options, result, ended)
    return [[row["total_frames"], row["seconds"], row["return"]] for row in rows]


def speeds_of(arms: Sequence[str], rounds: int, folder: Path, quick: bool) -> Speeds:
    """Return milliseconds of a collection and of a step, the arms in turn."""
    num_envs, horizon = SHAPES[quick]
    size = {"num_envs": num_envs, "horizon": horizon, "rounds": 1 if quick else 5, "seed": 0}
    size["eager"] = quick
    found: Speeds = {arm: [] for arm in arms}
    for number, arm in tqdm([(n, arm) for n in range(rounds) for arm in arms], unit="run"):
        whose, options = SPEED[arm]
        arguments = {"mode": "speed", **size, **options}
        result = folder / f"speed-{arm.replace(', ', '-')}-{number}.json"
        measure = (
            measured(arguments, result) if whose == OURS else peers.run(RL8, arguments, result)
        )
        found[arm].append(measure)
    return found


def profiles(folder: Path, quick: bool) -> dict[str, dict[str, float]]:
    """Return the milliseconds of the parts of a step, on the whole batch and accumulated."""
    num_envs, horizon = PROFILED[quick]
    size = {
        "mode": "profile",
        "num_envs": num_envs,
        "horizon": horizon,
        "rounds": 1 if quick else 2,
    }
    chunks = {"whole batch": None} | ({} if quick else {f"in chunks of {CHUNK:,}": CHUNK})
    return {
        name: measured(size | {"chunk": chunk}, folder / f"profile-{chunk}.json")
        for name, chunk in chunks.items()
    }


# -- what is written ---------------------------------------------------------------


def reached(curve: Curve) -> tuple[float, float] | None:
    """Return after how many frames and seconds the target was reached, or None."""
    return next(((frames, s) for frames, s, value in curve if value >= TARGET), None)


def curve_table(curves: Mapping[str, list[Curve]]) -> str:
    """Return when each run reached the target, and the medians."""
    lines, whole = [], {}
    for arm, runs in curves.items():
        ends = [reached(curve) for curve in runs]
        found = [x for x in ends if x is not None]
        whole[arm] = median(x[1] for x in found) if found else math.nan
        lines.append(
            [
                arm,
                f"{len(found)} of {len(runs)}",
                ", ".join(f"{x[0]:,.0f}" for x in found),
                ", ".join(f"{x[1]:.2f}" for x in found),
                f"{whole[arm]:.2f}",
                f"{whole[RL8] / whole[arm]:.1f}" if RL8 in whole else "",
            ]
        )
    head = ["arm", f"reached {TARGET:.0f}", "frames", "seconds", "median", "times as fast"]
    return markdown(head, lines)


def speed_table(speeds: Speeds, frames: int) -> str:
    """Return medians over the rounds, and how often they fit into rl8's with the same chunks."""
    medians = {
        arm: {name: median(row[name] for row in rows) for name in rows[0]}
        for arm, rows in speeds.items()
    }
    lines = []
    for arm, row in medians.items():
        peer = medians.get("rl8, accumulated" if "accumulated" in arm else "rl8")
        line = [arm]
        for names in (["collect"], ["step"], ["collect", "step"]):
            own = sum(row[name] for name in names)
            ratio = "" if peer is None else f" ({sum(peer[name] for name in names) / own:.2f})"
            line.append(f"{own:,.0f}{ratio}")
        lines.append([*line, f"{1e3 * frames / (row['collect'] + row['step']):,.0f}"])
    return markdown(["arm", "collection, ms", "step, ms", "both, ms", "frames a second"], lines)


def profile_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the parts of a step, and their share of the parts' sum."""
    lines = []
    for part in max(found.values(), key=len):  # a whole batch is not shuffled
        line = [part]
        for parts in found.values():
            share = parts.get(part, 0) / sum(x for name, x in parts.items() if name != WHOLE)
            cell = f"{parts.get(part, 0):,.1f}" + ("" if part == WHOLE else f" ({share:.1%})")
            line.append(cell if part in parts else "")
        lines.append(line)
    return markdown(["ms (share of the sum of the parts)", *found], lines)


def write_csv(
    path: Path,
    curves: Mapping[str, list[Curve]],
    speeds: Speeds,
    parts: Mapping[str, Mapping[str, float]],
) -> None:
    """Write every collection of every run, every round, and every part."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["table", "arm", "number", "frames or part", "seconds or ms", "return"])
        for arm, runs in curves.items():
            for seed, curve in enumerate(runs):
                for frames, seconds, value in curve:
                    row = ["curve", arm, seed, int(frames), f"{seconds:.3f}", f"{value:.2f}"]
                    writer.writerow(row)
        for arm, rounds in speeds.items():
            for number, row in enumerate(rounds):
                writer.writerows(["speed", arm, number, k, f"{v:.2f}", ""] for k, v in row.items())
        for name, row in parts.items():
            writer.writerows(["profile", name, 0, k, f"{v:.2f}", ""] for k, v in row.items())


def draw(
    path: Path, curves: Mapping[str, list[Curve]], parts: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw the curves over frames and over seconds, and the parts of a step."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    colors = {RL8: "#d62728", OURS: "#08306b"}
    for column, (axis, label) in enumerate(
        zip(axes, ("frames (environment steps)", "seconds"), strict=False)
    ):
        for arm, runs in curves.items():
            for seed, curve in enumerate(runs):
                points = [(row[column], row[2]) for row in curve]
                name = None if seed else arm
                axis.plot(*zip(*points, strict=True), color=colors[arm], marker=".", label=name)
        axis.axhline(TARGET, color="black", ls=":", lw=1)
        axis.set(xlabel=label, ylabel="mean return of a horizon")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    axes[0].legend()
    for number, (name, row) in enumerate(parts.items()):
        names = [part for part in max(parts.values(), key=len) if part != WHOLE]
        places = [index + 0.4 * number for index in range(len(names))]
        values = [row.get(part, 0.0) for part in names]
        axes[2].barh(places, values, 0.4, label=name)
        axes[2].set_yticks([index + 0.2 for index in range(len(names))], names)
    axes[2].invert_yaxis()
    axes[2].set(xscale="symlog", xlabel="ms a step")
    axes[2].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder, quick = output_folder(args.quick), args.quick
    kept = folder if quick else ROOT / "outputs" / "benchmarks" / "rl8"
    kept.mkdir(parents=True, exist_ok=True)
    seeds, rounds = (1, 1) if quick else (args.seeds, args.rounds)
    arms, note = [RL8, OURS], ""
    is_there = (peers.folder_of(RL8) / "installed.txt").exists()
    try:
        if quick and not is_there:
            raise peers.PeerError("it is not installed, and a quick run does not install it.")
        peers.install(RL8)
    except (peers.PeerError, OSError, subprocess.CalledProcessError) as error:
        arms, note = [OURS], f"rl8 is left out: {error}\n\n"
    cells = [(arm, seed) for seed in range(seeds) for arm in arms]
    curves: dict[str, list[Curve]] = {arm: [] for arm in arms}
    for arm, seed in tqdm(cells, unit="run"):
        curves[arm].append(curve_of(arm, seed, kept, quick))
    timed = [arm for arm, (whose, _) in SPEED.items() if whose in arms]
    timed = [arm for arm in timed if not quick or arm in ("rl8", "ppokit, eager")]
    speeds = speeds_of(timed, rounds, kept, quick)
    parts = profiles(kept, quick)
    write_csv(folder / "rl8.csv", curves, speeds, parts)
    draw(folder / "rl8.png", curves, parts)
    peer = "" if note else f" Beside those: rl8 {peers.versions_of(RL8)['rl8']}."
    text = f"""# rl8's own example

rl8's cartpole example (`examples/cartpole` of its repository at commit `{COMMIT}`, written anew in
`tests/benchmarks/originals/rl8.py` for rl8 and in `tutorials/rl8_vectorized.py` for ppokit): five
observations, three actions, no end of an episode, a negative reward. Every run is a process of its
own on one thread, the arms in turn. `python -m tests.benchmarks.rl8`

![Curves, and the parts of a step](rl8.png)

{note}## Until a horizon's mean return is {TARGET:.0f}

256 environments, 64 steps. rl8 with the settings of its example, ppokit with those of the tutorial:
minibatches of 256 frames, one epoch, a learning rate of 0.002; the same networks, two of 2x256.
Seconds are those of collecting and training, without imports and without rl8's compilation of its
environment's step.

{curve_table(curves)}

## Steady state, with rl8's settings and networks

{SHAPES[quick][0]:,} environments, {SHAPES[quick][1]} steps, four epochs, the whole batch in each
step of the optimiser, and the system's allocator as it is: outputs of a layer of 32 MiB are asked
of the system anew each time. "Accumulated" takes the same steps of the optimiser with the gradients
of chunks of {CHUNK:,} frames (an option of both), which stay in the cache; what is left then is the
networks' matrix products. In brackets, how many times as fast as rl8 in the same way. The networks
are the same functions of the same sizes; their activations are in place in ppokit's tutorial, and
not in rl8's default model. rl8 evaluates the critic while it collects, ppokit in the update: the
third column is the sum.

{speed_table(speeds, math.prod(SHAPES[quick]))}

## The parts of one step at {list(PROFILED[quick])}

Each part called by itself; four epochs.

{profile_table(parts)}

{machine()}{peer}
"""
    (folder / "rl8.md").write_text(text)
    print(f"{folder / 'rl8.md'}\n\n{text}")


if __name__ == "__main__":
    main()
