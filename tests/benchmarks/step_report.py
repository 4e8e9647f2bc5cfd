"""The rows of the step benchmark, and what it found as text and as a figure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.figures import OURS, THEIRS, plt
from tests.benchmarks.loss_contenders import SETTINGS, Model, Setting, minibatch
from tests.benchmarks.report import machine
from tests.benchmarks.step_contenders import CONTENDERS, FLOOR, make_step
from tests.benchmarks.tables import Row, markdown, write_csv
from tests.benchmarks.timing import interleave

SMALL, LARGE = 64, 4096
MOST = 400  # samples
SAMPLE = 2e-2  # seconds: an update makes many steps in a row, and so does a sample


@dataclass(frozen=True)
class Stage:
    """What is timed in one go."""

    setting: Setting
    frames: int
    seconds: float


NORMAL = tuple(
    Setting(f"{name}, normal", cells, normal=True)
    for name, cells in (("3x256", (256,) * 3), ("2x64", (64,) * 2))
)
ALL = (*SETTINGS, *NORMAL)
STAGES = (
    *(Stage(setting, SMALL, 60.0) for setting in ALL),
    *(Stage(setting, LARGE, 90.0) for setting in SETTINGS[:2]),
)
QUICK_STAGES = (Stage(SETTINGS[3], SMALL, 2.0),)


def rows(stage: Stage) -> list[Row]:
    """Return the rows of a stage."""
    torch._dynamo.reset()  # else a second size of minibatch compiles for all sizes
    batch = minibatch(Model(stage.setting), stage.frames)
    calls = {name: make(Model(stage.setting), batch) for name, (_, make) in CONTENDERS.items()}
    timings = interleave(calls, seconds=stage.seconds, most=MOST, sample=SAMPLE)
    found = [
        Row.of(stage.setting.name, name, (stage.frames, 1), timing)
        for name, timing in timings.items()
    ]
    floor = next(row.median_us for row in found if row.contender == FLOOR)
    for row in found:
        row.this_over_bound = row.median_us / floor
    return found


# -- capture -----------------------------------------------------------------------


def seconds_to_capture(name: str) -> float:
    """Return how long the graphs of a full and of a smaller minibatch take in this process."""
    setting = next(setting for setting in ALL if setting.name == name)
    model = Model(setting)
    batch, step = minibatch(model, SMALL), make_step(model, compile=True)
    step(batch.clone())  # eager: it makes Adam's state
    start = time.perf_counter()
    for part in (batch, batch[:32].clone()):
        step(part)
    return time.perf_counter() - start


def cold_and_warm(name: str) -> tuple[str, float, float]:
    """Return the seconds of a process with an empty cache, and of one after it."""
    command = [sys.executable, "-m", "tests.benchmarks.step", "--capture", name]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
        cold, warm = (
            float(subprocess.check_output(command, env=environment, text=True).split()[-1])
            for _ in range(2)
        )
    return name, cold, warm


# -- the report --------------------------------------------------------------------


def write_report(
    folder: Path, rows: Sequence[Row], captures: Sequence[tuple[str, float, float]]
) -> Path:
    """Write step.csv, step.png and step.md, and return the last."""
    write_csv(folder / "step.csv", rows)
    draw(folder / "step.png", [row for row in rows if row.batch == SMALL])
    sizes = dict.fromkeys(row.batch for row in rows)
    names = dict.fromkeys(row.contender for row in rows)
    text = f"""# One optimization step

Time of one step (losses, gradients, clipping, Adam) as a multiple of the eager floor of the same
run; float32, one thread.

![The multiple at {SMALL} frames](step.png)

{"".join(_section(rows, frames) for frames in sizes)}Microseconds of the floor:

{_floor(rows)}

{_capture(captures)}{chr(10).join(f"- **{name}**: {CONTENDERS[name][0]}." for name in names)}

All take the same networks and the same minibatch, make the same three losses, clip the norm of the
gradients and step Adam. The contenders take turns, one sample of about 20 ms or more each a round,
in a new random order; figures are medians over the rounds. `step.csv` has the quartiles.
Capturing is not in these figures. `python -m tests.benchmarks.step`

{machine()}
"""
    (folder / "step.md").write_text(text)
    return folder / "step.md"


def _section(rows: Sequence[Row], frames: int) -> str:
    own = [row for row in rows if row.batch == frames and row.contender != FLOOR]
    parts = list(dict.fromkeys(row.part for row in own))
    cells = {(row.contender, row.part): f"{row.this_over_bound:.2f}" for row in own}
    lines = [
        [name, *(cells.get((name, part), "") for part in parts)]
        for name in dict.fromkeys(row.contender for row in own)
    ]
    table = markdown(["", *parts], lines)
    return f"Minibatches of {frames:,} frames, multiple of the floor:\n\n{table}\n\n"


def _floor(rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.contender == FLOOR]
    lines = [[row.part, f"{row.batch:,}", f"{row.median_us:,.0f}"] for row in own]
    return markdown(["", "frames", "microseconds"], lines)


def _capture(captures: Sequence[tuple[str, float, float]]) -> str:
    if not captures:
        return ""
    lines = [[name, f"{cold:.1f}", f"{warm:.1f}"] for name, cold, warm in captures]
    table = markdown(["", "empty cache", "a later process"], lines)
    return f"Seconds to capture two graphs, of {SMALL} and of 32 frames:\n\n{table}\n\n"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw a group of bars for each setting; ppokit's losses are blue."""
    parts = list(dict.fromkeys(row.part for row in rows))
    names = [name for name in dict.fromkeys(row.contender for row in rows) if name != FLOOR]
    ours, theirs = iter(OURS * 2), iter(THEIRS * 2)
    colours = {name: next(ours if name.startswith("ppokit") else theirs) for name in names}
    figure, axis = plt.subplots(figsize=(16, 6), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = {row.part: row for row in rows if row.contender == name}
        at = [place + number * width for place, part in enumerate(parts) if part in own]
        heights = [own[part].this_over_bound or 0 for part in parts if part in own]
        bars = axis.bar(at, heights, width, color=colours[name], label=name)
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=6, padding=1)
    axis.axhline(1, color="black", ls="--", lw=1.2, label=FLOOR)
    axis.set_xticks([place + 0.4 for place in range(len(parts))], parts)
    axis.set_ylabel("time over the eager floor (median)")
    axis.set_title(f"One optimization step, {SMALL} frames, float32, one thread")
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08), fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
