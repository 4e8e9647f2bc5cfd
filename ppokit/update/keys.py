"""The entries of a batch that the blocks of an update read and write."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from tensordict.utils import NestedKey
from torch import nn

from ppokit._batch import (
    as_key,
    get_tensor,
    in_keys_of,
    key_list,
    key_named,
    key_parts,
    network_of,
    out_keys_of,
    valid_mask,
)

_NAMES = ("advantage", "value_target", "value", "action", "sample_log_prob")


def count_frames(batch: TensorDictBase, mask_key: NestedKey | None) -> int:
    """Return the number of valid frames of a batch."""
    mask = valid_mask(batch, mask_key)
    return batch.batch_size.numel() if mask is None else int(mask.sum())


def keys_of_loss(loss: nn.Module, batch: TensorDictBase) -> list[NestedKey]:
    """Return the entries of the batch that the loss reads.

    torchrl's losses name more than they need: also what an advantage could be computed from.
    """
    in_keys = [*map(as_key, in_keys_of(loss))]
    advantage = key_named(loss, "advantage")
    needed = in_keys if advantage is None else [advantage]
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
    names = [key for name in _NAMES for key in key_list(key_named(loss, name, name))]
    keys = dict.fromkeys([*in_keys, *names])
    return [key for key in keys if batch.get(key, None) is not None]


def check_policy_keys(loss: nn.Module, batch: TensorDictBase) -> None:
    """Raise a KeyError unless the loss reads every head of the action, and the batch has them."""
    actor, actions = network_of(loss, "actor_network"), key_list(key_named(loss, "action"))
    modules = () if actor is None else actor.modules()
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
    for key in [*actions, *key_list(key_named(loss, "sample_log_prob"))] if actions else ():
        get_tensor(batch, key, fix=fix)


def _mask_key(block: object, default: NestedKey | None) -> NestedKey | None:
    return getattr(block, "mask_key", default)


def check_names_of_observations(loss: nn.Module, blocks: Mapping[str, object]) -> None:
    """Raise a ValueError where a block would overwrite an entry that policy or critic read."""
    actor, critic = (network_of(loss, x) for x in ("actor_network", "critic_network"))
    value_network = network_of(blocks["advantage"], "value_network")
    # a value head reads what the actor writes
    of_critic = {*map(as_key, in_keys_of(critic))} - {*map(as_key, out_keys_of(actor))}
    read = {*map(as_key, (*in_keys_of(actor), *in_keys_of(value_network)))} | of_critic
    read |= {*map(as_key, key_list(key_named(loss, "action")))}
    for name in ("reward_normalizer", "batcher", "advantage", "scheduler"):
        block = blocks[name]
        written, own = ([*map(as_key, x)] for x in (out_keys_of(block), in_keys_of(block)))
        new = [key for key in written if key[0] == "next" and key not in own]
        written += [as_key(key[1:]) for key in new]  # the next observation of that name
        if network_of(block, "value_network") is not None:  # not among torchrl's out_keys
            written += key_list(key_named(block, "value"))
        parents = [as_key(key[:n]) for key in map(key_parts, written) for n in range(1, len(key))]
        passed_on = _mask_key(block, None)
        if taken := [key for key in [*written, *parents] if key in read and key != passed_on]:
            raise ValueError(
                f"The networks or the loss read {taken[0]!r}, and the {name} of the update would "
                "write its own entry over it. Rename the observation or action (torchrl's "
                f"RenameTransform, or a gymnasium wrapper), or the entry of the {name} "
                "(set_keys(), or an argument)."
            )


def check_mask_keys(own: NestedKey | None, blocks: Mapping[str, object]) -> None:
    """Raise a ValueError where a block reads another mask of valid frames than the loss."""
    if own == "shifted_valid":
        return  # written by GAE, which reads another mask
    for name in ("advantage", "reward_normalizer", "batcher", "scheduler"):
        block = blocks[name]
        parts = block.modules() if isinstance(block, nn.Module) else ()
        keys = [_mask_key(part, own) for part in parts]
        valid = key_named(block, "valid")  # torchrl 0.15's GAE
        key = next((key for key in [*keys, own if valid is None else valid] if key != own), own)
        if key != own and (own is not None or name == "batcher"):
            raise ValueError(
                f"The mask of valid frames is {key!r} for {name}, but {own!r} for the loss, which "
                f"would train on padding. Set loss.loss_mask_key = {key!r}."
            )
