"""Entries of a batch in another order: one gather for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

TOGETHER = 8  # minibatches: what a gather of one costs is then spread over as many


def gather(
    tensordict: TensorDictBase, index: Tensor, *, leave_out: Collection[NestedKey] = ()
) -> TensorDict:
    """Return the frames at these positions of the flattened batch, ``[N, L]``.

    Args:
        tensordict: ``[*B]``.
        index: ``[N, L]``, int64.
        leave_out: entries that are not wanted.
    """
    shape = tensordict.batch_size
    frames = lambda x: frames_of(x, index, shape)  # noqa: E731
    others = lambda x: x.reshape(-1)[index]  # noqa: E731
    return _map(tensordict, frames, others, index.shape, leave_out)


def frames_of(x: Tensor, index: Tensor, batch_size: torch.Size) -> Tensor:
    """Return the frames of a tensor at these positions of the flattened batch.

    Args:
        x: ``[*B, ...]``.
        index: ``[*N]``, int64.
        batch_size: ``[*B]``.
    """
    if not x.is_contiguous():  # flattening would copy all of it
        return x[torch.unravel_index(index, batch_size)]
    ndim = len(batch_size)
    rows = x.flatten(0, ndim - 1).index_select(0, index.flatten())
    return rows.view(index.shape + x.shape[ndim:])


def take(sequences: TensorDictBase, rows: Tensor, width: int) -> TensorDict:
    """Return some sequences ``[n, width]``, of each the first steps.

    Args:
        sequences: ``[N, L]``.
        rows: ``[n]``, int64.
        width: in steps, at most L.
    """
    whole = width == sequences.shape[1]

    def steps(x: Tensor) -> Tensor:
        if x.stride(1) == 0:  # one value for all steps stays one value
            first = x.select(1, 0)
            if x.stride(0) == 0:  # and so does one for all sequences
                return expand(first.narrow(0, 0, len(rows)), width)
            return expand(first.index_select(0, rows), width)
        return (x if whole else x.narrow(1, 0, width)).index_select(0, rows)

    others = lambda x: x[:, :width][rows]  # noqa: E731
    return _map(sequences, steps, others, torch.Size((len(rows), width)))


def take_all(
    sequences: TensorDictBase, order: Tensor, sizes: Sequence[int], widths: Sequence[int]
) -> Iterator[TensorDict]:
    """Yield successive minibatches ``[n, width]``, a few of them gathered together.

    A small minibatch has so many entries that calling for each takes longer than copying it.

    Args:
        sequences: ``[N, L]``.
        order: the sequences of all minibatches, int64.
        sizes: how many of them each has.
        widths: its steps.
    """
    device = order.device if sequences.device is None else sequences.device
    rows = order.to(device).split([sum(some) for some in _by(TOGETHER, sizes)])
    for own, some, steps in zip(rows, _by(TOGETHER, sizes), _by(TOGETHER, widths), strict=True):
        yield from split(take(sequences, own, max(steps)), some, steps)


def _by(n: int, numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[first : first + n] for first in range(0, len(numbers), n)]


def split(
    sequences: TensorDictBase, sizes: Sequence[int], widths: Sequence[int]
) -> list[TensorDict]:
    """Return successive sequences ``[n, width]``, of each the first steps, as views.

    Args:
        sequences: ``[N, L]``.
        sizes: how many of them, N together.
        widths: in steps, each at most L.
    """
    length = sequences.shape[1]
    shapes = [torch.Size(pair) for pair in zip(sizes, widths, strict=True)]
    ends = list(itertools.accumulate(sizes))

    def of_tensor(x: Tensor) -> list[Tensor]:
        pieces = zip(torch.split_with_sizes(x, sizes), widths, strict=True)
        return [piece if n == length else piece.narrow(1, 0, n) for piece, n in pieces]

    def of_other(x: Any) -> list[Any]:
        of_each = zip(ends, shapes, strict=True)
        return [x[end - n : end, :width] for end, (n, width) in of_each]

    def of_tensordict(inner: TensorDictBase) -> list[TensorDict]:
        entries = {
            name: of_tensor(value)
            if isinstance(value, Tensor)
            else of_tensordict(value)
            if isinstance(value, TensorDictBase)
            else of_other(value)
            for name, value in inner.items()
        }
        rows = zip(*entries.values(), strict=True) if entries else ((),) * len(shapes)
        alike = _like(inner, 2)
        return [
            alike(dict(zip(entries, row, strict=True)), shape)
            for row, shape in zip(rows, shapes, strict=True)
        ]

    return of_tensordict(sequences)


def expand(x: Tensor, width: int) -> Tensor:
    """Return ``[N, width, ...]``, the same at every step, of ``[N, ...]``, without a copy."""
    return x.unsqueeze(1).expand(-1, width, *x.shape[1:])


def _map(
    tensordict: TensorDictBase,
    on_tensor: Callable[[Tensor], Tensor],
    on_other: Callable[[Any], Any],
    batch_size: torch.Size,
    leave_out: Collection[NestedKey] = (),
) -> TensorDict:
    """Return all entries, mapped. Nested batch sizes keep their further dimensions."""
    ndim = tensordict.ndim

    def mapped(inner: TensorDictBase, path: tuple[str, ...]) -> TensorDict:
        entries: dict[str, Any] = {}
        for name, value in inner.items():
            if leave_out and ((*path, name) if path else name) in leave_out:
                continue
            if isinstance(value, Tensor):
                entries[name] = on_tensor(value)
            elif isinstance(value, TensorDictBase):
                entries[name] = mapped(value, (*path, name))
            else:  # what is no tensor
                entries[name] = on_other(value)
        return _like(inner, ndim)(entries, batch_size)

    return mapped(tensordict, ())


def _like(
    tensordict: TensorDictBase, ndim: int
) -> Callable[[dict[str, Any], torch.Size], TensorDict]:
    """Return what makes TensorDicts of other entries with other ``ndim`` first dimensions."""
    further, device = tensordict.batch_size[ndim:], tensordict.device
    names: Any = [None, "time", *[None] * len(further)]
    # The checks of TensorDict() take as long as the gathers of a small minibatch.
    new = TensorDict._new_unsafe
    return lambda entries, shape: new(entries, shape + further, device, names.copy())
