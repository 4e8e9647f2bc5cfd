"""What the whole training loops took, as text and as a figure."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.patheffects import withStroke

from tests.benchmarks.figures import plt
from tests.benchmarks.loop_contenders import (
    COMPILED,
    CONTENDERS,
    FLOOR,
    FLOOR_PARTS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MINIBATCH,
    PARTS,
    TUTORIAL,
    Task,
)
from tests.benchmarks.loop_results import BARS, Results
from tests.benchmarks.tables import markdown

COLOURS = dict(
    zip(
        PARTS,
        (
            *("#4daf4a", "#b2df8a", "#ffd92f", "#2171b5"),
            *("#6baed6", "#984ea3", "#e6550d", "#e31a1c", "#bdbdbd"),
        ),
        strict=True,
    )
)


def write_report(folder: Path, runs: Sequence[Mapping[str, Any]], machine: str) -> Path:
    """Write loop.csv, loop.png and loop.md, and return the last."""
    tasks = [Task(**given) for given in {str(run["task"]): run["task"] for run in runs}.values()]
    found = [
        Results.of(task, [run for run in runs if Task(**run["task"]) == task]) for task in tasks
    ]
    write_csv(folder / "loop.csv", runs)
    draw(folder / "loop.png", found)
    rounds = 1 + max(run["round"] for run in runs)
    text = f"""# Whole PPO loops: frames a second

Collecting and training in steady state, one thread, medians of {rounds} round(s).

![Microseconds a frame, by part of the loop](loop.png)

{"".join(_section(results) for results in found)}The bars, of ppokit unless it says otherwise:

{_bars(found)}

{_pays(found)}Where the time goes, in microseconds a frame:

{"".join(_breakdown(results) for results in found)}The floor's parts, in microseconds a frame:

{_floor_parts(found)}

{_about(found)}

{_method(found, runs)}

`python -m tests.benchmarks.loop`

{machine}
"""
    (folder / "loop.md").write_text(text)
    return folder / "loop.md"


def write_csv(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write the microseconds a frame of every run: whole, and by part."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["env", "num_envs", "contender", "round", "part", "us_per_frame"])
        for run in runs:
            task = Task(**run["task"])
            parts = dict(run["us_per_frame"])
            whole = 1e6 / run["frames_per_second"] if "frames_per_second" in run else None
            for part, us in ({"whole": whole or sum(parts.values())} | parts).items():
                row = [task.env, task.num_envs, run["contender"], run["round"], part, f"{us:.4g}"]
                writer.writerow(row)


def _section(results: Results) -> str:
    lines = []
    for name, speeds in results.frames_per_second.items():
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        lines.append(
            [
                name,
                f"{results.speed(name):,.0f} ({spread})",
                f"{results.over_tutorial(name):.2f}",
                f"{results.over_peers(name):.2f}",
                f"{results.of_floor(name):.2f}",
            ]
        )
    lines.append([f"*{FLOOR}*", f"{1e6 / results.floor:,.0f}", "", "", "1.00"])
    peers = " or ".join(results.peers) + (", the better" if len(results.peers) > 1 else "")
    head = ["", "frames/s (spread)", f"over {TUTORIAL}", f"over {peers}", "of the floor"]
    return f"## {results.task.name}\n\n{markdown(head, lines)}\n\n"


def _bars(found: Sequence[Results]) -> str:
    lines = [[bar.text, *(bar.verdict(results) for results in found)] for bar in BARS]
    return markdown(["", *(results.task.name for results in found)], lines)


def _pays(found: Sequence[Results]) -> str:
    lines = [
        [results.task.name, f"{results.seconds_to_capture:.1f}", f"{results.frames_to_pay:,.0f}"]
        for results in found
        if COMPILED in results.first_batch
    ]
    if not lines:
        return ""
    head = ["", "capture, s", "frames"]
    return (
        "Frames from which the compiled loop is ahead of the eager one, what is captured in the "
        f"first batch included (generated code is in the cache):\n\n{markdown(head, lines)}\n\n"
    )


def _breakdown(results: Results) -> str:
    lines = []
    for name in results.frames_per_second:
        parts = [results.parts[name][part] for part in PARTS]
        lines.append([name, *(f"{us:,.0f}" for us in (*parts, sum(parts)))])
    return f"{markdown([results.task.name, *PARTS, 'together'], lines)}\n\n"


def _floor_parts(found: Sequence[Results]) -> str:
    lines = []
    for results in found:
        parts = [results.parts[FLOOR][part] for part in FLOOR_PARTS]
        figures = (*parts, results.floor, results.floor_in_a_row)
        lines.append([results.task.name, *(f"{us:,.0f}" for us in figures)])
    return markdown(["", *FLOOR_PARTS, "together", "together, training in a row"], lines)


def _about(found: Sequence[Results]) -> str:
    there = {name for results in found for name in results.frames_per_second}
    lines = [f"- **{name}**: {CONTENDERS[name].about}." for name in CONTENDERS if name in there]
    lines.append(
        f"- **{FLOOR}**: each alone, added up: the environments' steps and resets with random "
        "actions drawn beforehand; the actor, a draw and its log-probability in plain torch, for "
        f"all environments at once; both networks forward and backward at {MINIBATCH} frames; "
        "`clip_grad_norm_`; `Adam(fused=True)`; the last three once an epoch for each minibatch."
    )
    if absent := [name for name in CONTENDERS if name not in there]:
        lines.append(f"- Not measured here: {', '.join(absent)}.")
    return "\n".join(lines)


def _method(found: Sequence[Results], runs: Sequence[Mapping[str, Any]]) -> str:
    seconds = max(run["seconds"] for run in runs)
    frames = ", ".join(f"{results.task.frames:,} ({results.task.name})" for results in found)
    epochs = " or ".join(str(epochs) for epochs in {results.task.epochs for results in found})
    training = f"""Actor and critic are networks of their own with hidden layers of tanh (3x256 is
    three of 256); minibatches of {MINIBATCH} frames, {epochs} epochs, the norm of all
    gradients clipped at {MAX_GRAD_NORM:g}, Adam at {LEARNING_RATE:g}, no KL stop and no reward
    normalisation: all take the same number of optimiser steps, which is checked. Frames of a batch:
    {frames}. Optimisers, losses and distributions are else what each program comes with: fused Adam
    is ppokit's only, and Stable-Baselines3 and the CleanRL-style loop have a normal distribution
    where the others have tanh-normal. InvertedDoublePendulum gives float64, which gymnasium's
    `DtypeObservation` makes float32 for ppokit's collector. Only the tutorial's environments
    normalise observations, in either loop that steps them."""
    timing = f"""Every contender has a process of its own, one at a time, and a round runs all of
    them. The first batch is not timed; then come at least three batches and {seconds:g} seconds,
    with nothing added to the loop; then at least one batch with a clock around the parts, which
    charges all time to the innermost part that is under way, and what is in none of them to the
    rest. Logging that a loss brings along is part of it. Parts are medians over the rounds, each by
    itself. The loops do learn: longer episodes mean fewer resets, in which they differ from each
    other and from the floor. Each of the floor's parts runs again and again on the same memory,
    which is in the caches then. Networks, clipping and optimiser one after the other share them, as
    in a loop: with these timed together the floor is what the last column says, but what counts is
    the sum."""
    shares = [run["share_of_core"] for run in runs if "share_of_core" in run]
    load = f"""While they were timed, the runs had {median(shares):.2f} of a core in the median and
    {min(shares):.2f} at least. Where that is not 1, something else was running."""
    paragraphs = [" ".join(text.split()) for text in (training, timing, load)]
    return "\n\n".join(textwrap.fill(p, 100, break_on_hyphens=False) for p in paragraphs)


def draw(path: Path, found: Sequence[Results]) -> None:
    """Draw a stacked bar for each contender, one panel a task."""
    columns = 2 if len(found) > 1 else 1
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(
        *(rows, columns), figsize=(7.5 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, results in zip(axes.flat, found, strict=False):
        _panel(axis, results)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="outside lower center", frameon=False)
    figure.suptitle("PPO, microseconds a frame by part of the loop, one thread")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Any, results: Results) -> None:
    names = list(results.frames_per_second)
    left = [0.0] * len(names)
    for part in PARTS:
        widths = [results.parts[name][part] for name in names]
        axis.barh(names, widths, 0.7, left, color=COLOURS[part], label=part)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    axis.axvline(results.floor, color="black", ls="--", lw=1.4, label="floor")
    for y, (name, end) in enumerate(zip(names, left, strict=True)):
        text = axis.text(end, y, f" {results.speed(name):,.0f} frames/s", va="center", fontsize=9)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    axis.set_xlim(0, 1.22 * max(left))
    axis.invert_yaxis()
    axis.set_title(results.task.name)
    axis.grid(alpha=0.3, axis="x")
    axis.set_axisbelow(True)
    axis.set_xlabel("µs a frame")
