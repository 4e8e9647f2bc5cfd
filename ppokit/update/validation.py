"""Checks of PPOUpdate: its arguments, what the loss reads and returns, and a whole batch."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._keys import (
    as_key,
    get_tensor,
    key_list,
    key_parts,
    mask_key_of,
    valid_mask,
)
from ppokit._recurrent import is_recurrent, state_keys
from ppokit._state import unchanged
from ppokit.distributed import alone
from ppokit.rewards import RewardNormalizer
from ppokit.schedules import ParameterScheduler
from ppokit.sequences import SequenceBatcher
from ppokit.trust_region import AdaptiveKLCoeff, KLEarlyStopper, refuse_accumulated_gradients

if TYPE_CHECKING:
    from ppokit.update.ppo_update import PPOUpdate

PARTS = {
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
    for name, kind in PARTS.items():
        block = getattr(update, name)
        if not isinstance(block, kind) and (block is not None or name in ("loss", "optimizer")):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(block).__name__}.")
    if not hasattr(update._bare_loss, "in_keys"):
        raise TypeError(
            f"{type(update._bare_loss).__name__} has no in_keys, so what it reads is not known. "
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
    if update.nonfinite not in ("raise", "skip", None):
        raise ValueError(f"nonfinite must be 'raise', 'skip' or None, got {update.nonfinite!r}.")
    _check_optimizer(update.optimizer, amp_dtype)
    _check_trained(update._bare_loss, update.optimizer)
    check_mask_keys(update)
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


def _check_optimizer(optimizer: torch.optim.Optimizer, amp_dtype: torch.dtype | None) -> None:
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if not any(group["params"] for group in groups):
        raise ValueError("The optimizer has no parameters to train.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"The step of {kind} needs a closure that evaluates the loss several times, and an "
            "update evaluates each minibatch once. Use Adam, or another optimizer whose step() "
            "takes no closure."
        )
    # torch's GradScaler hands its scale to all groups alike, and those that are not fused raise.
    scales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    if amp_dtype is torch.float16 and scales_itself and not all(g.get("fused") for g in groups):
        raise ValueError(
            f"amp_dtype=torch.float16 scales the loss, which a {kind} cannot take back where some "
            "parameter groups are fused and others are not. Make all groups alike."
        )


def _check_trained(loss: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise where the optimizer lacks a trainable parameter of the loss's actor or critic."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {name: id(p) for name, p in loss.named_parameters() if p.requires_grad}
    if not held & {*names.values()}:
        raise ValueError(
            "None of the optimizer's parameters is a trainable one of the loss: nothing would be "
            "trained. Build the optimizer with loss.parameters()."
        )
    coefficient = getattr(loss, "critic_coeff", 1.0)
    has_critic = coefficient is not None and bool(coefficient != 0)
    networks = ("actor_network", *(["critic_network"] if has_critic else []))
    missing = [name for name, key in names.items() if name.startswith(networks) and key not in held]
    if missing:
        raise ValueError(
            f"The losses reach {len(missing)} parameters that the optimizer does not hold and "
            f"that would never be trained: {', '.join(missing)}. Build the optimizer with "
            "loss.parameters(), or freeze them with requires_grad_(False)."
        )


def check_mask_keys(update: PPOUpdate) -> None:
    """Raise a ValueError where a block reads another mask of valid frames than the loss."""
    own = mask_key_of(update._bare_loss)
    if own == "shifted_valid":
        return  # written by GAE, which reads another mask
    for name in ("advantage", "reward_normalizer", "batcher", "scheduler"):
        block: Any = getattr(update, name)
        parts = block.modules() if isinstance(block, nn.Module) else ()
        keys = [getattr(part, "mask_key", own) for part in parts]
        valid = getattr(getattr(block, "tensor_keys", None), "valid", None)  # torchrl 0.15's GAE
        key = next((key for key in [*keys, own if valid is None else valid] if key != own), own)
        if key != own and (own is not None or name == "batcher"):
            raise ValueError(
                f"The mask of valid frames is {key!r} for {name}, but {own!r} for the loss, which "
                f"would train on padding. Set loss.loss_mask_key = {key!r}"
                + (f", or pass mask_key={own!r} to {name}." if own is not None else ".")
            )


def _refuse_shuffled_memory(update: PPOUpdate) -> None:
    for name in ("actor_network", "critic_network"):
        network = getattr(update._bare_loss, name, None)
        if update.batcher is None and is_recurrent(network) and state_keys(network):
            raise ValueError(
                f"The loss's {name} is recurrent, and without a batcher the update shuffles "
                "frames: it would run over a minibatch as if that were one sequence. Pass "
                "batcher=SequenceBatcher(seq_len)."
            )


def count_frames(batch: TensorDictBase, mask_key: NestedKey | None) -> int:
    """Return the number of valid frames of a batch."""
    mask = valid_mask(batch, mask_key)
    return batch.batch_size.numel() if mask is None else int(mask.sum())


def check_not_empty(batch: TensorDictBase, frames: int, mask_key: NestedKey | None) -> None:
    """Raise a ValueError where a batch has no valid frames."""
    if not batch.batch_size.numel():  # batch.numel() is 1 then
        raise ValueError(
            f"The batch is empty: it has shape {list(batch.shape)}. Collect at least one frame."
        )
    if not frames:
        raise ValueError(
            f"No frame is valid: {mask_key!r} is False everywhere in a batch of shape "
            f"{list(batch.shape)}, so there is nothing to train on. The mask is True at the frames "
            "that count."
        )


_NAMES = ("advantage", "value_target", "value", "action", "sample_log_prob")


def keys_of_loss(loss: Any, batch: TensorDictBase) -> list[NestedKey]:
    """Return the entries of the batch that the loss reads.

    torchrl's losses name more than they need: also what an advantage could be computed from.

    Raises:
        KeyError: the batch lacks one.
    """
    own = getattr(loss, "tensor_keys", None)
    advantage = getattr(own, "advantage", "advantage")
    needed = [advantage] if own is not None else [*loss.in_keys]
    missing = [key for key in needed if batch.get(key, None) is None]
    if missing:
        there = sorted(map(str, batch.keys(True, True)))
        fix = "Pass advantage=GAE(...) to PPOUpdate" if advantage in missing else "Store it"
        raise KeyError(
            f"{type(loss).__name__} reads {', '.join(map(repr, missing))}, which the batch lacks. "
            f"There is: {', '.join(there)}. {fix}, or correct the loss's in_keys (set_keys)."
        )
    entries = getattr(loss, "entries", None)
    if entries is not None:
        return entries(batch)
    names = [key for name in _NAMES for key in key_list(getattr(own, name, name))]
    keys = dict.fromkeys(map(as_key, [*loss.in_keys, *names]))
    return [key for key in keys if batch.get(key, None) is not None]


def check_policy_keys(loss: Any, batch: TensorDictBase) -> None:
    """Raise a KeyError unless the loss reads every head of the action, and the batch has them."""
    own = getattr(loss, "tensor_keys", None)
    name, actor = type(loss).__name__, getattr(loss, "actor_network", None)
    modules = actor.modules() if isinstance(actor, nn.Module) else ()
    heads = [x for x in modules if isinstance(x, ProbabilisticTensorDictModule)]
    actions = key_list(getattr(own, "action", None))
    read = [key_parts(key) for key in actions]
    drawn = [as_key(key) for head in heads[-1:] for key in head.dist_sample_keys]
    left = [key for key in drawn if not any(key_parts(key)[: len(x)] == x for x in read)]
    if actions and left:
        raise KeyError(
            f"{name} reads the action {actions}, but its actor draws {drawn}. Call "
            f"loss.set_keys(action={drawn}) before the update."
        )
    log_probs = key_list(getattr(own, "sample_log_prob", None))
    fix = (
        "The actor writes it at collection (return_log_prob=True, with the "
        "set_composite_lp_aggregate of now); other names are told by loss.set_keys(action=..., "
        "sample_log_prob=...), a list each of several heads."
    )
    for key in [*actions, *log_probs] if actions else ():
        get_tensor(batch, key, fix=fix)


def loss_names(loss: nn.Module, losses: TensorDictBase) -> list[str]:
    """Return the names of the losses to sum, of which there must be one."""
    names = [name for name in losses.keys() if str(name).startswith("loss_")]
    if not names:
        raise TypeError(
            f"{type(loss).__name__} returns no entry that begins with 'loss_', but "
            f"{', '.join(map(str, losses.keys()))}: there is nothing to minimise."
        )
    return names


def check_losses(update: PPOUpdate, losses: TensorDictBase) -> None:
    """Raise where the losses of a minibatch cannot be trained with, whatever their values."""
    names = loss_names(update._bare_loss, losses)
    for name in names:
        if losses[name].numel() != 1:
            raise ValueError(
                f"{name!r} has shape {list(losses[name].shape)}; a loss is one number. Build the "
                'loss with reduction="mean".'
            )
    if not any(losses[name].requires_grad for name in names):
        raise ValueError(
            f"None of {', '.join(names)} has a gradient: nothing would be trained. Compute them "
            "outside of torch.no_grad(), without detach() or .data."
        )
    readers: dict[str, Any] = {}
    if update.stopper is not None:
        readers["KLEarlyStopper"] = update.stopper.kl_key
    if update.adaptive_kl is not None:
        readers["AdaptiveKLCoeff"] = "kl"
    for reader, key in readers.items():
        if losses.get(key, None) is None:
            raise KeyError(
                f"The loss writes no {key!r} for the {reader} to read, but "
                f"{', '.join(map(str, losses.keys()))}. Use DualClipPPOLoss, or "
                "KLEarlyStopper(kl_key=...)."
            )


def nonfinite_error(
    minibatch: TensorDictBase, losses: TensorDictBase, mask_key: NestedKey | None
) -> FloatingPointError:
    """Return the error of a step that would have made parameters NaN."""
    names = [name for name in losses.keys() if str(name).startswith("loss_") or name == "kl"]
    numbers = {name: losses[name] for name in names if isinstance(losses[name], Tensor)}
    said = ", ".join(f"{name} is {x.double().mean():.4g}" for name, x in numbers.items())
    mask = valid_mask(minibatch, mask_key)
    valid: Any = minibatch if mask is None else minibatch[mask]
    items = valid.items(include_nested=True, leaves_only=True)
    entries = [repr(key) for key, value in items if not value.isfinite().all()]
    return FloatingPointError(
        "The gradients, losses or KL of a minibatch are not finite, here or on another rank "
        f"({said}); the parameters are those of the step before. Entries of the minibatch that "
        f"are not finite: {', '.join(entries) or 'none'}. It is kept at nonfinite_minibatch of the "
        "PPOUpdate. Lower the learning rate, set max_grad_norm, look for log-probabilities at the "
        "edge of a bounded distribution; or pass nonfinite='skip' to leave such steps out."
    )


def refuse_sums(loss: Any) -> None:
    """Raise where the gradients of several ranks would be averaged, but their losses are sums."""
    if getattr(loss, "reduction", "mean") == "sum":
        raise ValueError(
            "The loss is a sum over frames (reduction='sum'), but over ranks gradients are "
            "averaged: they would be those of one process divided by the number of ranks. Build "
            "the loss with reduction='mean'."
        )


STEPS = 8  # of each row, for validate: enough for any block, little beside an update


def validate(update: PPOUpdate, batch: TensorDictBase) -> str:
    """Run every block once on the first steps of a batch; see :meth:`PPOUpdate.validate`."""
    device = update._optimization.device
    if batch.device is not None and batch.device != device:
        raise RuntimeError(
            f"The batch is on {batch.device}, but the parameters are on {device}. Move the batch "
            "(batch.to(device)), or let the collector store it there (storing_device=...)."
        )
    key = update.mask_key
    check_not_empty(batch, count_frames(batch, key), key)
    steps: Any = batch[..., :STEPS]
    needs_ends = not getattr(update.advantage, "use_critic", True)  # whole episodes
    losses = first_losses(update, batch if needs_ends or not count_frames(steps, key) else steps)
    check_losses(update, losses)
    for name in loss_names(update._bare_loss, losses):
        if not losses[name].isfinite():
            raise ValueError(f"{name!r} is {losses[name].item()} on the first steps of this batch.")
    return repr(update)


def first_losses(update: PPOUpdate, batch: TensorDictBase) -> TensorDictBase:
    """Return the losses of a batch's first minibatch. Change nothing, and involve no other rank."""
    device, batch = update._optimization.device, batch.clone()
    parts = update._bare_loss, update.advantage, update.value_network, update.batcher
    with unchanged(*parts, device=device), alone():
        outline = update._outline(batch)
        if update.reward_normalizer is not None:
            batch = update.reward_normalizer.clone().freeze()(batch)
        return update._first_losses(update._elements(batch), outline.size)
