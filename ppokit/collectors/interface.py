"""Weights and state of a collector, as torchrl's trainers and weight synchronisation have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from ppokit._keys import as_key
from ppokit._state import check_names, load_all


def write_weights(policy: Any, source: Any) -> None:
    """Write weights into a policy, all of them or none.

    Args:
        policy: the collector's.
        source: a module, what ``TensorDict.from_module`` returns of it, or a ``state_dict``.
    """
    if not isinstance(policy, nn.Module):
        kind = type(policy).__name__
        raise TypeError(f"The policy is a {kind}, no module: it has no weights to write.")
    own: Any = TensorDict.from_module(policy)
    if isinstance(source, nn.Module):
        source = TensorDict.from_module(source)
    elif isinstance(source, Mapping):
        source = TensorDict(dict(source)).unflatten_keys(".")
    elif not isinstance(source, TensorDictBase):
        raise TypeError(
            f"Weights are a module, a TensorDict or a state_dict, not of type "
            f"{type(source).__name__}."
        )
    shapes, expected = (
        {key: tuple(value.shape) for key, value in x.items(True, True)} for x in (source, own)
    )
    states = {as_key(tuple(name.split("."))) for name in policy.state_dict()}
    optional = expected.keys() - states - shapes.keys()  # buffers that are no state
    wrong = [key for key in {**expected, **shapes} if shapes.get(key) != expected.get(key)]
    wrong = [key for key in wrong if key not in optional]
    if wrong:
        said = [f"{key!r}: {shapes.get(key)} for {expected.get(key)}" for key in wrong[:5]]
        raise ValueError(
            f"The weights are not those of the collector's policy (shape given for shape there): "
            f"{'; '.join(said)}. Pass the policy, TensorDict.from_module(policy) or its state_dict."
        )
    own.data.update_(source.data)


def load_modules(
    modules: Mapping[str, Any], given: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Load the states of modules, completely or not at all; return the state of the collector.

    Args:
        modules: what the collector holds; some may be no modules.
        given: the state to load.
        own: the state as it is.
    """
    # A collector of several processes keeps the ids of its workers to itself.
    others = {"policy_version": 0, "collector_progress": {}, "traj_pool": {"traj_id": 0}}
    state = {**others, **given}
    check_names(state, own, "a GymCollector")
    lost = [k for k, v in modules.items() if state[k] and not isinstance(v, nn.Module)]
    if lost:
        raise KeyError(f"The state has {lost}, and this collector has no module to load it into.")
    load_all({k: v for k, v in modules.items() if isinstance(v, nn.Module)}, state)
    return state


def state_of(module: Any) -> dict[str, Any]:
    """Return the state of a module, empty for any other object."""
    return module.state_dict() if isinstance(module, nn.Module) else {}
