"""Recurrent training: an epoch of an LSTM or a GRU, minibatches of sequences, cutting a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl import data as replay
from torchrl import modules as torchrl_modules
from torchrl.modules import set_recurrent_mode

import ppokit
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, Shape, multiples_of, pivot, timed
from tests.benchmarks.timing import Call

EPOCH, GRU_EPOCH, DRAW, CUT = "epoch", "epoch of a GRU", "draw", "cut"
PLAIN, FORWARD = "plain", "nn.LSTM, forward"
FRAMES = 512  # of a minibatch that is drawn
TOLERANCE = 1e-5  # of the network's outputs
SHAPES = ((16, 128), (64, 128), (8, 1024))
FEATURES, HIDDEN, SEQ_LEN, MINIBATCHES = 64, 128, 32, 8
MASK = ("collector", "mask")
KINDS: dict[type[nn.RNNBase], tuple[str, Sequence[str]]] = {
    nn.LSTM: ("LSTM", ("recurrent_state_h", "recurrent_state_c")),
    nn.GRU: ("GRU", ("recurrent_state",)),
}


@dataclass
class Case:
    """A network, in ppokit's module and in torchrl's, and a batch with its recurrent states."""

    network: nn.RNNBase
    module: Any
    of_torchrl: Any
    batch: TensorDict

    @cached_property
    def sequences(self) -> TensorDictBase:
        return ppokit.SequenceBatcher(SEQ_LEN)(self.batch)

    @classmethod
    def draw(cls, rows: int, steps: int, dones: float, kind: type[nn.RNNBase] = nn.LSTM) -> Case:
        torch.manual_seed(0)
        network = kind(FEATURES, HIDDEN, batch_first=True)
        name, keys = KINDS[kind]
        names: dict[str, Any] = {
            name.lower(): network,
            "in_keys": ["features", *keys],
            "out_keys": ["hidden", *(("next", key) for key in keys)],
        }
        done = torch.rand(rows, steps, 1) < dones
        is_init = torch.cat([torch.ones(rows, 1, 1, dtype=torch.bool), done[:, :-1]], 1)
        ids = is_init.flatten().cumsum(0).view(rows, steps)
        features = torch.randn(rows, steps, FEATURES)
        batch = TensorDict(
            {
                "features": features,
                "is_init": is_init,
                **dict(zip(keys, _states(network, features, is_init), strict=True)),
                "next": {"done": done},
                "collector": {"traj_ids": ids},
            },
            [rows, steps],
            names=[None, "time"],
        )
        modules = [getattr(of, f"{name}Module")(**names) for of in (ppokit, torchrl_modules)]
        return cls(network, *modules, batch)


@torch.no_grad()
def _states(network: nn.RNNBase, features: Tensor, is_init: Tensor) -> list[Tensor]:
    """Return the states before each step ``[B, T, 1, H]``."""
    is_lstm = isinstance(network, nn.LSTM)
    state: Any = [torch.zeros(1, len(features), HIDDEN) for _ in range(1 + is_lstm)]
    seen = []
    for x, begins in zip(features.unbind(1), is_init.unbind(1), strict=True):
        state = [torch.where(begins, 0, part) for part in state]
        seen.append([part.transpose(0, 1) for part in state])
        after = network(x.unsqueeze(1), tuple(state) if is_lstm else state[0])[1]
        state = after if is_lstm else [after]
    return [torch.stack(parts, 1) for parts in zip(*seen, strict=True)]


def check(case: Case) -> float:
    """Return the distance of the outputs from those of the run that wrote the states."""
    batcher = ppokit.SequenceBatcher(SEQ_LEN)
    worst = 0.0
    with torch.no_grad(), set_recurrent_mode(True):
        expected = case.of_torchrl(case.batch.copy())["hidden"].flatten(0, 1)
        for part in batcher.minibatches(case.sequences, MINIBATCHES):
            mask = part[MASK]
            found = case.module(part)["hidden"][mask]
            error = (found - expected[part["sequence", "index"][mask]]).abs().max()
            worst = max(worst, float(error))
    return worst


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
    if part != CUT and (error := check(case)) > TOLERANCE:
        raise RuntimeError(f"{part} {shape}: the outputs are {error:.2g} off.")
    if part == CUT:
        rows = timed(part, shape, cuts(case), bound=FORWARD, seconds=seconds, fewest=3)
    elif part == DRAW:
        rows = timed(part, shape, draws(case), bound="ppokit", seconds=seconds)
    else:
        calls = epochs(case)
        peers = [name for name in calls if "ppokit" not in name]
        rows = timed(part, shape, calls, peers=peers, bound=PLAIN, seconds=seconds)
    for row in rows:
        row.more = {"dones": dones}
        if part in (EPOCH, GRU_EPOCH) and row.contender == "ppokit":
            row.more["padded"] = padded(case)
    return rows


def padded(case: Case) -> float:
    """Return the share of padding in the minibatches of an epoch."""
    parts = ppokit.SequenceBatcher(SEQ_LEN).minibatches(case.sequences, MINIBATCHES)
    masks = [part[MASK] for part in parts]
    return 1 - sum(int(x.sum()) for x in masks) / sum(x.numel() for x in masks)


def epochs(case: Case) -> dict[str, Call]:
    """Return the contenders' forward and backward over each frame of the batch once."""
    batcher = ppokit.SequenceBatcher(SEQ_LEN)

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

    runs = {
        PLAIN: plain,
        "ppokit": ours,
        "ppokit, cut included": partial(ours, cut=lambda: batcher(case.batch)),
        "ppokit, torchrl's module": partial(ours, case.of_torchrl),
        "torchrl, recurrent mode": torchrl,
    }
    return {name: Call(run) for name, run in runs.items()}


def cuts(case: Case) -> dict[str, Call]:
    batcher = ppokit.SequenceBatcher(SEQ_LEN)

    def from_batch() -> None:
        for _ in batcher.minibatches(batcher.places(case.batch), 64, batch=case.batch):
            pass

    return {
        "ppokit, batcher(batch)": Call(partial(batcher, case.batch)),
        "ppokit, places and 64 minibatches": Call(from_batch),
        FORWARD: Call(partial(torch.no_grad()(case.network), case.batch["features"])),
    }


def draws(case: Case) -> dict[str, Call]:
    """Return calls that draw one minibatch; ppokit's draw one epoch after another."""
    batcher, number = ppokit.SequenceBatcher(SEQ_LEN), max(1, case.batch.numel() // FRAMES)
    places = batcher.places(case.batch)
    sources = {
        "ppokit": partial(batcher.minibatches, case.sequences, number),
        "ppokit, from the batch": partial(batcher.minibatches, places, number, batch=case.batch),
    }
    calls: dict[str, Any] = {
        name: chain.from_iterable(iter(source, None)).__next__ for name, source in sources.items()
    }
    options: Any = {"slice_len": SEQ_LEN, "traj_key": ("collector", "traj_ids")}
    options["strict_length"] = False
    with_cache = replay.SliceSampler(**options, cache_values=True)
    for sampler in (with_cache, replay.SliceSamplerWithoutReplacement(**options)):
        storage = replay.LazyTensorStorage(case.batch.numel())
        buffer = replay.ReplayBuffer(storage=storage, sampler=sampler, batch_size=FRAMES)
        buffer.extend(case.batch.reshape(-1))
        calls[f"torchrl, {type(sampler).__name__}"] = buffer.sample
    return {name: Call(run) for name, run in calls.items()}


def place(row: Row) -> str:
    return f"[{row.batch:,}, {row.steps:,}], {row.more['dones']:.0%} done"


def main() -> None:
    bench = Benchmark("recurrent")
    rows = bench.measure(stages(bench.quick))
    parts = (EPOCH, GRU_EPOCH, DRAW, CUT)
    epoch, gru, draw, cut = ([row for row in rows if row.part == part] for part in parts)
    options: Any = {"label": "times a plain nn.LSTM", "style": ".2f", "log": True}
    draw_bars(bench.file("png"), multiples_of(epoch, place), **options)
    bench.write_page(f"""# Recurrent training

An LSTM from 64 to 128 in float32, sequences of {SEQ_LEN} steps, one thread. Before the
clock starts, ppokit's outputs must agree to {TOLERANCE} with those of the run that wrote the
states.

## An epoch: forward and backward over each frame of a batch once

Multiples of a plain `nn.LSTM` over as many frames, in {MINIBATCHES} minibatches of sequences of
{SEQ_LEN} without resets:

![Multiples of a plain LSTM](recurrent.png)

{pivot(epoch, "this_over_bound", ".2f", column=place)}

Milliseconds:

{pivot(epoch, "median_ms", ".1f", column=place)}

Share of padding:

{pivot(epoch, lambda row: row.more.get("padded"), ".1%", column=place)}

- **ppokit**: `ppokit.LSTMModule` over minibatches of `SequenceBatcher({SEQ_LEN})`.
- **torchrl, recurrent mode**: `LSTMModule` over the whole batch, with resets within the rows.

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
""")


if __name__ == "__main__":
    main()
