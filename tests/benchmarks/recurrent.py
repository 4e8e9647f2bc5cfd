"""Recurrent training: an epoch of an LSTM or a GRU, minibatches of sequences, cutting a batch.

``python -m tests.benchmarks.recurrent`` takes about five minutes and writes
``docs/benchmarks/recurrent.{csv,md,png}``. SB3-contrib takes part if it is installed (extra
``bench``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrl import data as replay
from torchrl.modules import set_recurrent_mode

from ppokit import SequenceBatcher
from tests.benchmarks import recurrent_case
from tests.benchmarks.figures import draw_multiples
from tests.benchmarks.recurrent_case import FEATURES, HIDDEN, MASK, MINIBATCHES, SEQ_LEN, Case
from tests.benchmarks.report import Benchmark, optional
from tests.benchmarks.tables import Row, Shape, compare, pivot, timed
from tests.benchmarks.timing import Call, interleave

EPOCH, GRU_EPOCH, DRAW, CUT = "epoch", "epoch of a GRU", "draw", "cut"
PLAIN, FORWARD = "plain", "nn.LSTM, forward"
FRAMES = 512  # of a minibatch that is drawn
TOLERANCE = 1e-5  # of the network's outputs
SHAPES = ((16, 128), (64, 128), (8, 1024))


def stages(quick: bool) -> list[Callable[[], Sequence[Row]]]:
    if quick:
        cells: Any = [(EPOCH, (8, 64), 0.05, 1.0), (GRU_EPOCH, (8, 64), 0.05, 1.0)]
        cells += [(DRAW, (16, 128), 0.01, 1.0), (CUT, (64, 128), 0.01, 1.0)]
    else:
        cells = [(EPOCH, shape, dones, 25.0) for shape in SHAPES for dones in (0.01, 0.05)]
        cells += [(GRU_EPOCH, shape, dones, 15.0) for shape in SHAPES for dones in (0.01, 0.05)]
        cells += [(DRAW, shape, 0.01, 8.0) for shape in SHAPES]
        cells += [(CUT, (8_192, 128), dones, 40.0) for dones in (0.01, 0.05)]
    return [partial(stage_rows, *cell) for cell in cells]


def stage_rows(part: str, shape: Shape, dones: float, seconds: float) -> Sequence[Row]:
    case = Case.draw(*shape, dones, nn.GRU if part == GRU_EPOCH else nn.LSTM)
    if part != CUT and (error := recurrent_case.check(case)) > TOLERANCE:
        raise RuntimeError(f"{part} {shape}: the outputs are {error:.2g} off.")
    padded = None
    if part == CUT:
        rows = timed(part, shape, cuts(case), bound=FORWARD, seconds=seconds, fewest=3)
    elif part == DRAW:
        rows = drawn_rows(case, shape, seconds)
    else:
        calls = epochs(case)
        peers = [name for name in calls if "ppokit" not in name]
        rows = timed(part, shape, calls, peers=peers, bound=PLAIN, seconds=seconds)
        batcher = SequenceBatcher(SEQ_LEN)
        sequences = list(batcher.minibatches(batcher(case.batch), MINIBATCHES))
        masks = [part["collector", "mask"] for part in sequences]
        padded = 1 - sum(int(x.sum()) for x in masks) / sum(x.numel() for x in masks)
    stage = f"{part} [{shape[0]:,}, {shape[1]:,}], {dones:.0%} done"
    for row in rows:
        row.more = {"stage": stage, "padded": padded if row.contender == "ppokit" else None}
    return rows


def epochs(case: Case) -> dict[str, Call]:
    """Return the contenders' forward and backward over each frame of the batch once."""
    batcher = SequenceBatcher(SEQ_LEN)

    def plain() -> None:
        frames = case.batch["features"].reshape(-1, SEQ_LEN, FEATURES)
        for part in frames.tensor_split(MINIBATCHES):
            case.network(part)[0].sum().backward()

    def ours(module: Any = case.module, cut: Any = lambda: case.sequences) -> None:
        with set_recurrent_mode(True):
            for part in batcher.minibatches(cut(), MINIBATCHES):
                (module(part)["hidden"] * part[MASK].unsqueeze(-1)).sum().backward()

    def torchrl() -> None:
        with set_recurrent_mode(True):
            case.of_torchrl(case.batch.copy())["hidden"].sum().backward()

    runs: dict[str, Any] = {
        PLAIN: plain,
        "ppokit": ours,
        "ppokit, cut included": partial(ours, cut=lambda: batcher(case.batch)),
        "ppokit, torchrl's module": partial(ours, case.of_torchrl),
        "torchrl, recurrent mode": torchrl,
        "SB3-contrib, step loop": sb3_contrib(case),
    }
    return {name: Call(run) for name, run in runs.items() if run is not None}


def sb3_contrib(case: Case) -> Callable[[], None] | None:
    """Return SB3-contrib's loop over the steps, or None if it is not installed."""
    policies: Any = optional("sb3_contrib.common.recurrent.policies")
    if policies is None or not isinstance(case.network, nn.LSTM):
        return None
    process = policies.RecurrentActorCriticPolicy._process_sequence
    lstm = nn.LSTM(FEATURES, HIDDEN)
    features = case.batch["features"].flatten(0, 1)
    starts = case.batch["is_init"].float().flatten()
    zeros = torch.zeros(1, len(case.batch), HIDDEN)

    def run() -> None:
        process(features, (zeros, zeros), starts, lstm)[0].sum().backward()

    return run


def exhaust(batches: Callable[[], Iterable[Any]]) -> Call:
    """Return a call that iterates over all batches."""

    def run() -> None:
        for _ in batches():
            pass

    return Call(run)


def cuts(case: Case) -> dict[str, Call]:
    batcher = SequenceBatcher(SEQ_LEN)

    def from_batch() -> Iterable[Any]:
        return batcher.minibatches(batcher.places(case.batch), 64, batch=case.batch)

    return {
        "ppokit, batcher(batch)": Call(partial(batcher, case.batch)),
        "ppokit, places and 64 minibatches": exhaust(from_batch),
        FORWARD: Call(partial(torch.no_grad()(case.network), case.batch["features"])),
    }


def drawn_rows(case: Case, shape: Shape, seconds: float) -> Sequence[Row]:
    """Return the rows of drawing one minibatch."""
    batcher, number = SequenceBatcher(SEQ_LEN), max(1, case.batch.numel() // FRAMES)
    places = batcher.places(case.batch)
    sequences = partial(batcher.minibatches, case.sequences, number)
    from_batch = partial(batcher.minibatches, places, number, batch=case.batch)
    calls = {"ppokit": exhaust(sequences), "ppokit, from the batch": exhaust(from_batch)}
    options: Any = {"slice_len": SEQ_LEN, "traj_key": ("collector", "traj_ids")}
    options["strict_length"] = False
    with_cache = replay.SliceSampler(**options, cache_values=True)
    for sampler in (with_cache, replay.SliceSamplerWithoutReplacement(**options)):
        storage = replay.LazyTensorStorage(case.batch.numel())
        buffer = replay.ReplayBuffer(storage=storage, sampler=sampler, batch_size=FRAMES)
        buffer.extend(case.batch.reshape(-1))
        calls[f"torchrl, {type(sampler).__name__}"] = Call(buffer.sample)
    rows = [
        Row.of(DRAW, name, shape, timing, scale=1 / number if "ppokit" in name else 1.0)
        for name, timing in interleave(calls, seconds=seconds).items()
    ]
    return compare(rows, peers=[name for name in calls if "ppokit" not in name], bound="ppokit")


def place(row: Row) -> str:
    """Return shape and share of dones."""
    stage = row.more["stage"]
    return stage[stage.index("[") :]


def page(rows: Sequence[Row]) -> str:
    parts = (EPOCH, GRU_EPOCH, DRAW, CUT)
    epoch, gru, draw, cut = ([row for row in rows if row.part == part] for part in parts)
    return f"""# Recurrent training

An LSTM from 64 to 128 in float32, sequences of {SEQ_LEN} steps, one thread. The contenders take
turns in a random order; figures are medians, and `recurrent.csv` has the quartiles. Before the
clock starts, ppokit's outputs must agree to {TOLERANCE} with those of the run that wrote the
states. `python -m tests.benchmarks.recurrent`

## An epoch: forward and backward over each frame of a batch once

Multiples of a plain `nn.LSTM` over as many frames, in {MINIBATCHES} minibatches of sequences of
{SEQ_LEN} without resets:

![Multiples of a plain LSTM](recurrent.png)

{pivot(epoch, "this_over_bound", ".2f", column=place)}

Milliseconds:

{pivot(epoch, "median_ms", ".1f", column=place)}

Share of padding:

{pivot(epoch, lambda row: row.more["padded"], ".1%", column=place)}

- **ppokit**: `ppokit.LSTMModule` over minibatches of `SequenceBatcher({SEQ_LEN})`.
- **torchrl, recurrent mode**: `LSTMModule` over the whole batch, with resets within the rows.
- **SB3-contrib, step loop**, if it is installed: `_process_sequence` over the rows of the batch.

A GRU from 64 to 128, as a multiple of a plain `nn.GRU`:

{pivot(gru, "this_over_bound", ".2f", column=place)}

## Drawing a minibatch of 512 frames

Microseconds a minibatch:

{pivot(draw, "median_us", ",.0f", column=place)}

ppokit's figures are means over an epoch of minibatches, from sequences or straight from the batch.
torchrl's samplers draw slices of {SEQ_LEN} steps with `strict_length=False`.

## Cutting a large batch

Milliseconds, beside one forward pass of the LSTM over the batch:

{pivot(cut, "median_ms", ",.0f", column=place)}
"""


def main() -> None:
    bench = Benchmark("recurrent", __doc__, packages=("sb3-contrib",))
    rows = bench.measure(stages(bench.quick))
    epoch = [row for row in rows if row.part == EPOCH]
    title = "LSTM 64 to 128, forward and backward over each frame once, one thread"
    options: Any = {"group": place, "label": "times a plain nn.LSTM", "log": True}
    draw_multiples(bench.file("png"), epoch, PLAIN, title, **options)
    bench.write_page(page(rows))


if __name__ == "__main__":
    main()
