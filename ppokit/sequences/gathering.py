"""Gathering the entries of a batch into sequences, and putting them back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import as_key, get_if_any, key_parts


def gather(
    tensordict: TensorDictBase, index: Tensor, *, leave_out: Collection[NestedKey] = ()
) -> TensorDict:
    """Return the frames at these positions of the flattened batch, ``[N, L]``.

    Args:
        tensordict: ``[*B]``.
        index: ``[N, L]``, int64.
        leave_out: entries to drop.
    """
    shape = tensordict.batch_size
    frames = lambda x: gather_frames(x, index, shape)  # noqa: E731
    others = lambda x: x.reshape(-1)[index]  # noqa: E731
    return map_entries(tensordict, frames, others, index.shape, leave_out)


def gather_frames(x: Tensor, index: Tensor, batch_size: torch.Size) -> Tensor:
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


def expand(x: Tensor, width: int) -> Tensor:
    """Return ``[N, width, ...]``, the same at every step, of ``[N, ...]``, without a copy."""
    return x.unsqueeze(1).expand(-1, width, *x.shape[1:])


def map_entries(
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
            else:  # non-tensor data
                entries[name] = on_other(value)
        further = inner.batch_size[ndim:]
        names: Any = [None, "time", *[None] * len(further)]
        return TensorDict(entries, batch_size + further, device=inner.device, names=names)

    return mapped(tensordict, ())


def next_key(key: NestedKey) -> NestedKey:
    """Return the key of the state after a step, for that of the state before it."""
    return as_key(("next", *key_parts(key)))


def select_frames(
    sequences: TensorDictBase,
    mask: Tensor,
    *,
    states: Sequence[NestedKey],
    leave_out: Sequence[NestedKey],
) -> TensorDictBase:
    """Return the frames under a True of the mask ``[F]``, each with the state before it.

    The state before a step is the one that the step before wrote. Where that was not stored it is
    the state of the sequence.
    """
    restored = sequences.copy()
    for key in states:
        after = get_if_any(sequences, next_key(key))
        if after is not None:
            restored.set(key, torch.cat([sequences.get(key)[:, :1], after[:, :-1]], 1))
    restored = restored.exclude(*leave_out)
    for root in {key_parts(key)[0] for key in leave_out}:
        entry = restored.get(root, None)
        if isinstance(entry, TensorDictBase) and not list(entry.keys()):
            restored = restored.exclude(root)
    return restored[mask]


def scatter_frames(
    frames: TensorDictBase, index: Tensor, shape: Sequence[int], mask_key: NestedKey
) -> TensorDictBase:
    """Return the batch ``[*B, T]`` that has these frames ``[F]`` at these positions.

    Missing frames are zeros, under a mask.
    """
    whole: Any = frames.new_zeros(torch.Size([math.prod(shape)]))
    whole[index] = frames
    whole = whole.reshape(shape)
    whole.names = [None] * (len(shape) - 1) + ["time"]
    if len(index) < whole.numel():
        valid = torch.zeros(whole.numel(), dtype=torch.bool, device=index.device)
        whole.set(mask_key, valid.index_fill(0, index, True).reshape(shape))
    return whole
