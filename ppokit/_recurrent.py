"""Recurrent modules within networks: their states, and whether graphs can hold them."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.utils import NestedKey
from torch import nn

from ppokit._batch import Policy, as_key, out_keys_of, state_keys


def breaks_graphs(*networks: nn.Module | None) -> bool:
    """Return whether networks hold a recurrent module of torchrl's that no graph can hold.

    torch captures no ``nn.LSTM`` or ``nn.GRU``, and torchrl's default backend splits episodes by
    the values of the data. The backends "scan" and "triton" can be captured.
    """
    modules = [m for net in networks if isinstance(net, nn.Module) for m in net.modules()]
    return any(getattr(part, "recurrent_backend", None) in ("pad", "auto") for part in modules)


def check_own_states(*networks: Policy | None) -> None:
    """Raise a ValueError if two modules keep their states under one name."""
    owners: dict[NestedKey, tuple[Sequence[NestedKey], list[int]]] = {}
    modules = [part for net in networks if isinstance(net, nn.Module) for part in net.modules()]
    for module in modules:
        inner = [part for part in module.modules() if part is not module]
        if any(hasattr(part, "out_keys") and state_keys(part) for part in inner):
            continue  # a part has the state, as in a sequence or a TensorActor
        outputs: list[NestedKey] = [*out_keys_of(module)]
        weights = [id(parameter) for parameter in module.parameters()]
        for key in map(as_key, state_keys(module)):
            others, of_owner = owners.setdefault(key, (outputs, weights))
            if of_owner != weights:
                raise ValueError(
                    f"Two recurrent modules keep their state at {key!r}, those that write "
                    f"{others[0]!r} and {outputs[0]!r}. Give one of them names of its own, "
                    "such as 'critic_state' and ('next', 'critic_state')."
                )
