"""The way back: from sequences to the batch that they were cut from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import as_key, get_if_any, key_parts


def following(key: NestedKey) -> NestedKey:
    """Return the key of the state after a step, of that before it."""
    return as_key(("next", *key_parts(key)))


def counted_frames(
    sequences: TensorDictBase,
    mask: Tensor,
    *,
    states: Sequence[NestedKey],
    leave_out: Sequence[NestedKey],
) -> TensorDictBase:
    """Return the frames under a True of the mask ``[F]``, each with the state before it.

    The state before a step is what the step before wrote. Where that was not stored it is the
    sequence's.
    """
    restored = sequences.copy()
    for key in states:
        after = get_if_any(sequences, following(key))
        if after is not None:
            restored.set(key, torch.cat([sequences.get(key)[:, :1], after[:, :-1]], 1))
    restored = restored.exclude(*leave_out)
    for root in {key_parts(key)[0] for key in leave_out}:
        entry = restored.get(root, None)
        if isinstance(entry, TensorDictBase) and not list(entry.keys()):
            restored = restored.exclude(root)
    return restored[mask]


def put_back(
    frames: TensorDictBase, index: Tensor, shape: Sequence[int], mask_key: NestedKey
) -> TensorDictBase:
    """Return the batch ``[*B, T]`` that has these frames ``[F]`` at these positions.

    Frames that are not there are zeros, under a mask.
    """
    whole: Any = frames.new_zeros(torch.Size([math.prod(shape)]))
    whole[index] = frames
    whole = whole.reshape(shape)
    whole.names = [None] * (len(shape) - 1) + ["time"]
    if len(index) < whole.numel():
        valid = torch.zeros(whole.numel(), dtype=torch.bool, device=index.device)
        whole.set(mask_key, valid.index_fill(0, index, True).reshape(shape))
    return whole
