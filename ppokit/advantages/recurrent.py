"""Value networks with a state: what they need of a batch, and what follows a step on its own."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import unravel_key

from ppokit._recurrent import check_stored, is_init, state_keys, stored_keys


def check_states(network: TensorDictModule, tensordict: TensorDictBase, dim: int) -> None:
    """Raise unless the batch holds the states before and after each step, with time last.

    Without them a network starts from zero at every batch, silently.
    """
    following = [unravel_key(("next", key)) for key in state_keys(network)]
    check_stored(tensordict, [*stored_keys(network), *following])
    if dim != tensordict.ndim - 1:
        raise ValueError(
            f"Recurrent value networks run over the last dimension of a batch, and time is "
            f"dimension {dim} of {list(tensordict.batch_size)}: transpose the batch."
        )


def as_sequences(rows: TensorDictBase, network: TensorDictModule) -> TensorDictBase:
    """Return single steps, with the state before each, as sequences of one step ``[N, 1]``."""
    rows = rows.unsqueeze(-1)
    for key in network.in_keys:
        if is_init(key):  # the state is the one to go on from
            rows.set(key, rows.get(key).new_zeros(rows.get(key).shape))
    return rows
