"""Checks of PPOUpdate: its arguments, what the loss reads and returns, and a whole batch."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from tensordict.utils import NestedKey
from torch import nn

from ppokit._keys import (
    as_key,
    check_tensordict,
    check_time_is_last,
    get_tensor,
    is_recurrent,
    key_list,
    key_parts,
    mask_key_of,
    state_keys,
    valid_mask,
)
from ppokit._state import unchanged
from ppokit.distributed import alone
from ppokit.rewards import RewardNormalizer
from ppokit.schedules import ParameterScheduler
from ppokit.sequences import SequenceBatcher
from ppokit.trust_region import AdaptiveKLCoeff, AdaptiveLearningRate
from ppokit.trust_region.early_stop import refuse_accumulated_gradients
from ppokit.update.data_parallel import Outline
from ppokit.update.step_checks import check_buffers, check_losses, check_settings, loss_names

if TYPE_CHECKING:
    from ppokit.update.ppo_update import PPOUpdate

PARTS = {
    "advantage": (nn.Module,),
    "reward_normalizer": (RewardNormalizer,),
    "batcher": (SequenceBatcher,),
    "adaptive_kl": (AdaptiveKLCoeff, AdaptiveLearningRate),
    "scheduler": (ParameterScheduler,),
}


def check_arguments(update: PPOUpdate) -> None:
    """Raise where an option is of the wrong kind, out of range, or excludes another."""
    for name, kinds in PARTS.items():
        block = getattr(update, name)
        if not isinstance(block, kinds) and block is not None:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{name} must be a {expected}, got {type(block).__name__}.")
    check_mask_keys(update)
    refuse_accumulated_gradients(update.accumulate_grads and update.step.stopper is not None)
    for name in ("actor_network", "critic_network"):
        network = getattr(update.step.loss, name, None)
        if update.batcher is None and is_recurrent(network) and state_keys(network):
            raise ValueError(
                f"The loss's {name} is recurrent, and without a batcher the update shuffles "
                "frames. Pass batcher=SequenceBatcher(seq_len)."
            )
    for name, of_step in (("loss", update.step.loss), ("optimizer", update.step.optimizer)):
        if getattr(update.adaptive_kl, name, of_step) is not of_step:
            raise ValueError(f"adaptive_kl belongs to another {name} than the step.")
    for name in ("adaptive_kl", "reward_normalizer"):
        block = getattr(update, name)
        if getattr(block, "group", update.step.group) is not update.step.group:
            raise ValueError(f"The {name} has another group than the step: pass group= to both.")
    if update.recompute_advantage and update.advantage is None:
        raise ValueError("recompute_advantage needs an advantage module.")
    if update.adaptive_kl is not None and update.scheduler is not None:
        target, name = update.adaptive_kl.target
        if update.scheduler.drives(target, name):
            kind = type(target).__name__
            raise ValueError(
                f"The adaptive_kl and the scheduler both drive {name!r} of the {kind}. Keep one."
            )
    _check_names_of_observations(update)


def warn_of_gammas(update: PPOUpdate) -> None:
    """Warn where the reward normalizer scales by the returns of another discount."""
    blocks: Any = update.advantage, update.reward_normalizer
    gammas = [float(x.gamma) for x in blocks if hasattr(x, "gamma")]
    if len(gammas) == 2 and not math.isclose(*gammas, rel_tol=1e-6):  # torchrl rounds to float32
        warnings.warn(
            f"gamma is {gammas[0]:g} in the advantage module and {gammas[1]:g} in the reward "
            "normalizer. Give both the same gamma.",
            stacklevel=3,
        )


def _check_names_of_observations(update: PPOUpdate) -> None:
    """Raise a ValueError where a block would overwrite an entry that policy or critic read."""
    keys_of = lambda module, keys: {*map(as_key, getattr(module, keys, ()))}  # noqa: E731
    actor, critic = (
        getattr(update.step.loss, x, None) for x in ("actor_network", "critic_network")
    )
    read = keys_of(actor, "in_keys") | keys_of(update.value_network, "in_keys")
    read |= keys_of(critic, "in_keys") - keys_of(actor, "out_keys")  # a value head reads these
    names = getattr(update.step.loss, "tensor_keys", None)
    read |= {*map(as_key, key_list(getattr(names, "action", None)))}
    for name in ("reward_normalizer", "batcher", "advantage", "scheduler"):
        block = getattr(update, name)
        written, own = ([*map(as_key, getattr(block, x, ()))] for x in ("out_keys", "in_keys"))
        new = [key for key in written if key[0] == "next" and key not in own]
        written += [as_key(key[1:]) for key in new]  # the next observation of that name
        if getattr(block, "value_network", None) is not None:  # not among torchrl's out_keys
            written += key_list(getattr(getattr(block, "tensor_keys", None), "value", None))
        parents = [as_key(key[:n]) for key in map(key_parts, written) for n in range(1, len(key))]
        passed_on = getattr(block, "mask_key", None)
        if taken := [key for key in [*written, *parents] if key in read and key != passed_on]:
            raise ValueError(
                f"The networks or the loss read {taken[0]!r}, and the {name} of the update would "
                "write its own entry over it. Rename the observation or action (torchrl's "
                f"RenameTransform, or a gymnasium wrapper), or the entry of the {name} "
                "(set_keys(), or an argument)."
            )


def check_mask_keys(update: PPOUpdate) -> None:
    """Raise a ValueError where a block reads another mask of valid frames than the loss."""
    own = mask_key_of(update.step.loss)
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
                f"would train on padding. Set loss.loss_mask_key = {key!r}."
            )


def count_frames(batch: TensorDictBase, mask_key: NestedKey | None) -> int:
    """Return the number of valid frames of a batch."""
    mask = valid_mask(batch, mask_key)
    return batch.batch_size.numel() if mask is None else int(mask.sum())


_NAMES = ("advantage", "value_target", "value", "action", "sample_log_prob")


def keys_of_loss(loss: Any, batch: TensorDictBase) -> list[NestedKey]:
    """Return the entries of the batch that the loss reads.

    torchrl's losses name more than they need: also what an advantage could be computed from.
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
    own, actor = getattr(loss, "tensor_keys", None), getattr(loss, "actor_network", None)
    actions = key_list(getattr(own, "action", None))
    modules = actor.modules() if isinstance(actor, nn.Module) else ()
    heads = [x for x in modules if isinstance(x, ProbabilisticTensorDictModule)]
    drawn = [key_parts(key) for head in heads[-1:] for key in head.dist_sample_keys]
    read = [key_parts(key) for key in actions]
    if actions and not all(any(key[: len(x)] == x for x in read) for key in drawn):
        raise KeyError(
            f"{type(loss).__name__} reads the action {actions}, but its actor draws {drawn}. Call "
            "loss.set_keys(action=[...]) with these keys before the update."
        )
    fix = (
        "The actor writes it at collection (return_log_prob=True, with the same "
        "set_composite_lp_aggregate); see loss.set_keys(action=..., sample_log_prob=...)."
    )
    for key in [*actions, *key_list(getattr(own, "sample_log_prob", None))] if actions else ():
        get_tensor(batch, key, fix=fix)


STEPS = 8  # of each row, for validate: enough for any block, little beside an update


def validate(update: PPOUpdate, batch: TensorDictBase) -> str:
    """Run every block once on the first steps of a batch; see :meth:`PPOUpdate.validate`."""
    check_tensordict(batch, who="PPOUpdate")
    check_settings(update.step, waits=True)  # a state that is rejected could not be restored
    device = update.step.device
    if batch.device is not None and batch.device != device:
        raise RuntimeError(
            f"The batch is on {batch.device}, but the parameters are on {device}. Move the batch "
            "(batch.to(device)), or let the collector store it there (storing_device=...)."
        )
    key = update.step.mask_key
    steps: Any = batch[..., :STEPS]
    needs_ends = not getattr(update.advantage, "use_critic", True)  # whole episodes
    batch = (batch if needs_ends or not count_frames(steps, key) else steps).clone()
    parts = update.step.loss, update.advantage, update.value_network, update.batcher
    with unchanged(*parts, device=device), alone():
        size = outline_of(update, batch).size
        if update.reward_normalizer is not None:
            batch = update.reward_normalizer.clone().freeze()(batch)
        losses = losses_of_first(update, update.elements(batch), size)
    for name in loss_names(update.step.loss, losses):
        if not losses[name].isfinite():
            raise ValueError(f"{name!r} is {losses[name].item()} on the first steps of this batch.")
    return repr(update)


def outline_of(update: PPOUpdate, batch: TensorDictBase) -> Outline:
    """Return the number of frames, elements and elements of a minibatch; change nothing."""
    check_arguments(update)
    check_settings(update.step, waits=True)
    check_buffers(update.advantage)
    if update.batcher is not getattr(update.minibatches, "batcher", None):
        raise ValueError("The batcher of the update was replaced: build another PPOUpdate.")
    check_time_is_last(batch, who="PPOUpdate")
    key = update.step.mask_key
    if not (frames := count_frames(batch, key)):
        raise ValueError(
            f"The batch of shape {list(batch.shape)} has no valid frame: it is empty, or "
            f"{key!r} is False everywhere. The mask is True at frames to train on."
        )
    check_policy_keys(update.step.loss, batch)
    if update.step.ranks.count > 1 and getattr(update.step.loss, "reduction", "mean") == "sum":
        raise ValueError(
            "The loss is a sum over frames (reduction='sum'), but over ranks gradients are "
            "averaged. Build the loss with reduction='mean'."
        )
    elements, steps = update.minibatches.outline(batch)
    size = max(1, (update.minibatch_size or elements * steps) // steps)
    return Outline(frames, elements, min(size, elements))


def losses_of_first(update: PPOUpdate, elements: TensorDictBase, size: int) -> TensorDictBase:
    """Return the checked losses of the first elements; change nothing, and ask no other rank."""
    step, kl_key = update.step, getattr(update.adaptive_kl, "kl_key", None)
    with unchanged(step.loss, update.minibatches, device=step.device), alone():
        first: Any = elements[:size]
        minibatch, _ = next(update.minibatches.epoch(first, [len(first)]))
        losses = step.eager_losses(minibatch)
    check_losses(step.loss, losses, step.stopper, kl_key=kl_key)
    return losses
