"""The minibatch of a loss: its advantage, its mask of valid frames, and checks of both."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor

from ppokit._keys import (
    TRAJ_KEY,
    as_key,
    check_stored,
    check_trajectories,
    get_if_any,
    missing_entry,
    per_frame,
    stored_keys,
    time_dim,
)
from ppokit.functional._checks import check_bool, check_float

BURN_IN_KEY = ("sequence", "burn_in")  # see SequenceBatcher
_OF_POLICY = "The policy writes it at collection (return_log_prob=True); see loss.set_keys()."


def read_minibatch(
    loss: Any, minibatch: TensorDictBase
) -> tuple[TensorDictBase, Tensor, Tensor | None]:
    """Return a copy that networks may write to, with harmless padding; its advantage; its mask."""
    if 0 in minibatch.batch_size:
        raise ValueError(f"The minibatch is empty: {list(minibatch.batch_size)}.")
    check_stored(minibatch, stored_keys(loss.actor_network, loss.critic_network))
    if isinstance(minibatch, LazyStackedTensorDict):  # torchrl would transpose its entries
        minibatch = minibatch.contiguous()
    minibatch, keys = minibatch.clone(False), loss.tensor_keys
    for read in (keys.action, keys.sample_log_prob):
        for key in read if isinstance(read, list) else (read,):
            entry = minibatch.get(key, None)
            if entry is None:
                raise missing_entry(minibatch, key, _OF_POLICY)
            if key == keys.sample_log_prob and isinstance(entry, Tensor):
                check_float(repr(key), entry)
            if entry.requires_grad:
                raise ValueError(f"{key!r} of the batch requires a gradient; detach() it.")
    advantage = _advantage(loss, minibatch)
    mask = valid_mask(loss, minibatch, advantage)
    if mask is not None:
        minibatch.set(keys.advantage, advantage)
        # Episode starts in the padding of a sequence would slow a recurrent network down.
        kept = {"is_init", *map(as_key, loss._loss_mask_keys())}
        keys_to_fill = [key for key in loss.entries(minibatch) if key not in kept]
        _fill_padding(minibatch, per_frame(mask, minibatch.ndim), keys_to_fill)
        advantage = minibatch.get(keys.advantage)
    return minibatch, advantage, mask


def _advantage(loss: Any, minibatch: TensorDictBase) -> Tensor:
    key = loss.tensor_keys.advantage
    advantage: Any = minibatch.get(key, None, as_padded_tensor=True)  # pyright: ignore
    is_estimated_here = advantage is None
    if is_estimated_here:
        _estimate_advantage(loss, minibatch)
        advantage = minibatch.get(key)
    if advantage.shape == minibatch.batch_size:
        raise ValueError(
            f"The advantage {key!r} has shape {list(advantage.shape)}, the shape of the batch, "
            "without the trailing dimension. Use advantage.unsqueeze(-1)."
        )
    check_float(repr(key), advantage)
    if not advantage.numel():
        raise ValueError(f"{key!r} has shape {list(advantage.shape)}: it has no number of a frame.")
    if not loss.normalize_advantage and loss.advantage_norm is None:
        return advantage
    return loss._maybe_normalize_advantage(advantage, minibatch, update_norm=is_estimated_here)


def _estimate_advantage(loss: Any, minibatch: TensorDictBase) -> None:
    """Write the advantage of torchrl's value estimator into a batch in time order."""
    keys = loss.tensor_keys
    if loss.critic_network is None or minibatch.get(("next", keys.reward), None) is None:
        raise KeyError(
            f"{keys.advantage!r} is not in the batch, and without a critic and a reward it cannot "
            "be computed. Call GAE on the batch first, or loss.set_keys(advantage=...)."
        )
    advice = "Call GAE on the collected batch, before it is shuffled."
    who = f"{keys.advantage!r} is not in the batch. {advice} To estimate it, {type(loss).__name__}"
    dim, done = time_dim(minibatch, who=who), minibatch.get(("next", keys.done))
    check_trajectories(minibatch, done, dim, mask=None, key=TRAJ_KEY)
    parameters = loss.critic_network_params.detach() if loss.functional else None
    targets = loss.target_critic_network_params
    loss.value_estimator(minibatch, params=parameters, target_params=targets)


def valid_mask(loss: Any, minibatch: TensorDictBase, like: Tensor) -> Tensor | None:
    """Return the mask of valid frames in the shape of a tensor, or None if there is none."""
    if get_if_any(minibatch, BURN_IN_KEY) is not None:
        raise ValueError(
            f"The minibatch holds {BURN_IN_KEY!r}: frames of burn-in, which the loss would "
            "take for padding. Give it batcher.refresh(minibatch, actor, critic)."
        )
    found: Tensor | None = None
    for key in map(as_key, loss._loss_mask_keys()):
        if (mask := get_if_any(minibatch, key)) is not None:
            check_bool(key, mask)
            while mask.ndim > like.ndim and mask.shape[-1] == 1:
                mask = mask.squeeze(-1)
            mask = expand_as_right(mask, like)
            found = mask if found is None else found & mask
    return found


def _fill_padding(minibatch: TensorDictBase, mask: Tensor, keys: list[NestedKey]) -> None:
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
