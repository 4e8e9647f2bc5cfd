"""Entries of a batch in another order: one gather for each."""

from __future__ import annotations

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
            return expand(x[:, 0].index_select(0, rows), width)
        return (x if whole else x.narrow(1, 0, width)).index_select(0, rows)

    others = lambda x: x[:, :width][rows]  # noqa: E731
    return _map(sequences, steps, others, torch.Size((len(rows), width)))


def take_all(
    sequences: TensorDictBase, parts: list[Tensor], widths: Sequence[int]
) -> Iterator[TensorDict]:
    """Yield the sequences of each part ``[n, width]``, a few parts gathered together.

    A small minibatch has so many entries that calling for each takes longer than copying it.
    """
    device = parts[0].device if sequences.device is None else sequences.device
    for first in range(0, len(parts), TOGETHER):
        some, steps = parts[first : first + TOGETHER], widths[first : first + TOGETHER]
        together = take(sequences, torch.cat(some).to(device), max(steps))
        yield from split(together, [len(part) for part in some], steps)


def split(
    sequences: TensorDictBase, sizes: Sequence[int], widths: Sequence[int]
) -> Iterator[TensorDict]:
    """Yield successive sequences ``[n, width]``, of each the first steps, as views.

    Args:
        sequences: ``[N, L]``.
        sizes: how many of them, N together.
        widths: in steps, each at most L.
    """
    pieces: list[Sequence[Tensor]] = []  # of each tensor, in the order in which they are mapped

    def cut(x: Tensor) -> Tensor:
        pieces.append(x.split(list(sizes)))
        return x

    _map(sequences, cut, lambda x: x, sequences.batch_size)
    length, start = sequences.shape[1], 0
    for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
        own = iter(pieces)
        whole = lambda _, own=own, i=i: next(own)[i]  # noqa: E731
        steps = lambda _, own=own, i=i, width=width: next(own)[i].narrow(1, 0, width)  # noqa: E731
        others = lambda x, at=start, n=size, width=width: x[at : at + n, :width]  # noqa: E731
        on_tensor = whole if width == length else steps
        yield _map(sequences, on_tensor, others, torch.Size((size, width)))
        start += size


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
        further = inner.batch_size[ndim:]
        names: Any = [None, "time", *[None] * len(further)]
        # The checks of TensorDict() take as long as the gathers of a small minibatch.
        return TensorDict._new_unsafe(entries, batch_size + further, inner.device, names)

    return mapped(tensordict, ())
