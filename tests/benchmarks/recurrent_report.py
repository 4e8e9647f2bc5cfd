"""The rows of the recurrent benchmark, and what it found as text and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ppokit import SequenceBatcher
from tests.benchmarks.figures import OURS, THEIRS, plt
from tests.benchmarks.recurrent_contenders import (
    MINIBATCHES,
    PLAIN,
    SEQ_LEN,
    Case,
    check,
    draws,
    epochs,
)
from tests.benchmarks.report import machine
from tests.benchmarks.tables import Row, compare, markdown, versions, write_csv
from tests.benchmarks.timing import Call, interleave

EPOCH, GRU_EPOCH, DRAW, CUT = "epoch", "epoch of a GRU", "draw", "cut"
FORWARD = "nn.LSTM, forward"
TOLERANCE = 1e-5  # of the network's outputs
SHAPES = ((16, 128), (64, 128), (8, 1024))
LARGE = (8_192, 128)


@dataclass(frozen=True)
class Stage:
    """What is timed in one go."""

    part: str
    shape: tuple[int, int]
    dones: float
    seconds: float
    kind: type[nn.RNNBase] = nn.LSTM

    @property
    def name(self) -> str:
        """Part, shape and share of dones."""
        return f"{self.part} [{self.shape[0]:,}, {self.shape[1]:,}], {self.dones:.0%} done"


STAGES = (
    *(Stage(EPOCH, shape, dones, 25.0) for shape in SHAPES for dones in (0.01, 0.05)),
    *(Stage(GRU_EPOCH, shape, dones, 15.0, nn.GRU) for shape in SHAPES for dones in (0.01, 0.05)),
    *(Stage(DRAW, shape, 0.01, 8.0) for shape in SHAPES),
    *(Stage(CUT, LARGE, dones, 40.0) for dones in (0.01, 0.05)),
)
QUICK_STAGES = (
    Stage(EPOCH, (8, 64), 0.05, 1.0),
    Stage(GRU_EPOCH, (8, 64), 0.05, 1.0, nn.GRU),
    Stage(DRAW, (16, 128), 0.01, 1.0),
    Stage(CUT, (64, 128), 0.01, 1.0),
)


@dataclass
class RecurrentRow(Row):
    """A row with the stage, and the share of padding."""

    stage: str = ""
    padded: float | None = None


def rows(stage: Stage) -> list[Row]:
    """Return the rows of a stage."""
    case = Case.draw(*stage.shape, stage.dones, stage.kind)
    if stage.part == CUT:  # as large as it is, it is timed alone
        found = _cut(case, stage)
        compare(found, peers=[], bound=FORWARD)
        return found
    if (error := check(case)) > TOLERANCE:
        raise RuntimeError(f"{stage.name}: the outputs are {error:.2g} off.")
    found = (_draw if stage.part == DRAW else _epoch)(case, stage)
    bound = "ppokit" if stage.part == DRAW else PLAIN
    compare(found, peers=[r.contender for r in found if "ppokit" not in r.contender], bound=bound)
    return found


def _row(stage: Stage, name: str, timing: object, count: int = 1) -> RecurrentRow:
    row = RecurrentRow.of(stage.part, name, stage.shape, timing)  # pyright: ignore
    assert isinstance(row, RecurrentRow)
    medians = (row.median_us, row.lower_quartile_us or 0.0, row.upper_quartile_us or 0.0)
    median, lower, upper = (value / count for value in medians)
    return replace(
        row,
        stage=stage.name,
        median_us=median,
        lower_quartile_us=lower,
        upper_quartile_us=upper,
        max_error=None,
    )


def _epoch(case: Case, stage: Stage) -> list[Row]:
    batcher = SequenceBatcher(SEQ_LEN)
    padded = batcher.padded_fraction(batcher.minibatches(batcher(case.batch), MINIBATCHES))
    timings = interleave(epochs(case), seconds=stage.seconds)
    return [
        replace(_row(stage, name, timing), padded=padded if name == "ppokit" else None)
        for name, timing in timings.items()
    ]


def _draw(case: Case, stage: Stage) -> list[Row]:
    calls = draws(case)
    timings = interleave({name: d.call for name, d in calls.items()}, seconds=stage.seconds)
    return [_row(stage, name, timing, calls[name].minibatches) for name, timing in timings.items()]


def _cut(case: Case, stage: Stage) -> list[Row]:
    batcher, features = SequenceBatcher(SEQ_LEN), case.batch["features"]

    def forward() -> None:
        with torch.no_grad():
            case.network(features)

    def from_batch() -> None:
        places = batcher.places(case.batch)
        for _ in batcher.minibatches(places, 64, batch=case.batch):
            pass

    runs = {
        "ppokit, batcher(batch)": partial(batcher, case.batch),
        "ppokit, places and 64 minibatches": from_batch,
        FORWARD: forward,
    }
    calls = {name: Call(run) for name, run in runs.items()}
    timings = interleave(calls, seconds=stage.seconds, fewest=3)
    return [_row(stage, name, timing) for name, timing in timings.items()]


def _table(rows: Sequence[Row], field: str, style: str) -> str:
    stages = list(dict.fromkeys(row.stage for row in rows))  # pyright: ignore
    names = list(dict.fromkeys(row.contender for row in rows))
    cells = {(row.contender, row.stage): getattr(row, field) for row in rows}  # pyright: ignore
    lines = [[name] for name in names]
    for line in lines:
        values = [cells.get((line[0], stage)) for stage in stages]
        line += ["" if value is None else format(value, style) for value in values]
    lines = [line for line in lines if any(line[1:])]
    return markdown(["", *(stage[stage.index("[") :] for stage in stages)], lines)


def draw_figure(path: Path, rows: Sequence[Row]) -> None:
    """Draw the multiples of the plain LSTM, a group of bars for each shape."""
    stages = list(dict.fromkeys(row.stage for row in rows))  # pyright: ignore
    names = [n for n in dict.fromkeys(row.contender for row in rows) if n != PLAIN]
    colours = dict(zip(names, (*OURS[1:3], *THEIRS), strict=False))
    figure, axis = plt.subplots(figsize=(12, 4.5), layout="constrained")
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        own = [row for row in rows if row.contender == name]
        places = [stages.index(row.stage) + i * width for row in own]  # pyright: ignore
        bars = axis.bar(
            places, [r.this_over_bound or 0 for r in own], width, label=name, color=colours[name]
        )
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.axhline(1, color="black", ls="--", lw=1)
    middle = [i + 0.4 - width / 2 for i in range(len(stages))]
    axis.set_xticks(middle, [stage[stage.index("[") :] for stage in stages])
    axis.set_yscale("log")
    axis.set_ylabel("times a plain nn.LSTM")
    axis.set_title("LSTM 64 to 128, forward and backward over each frame once, one thread")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(folder: Path, rows: Sequence[Row]) -> Path:
    """Write recurrent.csv, recurrent.png and recurrent.md, and return the last."""
    write_csv(folder / "recurrent.csv", rows)
    parts = (EPOCH, GRU_EPOCH, DRAW, CUT)
    epoch, gru, draw, cut = ([row for row in rows if row.part == part] for part in parts)
    draw_figure(folder / "recurrent.png", epoch)
    text = f"""# Recurrent training

An LSTM from 64 to 128 in float32, sequences of {SEQ_LEN} steps, one thread. The contenders take
turns, in a new random order each round; figures are medians over the rounds, and `recurrent.csv`
has the quartiles. Before the clock starts, our outputs must agree to {TOLERANCE} with those of the
run that wrote the states. `python -m tests.benchmarks.recurrent`

## An epoch: forward and backward over each frame of a batch once

As a multiple of a plain `nn.LSTM` over as many frames in {MINIBATCHES} minibatches of sequences of
{SEQ_LEN} that nothing interrupts:

![Multiples of a plain LSTM](recurrent.png)

{_table(epoch, "this_over_bound", ".2f")}

Milliseconds:

{_table([replace(r, median_us=r.median_us / 1e3) for r in epoch], "median_us", ".1f")}

Share of padding:

{_table(epoch, "padded", ".1%")}

- **ppokit**: `SequenceBatcher({SEQ_LEN})`, {MINIBATCHES} minibatches of `minibatches()`, and
  `ppokit.LSTMModule` from the stored states. The next two lines include the cutting of the batch,
  which an update does once for all epochs, and use torchrl's `LSTMModule`.
- **torchrl, recurrent mode**: `LSTMModule` over the whole batch, with resets within the rows.
- **SB3-contrib, step loop**, if it is installed: `_process_sequence` over the rows of the batch.

A GRU from 64 to 128, as a multiple of a plain `nn.GRU`:

{_table(gru, "this_over_bound", ".2f")}

## Drawing a minibatch of 512 frames

Microseconds a minibatch:

{_table(draw, "median_us", ",.0f")}

Ours are the mean over an epoch of minibatches, from sequences that were cut, or straight from the
batch; torchrl's slices of {SEQ_LEN} steps, `strict_length=False`.

## Cutting a large batch

Milliseconds, beside one forward pass of the LSTM over the batch:

{_table([replace(r, median_us=r.median_us / 1e3) for r in cut], "median_us", ",.0f")}

{machine()}
{versions("sb3-contrib")}
"""
    (folder / "recurrent.md").write_text(text)
    return folder / "recurrent.md"
