"""What PPOUpdate refuses at construction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from ppokit._recurrent import is_recurrent, state_keys
from ppokit.rewards import RewardNormalizer
from ppokit.schedules import ParameterScheduler
from ppokit.sequences import SequenceBatcher
from ppokit.trust_region import AdaptiveKLCoeff, KLEarlyStopper
from ppokit.trust_region.early_stop import refuse_accumulated_gradients

if TYPE_CHECKING:
    from ppokit.update.ppo_update import PPOUpdate

_KINDS = {
    "loss": nn.Module,
    "optimizer": torch.optim.Optimizer,
    "advantage": nn.Module,
    "reward_normalizer": RewardNormalizer,
    "batcher": SequenceBatcher,
    "stopper": KLEarlyStopper,
    "adaptive_kl": AdaptiveKLCoeff,
    "scheduler": ParameterScheduler,
}


def check_arguments(
    update: PPOUpdate, max_grad_norm: float | None, amp_dtype: torch.dtype | None
) -> None:
    """Raise where an option is of the wrong kind, out of range, or excludes another."""
    for name, kind in _KINDS.items():
        block = getattr(update, name)
        if not isinstance(block, kind) and (block is not None or name in ("loss", "optimizer")):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(block).__name__}.")
    if not hasattr(update._bare_loss, "in_keys"):
        raise TypeError(
            f"{type(update._bare_loss).__name__} has no in_keys, so nobody knows what it reads. "
            "Make the loss a TensorDictModuleBase with in_keys and out_keys."
        )
    for name, value in (("epochs", update.epochs), ("minibatch_size", update.minibatch_size)):
        if value is None and name == "minibatch_size":
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if max_grad_norm is not None and not 0 < max_grad_norm <= math.inf:
        raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm}.")
    if amp_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(
            f"amp_dtype must be None, torch.bfloat16 or torch.float16, got {amp_dtype}."
        )
    if not any(group["params"] for group in update.optimizer.param_groups):
        raise ValueError("The optimizer has no parameters to train.")
    trained = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
    if not trained & {id(p) for p in update.loss.parameters()}:
        raise ValueError(
            "None of the optimizer's parameters is one of the loss's: nothing that the loss sees "
            "would be trained. Build the optimizer with loss.parameters()."
        )
    refuse_accumulated_gradients(update.accumulate_grads and update.stopper is not None)
    _refuse_shuffled_memory(update)
    loss = getattr(update.adaptive_kl, "loss", None)
    if loss is not None and loss is not update._bare_loss:
        raise ValueError("adaptive_kl moves the coefficient of another loss than this one.")
    for name in ("loss", "stopper", "adaptive_kl", "reward_normalizer"):
        block = update._bare_loss if name == "loss" else getattr(update, name)
        if getattr(block, "group", update.group) is not update.group:
            raise ValueError(f"The {name} has another group than the update: pass group= to both.")
    if update.recompute_advantage and update.advantage is None:
        raise ValueError("recompute_advantage needs an advantage module.")


def _refuse_shuffled_memory(update: PPOUpdate) -> None:
    for name in ("actor_network", "critic_network"):
        network = getattr(update._bare_loss, name, None)
        if update.batcher is None and is_recurrent(network) and state_keys(network):
            raise ValueError(
                f"The loss's {name} is recurrent, and without a batcher the update shuffles "
                "frames: it would run over a minibatch as if that were one sequence. Pass "
                "batcher=SequenceBatcher(seq_len)."
            )
