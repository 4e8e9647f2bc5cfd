"""Which frames of a minibatch are valid, and what is done about the others."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppokit._keys import as_key, get_if_any
from ppokit.functional._checks import check_bool

BURN_IN_KEY = ("sequence", "burn_in")  # see SequenceBatcher


def mask_of(loss: Any, tensordict: TensorDictBase, like: Tensor) -> Tensor | None:
    """Return the mask of valid frames in the shape of a tensor, or None where there is none.

    Raises:
        TypeError: a mask is not bool.
        ValueError: the minibatch holds frames of burn-in.
    """
    if get_if_any(tensordict, BURN_IN_KEY) is not None:
        raise ValueError(
            f"The minibatch holds {BURN_IN_KEY!r}: frames of burn-in, which the loss would "
            "take for padding. Give it batcher.refresh(minibatch, actor, critic), whose states "
            "have gone through them; PPOUpdate does so."
        )
    present = []
    for key in map(as_key, loss._loss_mask_keys()):
        if (mask := get_if_any(tensordict, key)) is not None:
            check_bool(key, mask)
            present.append(loss._expand_loss_mask(mask, like))
    return torch.stack(present).all(0) if len(present) > 1 else next(iter(present), None)


def fill_padding(tensordict: TensorDictBase, mask: Tensor, keys: list[Any], loss: Any) -> None:
    """Replace what lies under a False of the mask by a copy of the first valid frame, in place.

    The gradient of padding is 0, but 0 * NaN is NaN, and a matrix product spreads it to every
    parameter. A copy of a valid frame is as good as that frame, whatever the type of the entry.
    Without a valid frame, what is not finite becomes a number. Episode starts stay as they are:
    within the padding of a sequence they would slow a recurrent network down.
    """
    valid_frame, any_valid = mask.flatten().int().argmax().reshape(1), mask.any()

    def fill(x: Tensor) -> Tensor:
        frame = x.flatten(0, mask.ndim - 1).index_select(0, valid_frame)
        if x.dtype is not torch.bool:
            harmless = frame.nan_to_num() if x.is_floating_point() else torch.zeros_like(frame)
            frame = torch.where(any_valid, frame, harmless)
        keep = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return torch.where(keep, x, frame.reshape((1,) * mask.ndim + frame.shape[1:]))

    kept = ("is_init", *loss._loss_mask_keys())
    for key in keys:
        if key not in kept:
            entry = tensordict.get(key)
            entry = fill(entry) if isinstance(entry, Tensor) else entry.contiguous().apply(fill)
            tensordict.set(key, entry)
