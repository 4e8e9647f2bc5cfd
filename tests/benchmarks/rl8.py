"""rl8 on its own cartpole example, and the same assembled from ppokit's blocks.

``python -m tests.benchmarks.rl8`` writes ``docs/benchmarks/rl8.{csv,md,png}``: learning curves, the
speed of a collection and of a step in steady state, and the parts of a step. Each run is a process
of its own on one thread, and leaves its result in ``--results``; finished runs are skipped. rl8
runs in an environment of its own (:mod:`tests.benchmarks.peers`).
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.ticker import EngFormatter
from tqdm import tqdm

from tests.benchmarks import peers
from tests.benchmarks.figures import FRAMES, panels
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import Row, kept, run_module, run_tutorial
from tests.benchmarks.tables import markdown, write_csv

TARGET = -50.0  # mean return of an environment in a horizon
CHUNK = 2_048  # frames
WHOLE = "a whole step"
RL8, OURS = "rl8", "ppokit"
COMMIT = "f598c6d1bceaa07a43e083508608cffc2c64becf"
# Arms in steady state: the system and its options.
SPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "rl8": (RL8, {"chunk": None}),
    "ppokit, eager": (OURS, {"chunk": None, "compile": False}),
    "ppokit, compiled": (OURS, {"chunk": None, "compile": True}),
    "rl8, accumulated": (RL8, {"chunk": CHUNK}),
    "ppokit, accumulated, eager": (OURS, {"chunk": CHUNK, "compile": False}),
}
SHAPES = {False: (1_024, 32), True: (64, 8)}  # environments and steps by ``quick``
PROFILED = {False: (8_192, 32), True: (64, 8)}

Curve = list[list[float]]  # frames, seconds and mean return of each collection
Speeds = dict[str, list[dict[str, float]]]  # of each arm, a round each


def measured(arguments: Mapping[str, Any], result: Path) -> dict[str, float]:
    """Return the figures of ``rl8_assembly``."""
    return kept(result, lambda: run_module("rl8_assembly", arguments))


def curve_of(arm: str, seed: int, bench: Benchmark) -> Curve:
    result, steps = bench.results / f"{arm}-{seed}", 1 if bench.quick else 60
    if arm == RL8:
        size = {"num_envs": 256, "horizon": 64, "target": TARGET, "steps": steps}
        arguments = {"mode": "curve", "seed": seed, "eager": bench.quick, **size}
        return peers.run(RL8, arguments, result.with_suffix(".json"))["rows"]
    frames = steps * 256 * 64
    options = f"--target {TARGET} --seed {seed} --total-frames {frames}".split()

    def ended(rows: list[Row]) -> bool:
        return rows[-1]["return"] >= TARGET or rows[-1]["total_frames"] >= frames

    rows = run_tutorial("rl8_vectorized", options, result, ended)
    return [[row["total_frames"], row["seconds"], row["return"]] for row in rows]


def speeds_of(arms: Sequence[str], rounds: int, bench: Benchmark) -> Speeds:
    num_envs, horizon = SHAPES[bench.quick]
    size = {"num_envs": num_envs, "horizon": horizon, "rounds": 1 if bench.quick else 5}
    found: Speeds = {arm: [] for arm in arms}
    for number, arm in tqdm([(n, arm) for n in range(rounds) for arm in arms], unit="run"):
        whose, options = SPEED[arm]
        arguments = {"mode": "speed", "seed": 0, "eager": bench.quick, **size, **options}
        result = bench.results / f"speed-{arm.replace(', ', '-')}-{number}.json"
        ours = whose == OURS
        found[arm].append(
            measured(arguments, result) if ours else peers.run(RL8, arguments, result)
        )
    return found


def profiles(bench: Benchmark) -> dict[str, dict[str, float]]:
    """Return the milliseconds of the parts of a step, on the whole batch and accumulated."""
    num_envs, horizon = PROFILED[bench.quick]
    size = {"num_envs": num_envs, "horizon": horizon, "rounds": 1 if bench.quick else 2}
    chunks = {"whole batch": None} | ({} if bench.quick else {f"in chunks of {CHUNK:,}": CHUNK})
    return {
        name: measured(
            {"mode": "profile", "chunk": chunk, **size}, bench.results / f"profile-{chunk}.json"
        )
        for name, chunk in chunks.items()
    }


def reached(curve: Curve) -> tuple[float, float] | None:
    """Return after how many frames and seconds the target was reached, or None."""
    return next(((frames, s) for frames, s, value in curve if value >= TARGET), None)


def curve_table(curves: Mapping[str, list[Curve]]) -> str:
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
    lines = []
    for part in max(found.values(), key=len):  # a whole batch is not shuffled
        line = [part]
        for parts in found.values():
            share = parts.get(part, 0) / sum(x for name, x in parts.items() if name != WHOLE)
            cell = f"{parts.get(part, 0):,.1f}" + ("" if part == WHOLE else f" ({share:.1%})")
            line.append(cell if part in parts else "")
        lines.append(line)
    return markdown(["ms (share of the sum of the parts)", *found], lines)


def csv_lines(
    curves: Mapping[str, list[Curve]], speeds: Speeds, parts: Mapping[str, Mapping[str, float]]
) -> list[list[Any]]:
    lines = [
        ["curve", arm, seed, int(frames), f"{seconds:.3f}", f"{value:.2f}"]
        for arm, runs in curves.items()
        for seed, curve in enumerate(runs)
        for frames, seconds, value in curve
    ]
    for arm, rounds in speeds.items():
        for number, row in enumerate(rounds):
            lines += [["speed", arm, number, k, f"{v:.2f}", ""] for k, v in row.items()]
    for name, row in parts.items():
        lines += [["profile", name, 0, k, f"{v:.2f}", ""] for k, v in row.items()]
    return lines


def draw(
    path: Path, curves: Mapping[str, list[Curve]], parts: Mapping[str, Mapping[str, float]]
) -> None:
    colors = {RL8: "#d62728", OURS: "#08306b"}
    with panels(path, 3, (15, 4.2)) as axes:
        for column, label in enumerate((FRAMES, "seconds")):
            axis = axes[column]
            for arm, runs in curves.items():
                for seed, curve in enumerate(runs):
                    points = [(row[column], row[2]) for row in curve]
                    name = None if seed else arm
                    axis.plot(*zip(*points, strict=True), color=colors[arm], marker=".", label=name)
            axis.axhline(TARGET, color="black", ls=":", lw=1)
            axis.set(xlabel=label, ylabel="mean return of a horizon")
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0].legend()
        names = [part for part in max(parts.values(), key=len) if part != WHOLE]
        for number, (name, row) in enumerate(parts.items()):
            places = [index + 0.4 * number for index in range(len(names))]
            axes[2].barh(places, [row.get(part, 0.0) for part in names], 0.4, label=name)
        axes[2].set_yticks([index + 0.2 for index in range(len(names))], names)
        axes[2].invert_yaxis()
        axes[2].set(xscale="symlog", xlabel="ms a step")
        axes[2].legend()


def peer_is_missing(quick: bool) -> str:
    """Install rl8, except in a quick run; return why it is left out, or an empty text."""
    try:
        if quick and not peers.is_installed(RL8):
            raise peers.PeerError("it is not installed, and a quick run does not install it.")
        peers.install(RL8)
    except (peers.PeerError, OSError, subprocess.CalledProcessError) as error:
        return f"rl8 is left out: {error}\n\n"
    return ""


def main() -> None:
    bench = Benchmark("rl8", __doc__, keeps_results=True, seeds=3, rounds=3)
    quick, note = bench.quick, peer_is_missing(bench.quick)
    seeds, rounds = (1, 1) if quick else (bench.options.seeds, bench.options.rounds)
    arms = [OURS] if note else [RL8, OURS]
    curves: dict[str, list[Curve]] = {arm: [] for arm in arms}
    for seed, arm in tqdm([(seed, arm) for seed in range(seeds) for arm in arms], unit="run"):
        curves[arm].append(curve_of(arm, seed, bench))
    timed = [arm for arm, (whose, _) in SPEED.items() if whose in arms]
    timed = [arm for arm in timed if not quick or arm in ("rl8", "ppokit, eager")]
    speeds, parts = speeds_of(timed, rounds, bench), profiles(bench)
    head = ["table", "arm", "number", "frames or part", "seconds or ms", "return"]
    write_csv(bench.file("csv"), head, csv_lines(curves, speeds, parts))
    draw(bench.file("png"), curves, parts)
    peer = "" if note else f" Beside those: rl8 {peers.versions_of(RL8)['rl8']}."
    shape = SHAPES[quick]
    bench.write_page(
        f"""# rl8's own example

rl8's cartpole example (`examples/cartpole` of its repository at commit `{COMMIT}`), reimplemented
in `tests/benchmarks/originals/rl8.py` for rl8 and in `tutorials/rl8_vectorized.py` for ppokit:
five observations, three actions, no end of an episode, a negative reward. Every run is a process of
its own on one thread, the arms in turn. `python -m tests.benchmarks.rl8`

![Curves, and the parts of a step](rl8.png)

{note}## Until a horizon's mean return is {TARGET:.0f}

256 environments, 64 steps. rl8 has the settings of its example, ppokit those of the tutorial:
minibatches of 256 frames, one epoch, a learning rate of 0.002; the same networks, two of 2x256.
Seconds are of collecting and training, without imports and without rl8's compilation.

{curve_table(curves)}

## Steady state, with rl8's settings and networks

{shape[0]:,} environments, {shape[1]} steps, four epochs, the whole batch in each optimizer step.
"Accumulated" adds up the gradients of chunks of {CHUNK:,} frames. In brackets, the speed as a
multiple of rl8's. rl8 evaluates the critic while it collects, ppokit in the update: the third
column is the sum.

{speed_table(speeds, math.prod(shape))}

## The parts of one step at {list(PROFILED[quick])}

Each part called by itself; four epochs.

{profile_table(parts)}
""",
        peer,
    )


if __name__ == "__main__":
    main()
