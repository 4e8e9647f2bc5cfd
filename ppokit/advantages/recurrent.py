"""Value networks with a state: what they need of a batch, and what follows a step on its own."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey, unravel_key

from ppokit._keys import get_tensor, key_parts

_FIX = (
    "It is the recurrent value network's state: let the network run while the batch is collected, "
    "with its primer in the environment (make_tensordict_primer())."
)


def is_recurrent(network: TensorDictModule) -> bool:
    """Return whether the network reads episode starts, so that it has a state to reset."""
    return any(_is_init(key) for key in getattr(network, "in_keys", ()))


def state_keys(network: TensorDictModule) -> list[NestedKey]:
    """Return the keys of the states that the network reads before a step and writes after it."""
    return [key for key in network.in_keys if ("next", *key_parts(key)) in network.out_keys]


def check_states(network: TensorDictModule, tensordict: TensorDictBase, dim: int) -> None:
    """Raise unless the batch holds the states before and after each step, with time last.

    Without them a network starts from zero at every batch, silently.
    """
    for key in state_keys(network):
        get_tensor(tensordict, key, fix=_FIX)
        get_tensor(tensordict, unravel_key(("next", key)), fix=_FIX)
    if dim != tensordict.ndim - 1:
        raise ValueError(
            f"Recurrent value networks run over the last dimension of a batch, and time is "
            f"dimension {dim} of {list(tensordict.batch_size)}: transpose the batch."
        )


def as_sequences(rows: TensorDictBase, network: TensorDictModule) -> TensorDictBase:
    """Return single steps, with the state before each, as sequences of one step ``[N, 1]``."""
    rows = rows.unsqueeze(-1)
    for key in network.in_keys:
        if _is_init(key):  # the state is the one to go on from
            rows.set(key, rows.get(key).new_zeros(rows.get(key).shape))
    return rows


def _is_init(key: NestedKey) -> bool:
    return key_parts(key)[-1] == "is_init"
