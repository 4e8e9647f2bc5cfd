"""Trying a batch out on every block, with no lasting effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

if TYPE_CHECKING:
    from ppokit.update.ppo_update import PPOUpdate

STEPS = 8  # of each row: enough for any block, little beside an update


def validate(update: PPOUpdate, batch: TensorDictBase) -> None:
    """Run every block once on the first steps of a batch.

    Raises:
        KeyError: the batch lacks an entry; the block says which, and who would write it.
        ValueError: a shape does not fit, or a loss is not finite, or no loss has a gradient.
        TypeError: a dtype does not fit, or the loss returns no ``"loss_*"``.
        RuntimeError: the batch is on another device than the networks.
    """
    device = update._optimization.device
    if batch.device is not None and batch.device != device:
        raise RuntimeError(
            f"The batch is on {batch.device}, but the parameters are on {device}. Move the batch "
            "(batch.to(device)), or let the collector store it there (storing_device=...)."
        )
    steps: Any = batch[..., :STEPS].clone()
    random = torch.random.get_rng_state()
    try:
        if update.reward_normalizer is not None:
            # Frozen: other ranks hear nothing of it.
            steps = update.reward_normalizer.clone().freeze()(steps)
        elements: Any = update.elements(steps)
        minibatch = update._minibatches.first(elements, update._size(elements))
        losses = update._optimization.forward(minibatch)
    finally:
        torch.random.set_rng_state(random)
    names = [str(name) for name in losses.keys() if str(name).startswith("loss_")]
    if not names:
        raise TypeError(
            f"{type(update.loss).__name__} returns no entry that begins with 'loss_', but "
            f"{', '.join(map(str, losses.keys()))}: there is nothing to minimise."
        )
    for name in names:
        value = losses[name]
        if value.numel() != 1:
            raise ValueError(
                f"{name!r} has shape {list(value.shape)}; a loss is one number. Build the loss "
                'with reduction="mean".'
            )
        if not value.isfinite():
            raise ValueError(f"{name!r} is {value.item()} on the first steps of this batch.")
    if not any(losses[name].requires_grad for name in names):
        raise ValueError(
            f"None of {', '.join(names)} has a gradient: nothing would be trained. Compute them "
            "outside of torch.no_grad(), without detach() or .data."
        )
    if update.stopper is not None and update.stopper.kl_key not in losses.keys():
        raise KeyError(
            f"The loss writes no {update.stopper.kl_key!r} for the KL stop to read, but "
            f"{', '.join(map(str, losses.keys()))}. Use DualClipPPOLoss, or KLEarlyStopper(kl_key="
            "...)."
        )
