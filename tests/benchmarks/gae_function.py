"""The GAE benchmark's first part: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.benchmarks.contenders import COPY, contenders
from tests.benchmarks.data import Data, reference
from tests.benchmarks.memory import extra_memory
from tests.benchmarks.tables import Row, Shape, compare
from tests.benchmarks.timing import interleave

PART = "function"
TOLERANCE = 1e-3  # float32 and torchrl's cut-off of small weights stay far below; a wrong rule not


def function_rows(shapes: Iterable[Shape], seconds: float) -> Iterable[list[Row]]:
    """Yield the rows of one shape after the other, ``seconds`` of timing for each."""
    everyone = contenders()
    peers = [name for name, who in everyone.items() if not who.ours and name != COPY]
    for shape in shapes:
        data = Data.draw(*shape)
        calls = {name: who.prepare(data) for name, who in everyone.items()}
        truth = reference(data)
        errors: dict[str, float] = {}
        for name, who in everyone.items():
            if who.advantage is None:
                continue
            with calls[name].within():
                advantage = who.advantage(calls[name].run()).reshape(shape)
            errors[name] = check(name, advantage, truth)
        timings = interleave(calls, seconds=seconds)
        rows = [Row.of(PART, name, shape, timing) for name, timing in timings.items()]
        for row in rows:
            row.max_error = errors.get(row.contender)
        compare(rows, peers=peers, bound=COPY)
        yield rows


def check(name: str, advantage: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest error; who computes something else is no contender."""
    error = (advantage.double() - truth).abs().max().item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{name} is off by {error:.2g} at {list(truth.shape)}: it is not GAE.")
    return error


def add_memory(rows: Iterable[Row]) -> None:
    """Fill in the memory of rows of this part."""
    rows = [row for row in rows if row.part == PART and row.contender != COPY]
    found = extra_memory(list(dict.fromkeys(row.shape for row in rows)))
    for row in rows:
        row.extra_kib = found.get((row.contender, *row.shape))
