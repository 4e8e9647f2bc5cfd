"""Recurrent networks: the states that they read of a batch, and checks that these are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from ppokit._keys import as_key, get_tensor, key_parts

FIX = (
    "A recurrent network reads it, so it must be stored at every step. Collect with GymCollector, "
    "or append InitTracker() and the module's make_tensordict_primer() to the environment; a "
    "recurrent critic must run in the policy, too: TensorDictSequential(critic, actor)."
)


def is_recurrent(network: Any) -> bool:
    """Return whether the network reads episode starts, so that it has a state to reset."""
    return any(is_init(key) for key in getattr(network, "in_keys", ()))


def state_keys(network: Any) -> list[NestedKey]:
    """Return the keys of the states that the network reads before a step and writes after it."""
    out_keys = getattr(network, "out_keys", ())
    return [k for k in getattr(network, "in_keys", ()) if ("next", *key_parts(k)) in out_keys]


def is_init(key: NestedKey) -> bool:
    """Return whether a key is that of episode starts."""
    return key_parts(key)[-1] == "is_init"


def stored_keys(*networks: Any) -> list[NestedKey]:
    """Return the keys of the states and episode starts that recurrent networks read."""
    keys: dict[NestedKey, None] = {}
    for network in networks:
        if states := state_keys(network):
            keys |= dict.fromkeys(map(as_key, [*states, *filter(is_init, network.in_keys)]))
    return list(keys)


def check_stored(tensordict: TensorDictBase, keys: Sequence[NestedKey]) -> None:
    """Raise unless these states and episode starts are there.

    Without a state torchrl's modules start from zero wherever a sequence begins, silently.
    """
    for key in keys:
        get_tensor(tensordict, key, fix=FIX)


def breaks_graphs(*networks: Any) -> bool:
    """Return whether networks hold a recurrent module of torchrl's that no graph can hold.

    torch captures no ``nn.LSTM`` or ``nn.GRU``, and torchrl's default backend splits episodes by
    the values of the data. The backends "scan" and "triton" can be captured.
    """
    modules = [m for net in networks if isinstance(net, nn.Module) for m in net.modules()]
    return any(getattr(part, "recurrent_backend", None) in ("pad", "auto") for part in modules)


def check_own_states(*networks: Any) -> None:
    """Raise a ValueError if two modules keep their states under one name."""
    owners: dict[NestedKey, tuple[Any, list[int]]] = {}
    modules = [part for net in networks if isinstance(net, nn.Module) for part in net.modules()]
    for module in modules:
        inner = [part for part in module.modules() if part is not module]
        if any(hasattr(part, "out_keys") and state_keys(part) for part in inner):
            continue  # the state is that of a part, as in a sequence or a TensorActor
        outputs: Any = getattr(module, "out_keys", ())
        weights = [id(parameter) for parameter in module.parameters()]
        for key in map(as_key, state_keys(module)):
            owner, of_owner = owners.setdefault(key, (module, weights))
            if of_owner != weights:
                raise ValueError(
                    f"Two recurrent modules keep their state at {key!r}, those that write "
                    f"{owner.out_keys[0]!r} and {outputs[0]!r}. Give one of them names of its own, "
                    "such as in_keys=['observation', 'critic_state', 'is_init'], "
                    "out_keys=['embed', ('next', 'critic_state')]."
                )


def recurrent_states(policy: Any) -> dict[NestedKey, tuple[torch.Size, torch.dtype]]:
    """Return shapes and dtypes of the recurrent states of a policy's modules.

    torchrl's primers are of torch's default dtype, whatever that of the module.
    """
    modules: Any = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    return {
        as_key(key): (spec.shape, next((p.dtype for p in module.parameters()), spec.dtype))
        for module in modules
        if hasattr(module, "make_tensordict_primer")
        for key, spec in module.make_tensordict_primer().primers.items(True, True)
    }
