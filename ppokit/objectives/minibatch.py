"""The minibatch of a loss: its advantage, its mask of valid frames, and checks of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor

from ppokit._checks import check_bool, check_float
from ppokit._keys import get_if_any, missing_entry

BURN_IN_KEY = ("sequence", "burn_in")  # see SequenceBatcher
_OF_POLICY = "The policy writes it at collection (return_log_prob=True); see loss.set_keys()."


def check_entries(minibatch: TensorDictBase, keys: Iterable[NestedKey], log_prob: Any) -> None:
    """Raise for an action or a log-probability that is missing or has a gradient."""
    for key in keys:
        entry = minibatch.get(key, None)
        if entry is None:
            raise missing_entry(minibatch, key, _OF_POLICY)
        if key == log_prob and isinstance(entry, Tensor):
            check_float(repr(key), entry)
        if entry.requires_grad:
            raise ValueError(f"{key!r} of the batch requires a gradient; detach() it.")


def check_advantage(advantage: Tensor, key: NestedKey, size: torch.Size) -> None:
    """Raise for an advantage of the wrong shape or dtype; ``size`` is the size of the batch."""
    if advantage.shape == size:
        raise ValueError(
            f"The advantage {key!r} has shape {list(advantage.shape)}, the shape of the batch, "
            "without the trailing dimension. Use advantage.unsqueeze(-1)."
        )
    check_float(repr(key), advantage)
    if not advantage.numel():
        raise ValueError(f"{key!r} has shape {list(advantage.shape)}: it has no number of a frame.")


def valid_mask(minibatch: TensorDictBase, keys: Iterable[NestedKey], like: Tensor) -> Tensor | None:
    """Return the mask of valid frames in the shape of a tensor, or None if there is none."""
    if get_if_any(minibatch, BURN_IN_KEY) is not None:
        raise ValueError(
            f"The minibatch holds {BURN_IN_KEY!r}: frames of burn-in, which the loss would "
            "take for padding. Give it batcher.refresh(minibatch, actor, critic)."
        )
    found: Tensor | None = None
    for key in keys:
        if (mask := get_if_any(minibatch, key)) is not None:
            check_bool(key, mask)
            while mask.ndim > like.ndim and mask.shape[-1] == 1:
                mask = mask.squeeze(-1)
            mask = expand_as_right(mask, like)
            found = mask if found is None else found & mask
    return found


def fill_padding(minibatch: TensorDictBase, mask: Tensor, keys: list[NestedKey]) -> None:
    """Replace the entries of masked frames by a copy of the first valid frame, in place.

    The gradient of padding is 0, but 0 * NaN is NaN, and a matrix product spreads it to every
    parameter. Without a valid frame, numbers that are not finite become finite.
    """
    valid_frame, any_valid = mask.flatten().int().argmax().reshape(1), mask.any()

    def fill(x: Tensor) -> Tensor:
        frame = x.flatten(0, mask.ndim - 1).index_select(0, valid_frame)
        if x.dtype is not torch.bool:
            harmless = frame.nan_to_num() if x.is_floating_point() else torch.zeros_like(frame)
            frame = torch.where(any_valid, frame, harmless)
        keep = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return torch.where(keep, x, frame.reshape((1,) * mask.ndim + frame.shape[1:]))

    for key in keys:
        entry: Any = minibatch.get(key)
        filled = fill(entry) if isinstance(entry, Tensor) else entry.contiguous().apply(fill)
        minibatch.set(key, filled)
