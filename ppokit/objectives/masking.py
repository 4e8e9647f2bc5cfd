"""Which frames of a minibatch are valid, and what is done about the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import get_if_any
from ppokit.distributed import sum_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BURN_IN_KEY = ("sequence", "burn_in")  # see SequenceBatcher


def mask_of(loss: Any, tensordict: TensorDictBase, like: Tensor) -> Tensor | None:
    """Return the mask of valid frames in the shape of a tensor, or None where there is none.

    Raises:
        ValueError: the minibatch holds frames of burn-in.
    """
    if get_if_any(tensordict, BURN_IN_KEY) is not None:
        raise ValueError(
            f"The minibatch holds {BURN_IN_KEY!r}: frames of burn-in, which the loss would "
            "take for padding. Give it batcher.refresh(minibatch, actor, critic), whose states "
            "have gone through them; PPOUpdate does so."
        )
    masks = [get_if_any(tensordict, key) for key in loss._loss_mask_keys()]
    present = [loss._expand_loss_mask(mask, like) for mask in masks if mask is not None]
    return torch.stack(present).all(0) if len(present) > 1 else next(iter(present), None)


def fill_padding(
    tensordict: TensorDictBase, mask: Tensor, keys: list[NestedKey], loss: Any
) -> None:
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

    masks = loss._loss_mask_keys()
    filled = [key for key in keys if key != "is_init" and key not in masks]
    tensordict.update(tensordict.select(*filled, strict=False).apply(fill))


def standardized(
    advantage: Tensor, mask: Tensor | None, dims: tuple[int, ...], group: ProcessGroup | None
) -> Tensor:
    """Return the advantage less its mean, over its unbiased standard deviation.

    Both are over the valid frames of all ranks, in two rounds: first the mean and then the
    deviations from it, so that a mean that is large beside the spread does not cancel it. One frame
    has no spread; it stays what it is, as torchrl leaves it.

    Args:
        advantage: ``[*B, 1]``.
        mask: of the same shape, or None.
        dims: the dimensions to reduce.
        group: the ranks; None for this one alone.
    """

    def over_ranks(x: Tensor) -> Tensor:
        return x if group is None else sum_over_ranks(x, group)

    frames = advantage.double()
    valid = torch.ones_like(frames) if mask is None else mask.double()
    frames = frames if mask is None else torch.where(mask, frames, 0)
    sums = [x.sum(dims, keepdim=True) for x in (frames, valid)]
    total, count = over_ranks(torch.stack(sums))
    mean = total / count
    squares = over_ranks((valid * (frames - mean).square()).sum(dims, keepdim=True))
    # torchrl's floor, so that padding a batch changes nothing
    std = (squares / (count - 1)).sqrt().clamp_min(torch.finfo(torch.float).resolution)
    alone = count <= 1
    mean, std = torch.where(alone, 0, mean), torch.where(alone, 1, std)
    return (advantage - mean.to(advantage.dtype)) / std.to(advantage.dtype)
