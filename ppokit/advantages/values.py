"""The steps of GAE that bootstrap from their own next observation: the last and the truncated.

Terminated steps have no value after them.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from ppokit import _checks
from ppokit._keys import (
    is_init,
    is_recurrent,
    last_valid_steps,
    state_keys,
)


def of_agents(value: Tensor, *signals: Tensor, dim: int | None) -> tuple[Tensor, ...]:
    """Return signals of the team ``[*B, T, 1]`` for each agent of a value ``[*B, T, A, 1]``."""
    if value.ndim < 2 or all(x.ndim == value.ndim for x in signals):
        return signals
    dim = -2 if dim is None else dim
    of_one = value.select(dim, 0).shape
    return tuple(x.unsqueeze(dim).expand_as(value) if x.shape == of_one else x for x in signals)


def check_finite(own: Tensor, steps: tuple[Tensor, ...], ends: Tensor | None) -> None:
    """Raise, on the CPU, where a value that a step bootstraps from is not finite.

    ``ends`` are the frames that terminate, of all frames.
    """
    if not _checks.reads_are_free(own.device) or own.isfinite().all():
        return
    ends, bad = None if ends is None else ends[steps], ~own.isfinite()
    if ends is not None and ends.shape == bad.shape:
        bad &= ~ends  # an agent that is terminated does not bootstrap
    bad = bad.flatten(1).any(1)
    if bad.any():
        raise ValueError(
            f"The value of the next observation is NaN or infinite after {int(bad.sum())} steps "
            "that bootstrap from it (the last of a row, or truncated), the first at "
            f"{[int(index[bad][0]) for index in steps]}. Return the true final observation from "
            "the environment; with torchrl's NextStateReconstructor, collect with "
            "compact_obs=False."
        )


def unobserved_steps(done: Tensor, terminated: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Return True where the observation after t is not that at t+1, and its value counts."""
    if mask is not None:
        return mask & ~terminated & (done | last_valid_steps(mask, dim))
    ends = done.clone()
    ends.select(dim, -1).fill_(True)
    return ends & ~terminated


def bootstrap_inputs(
    tensordict: TensorDictBase, steps: tuple[Tensor, ...] | None, network: TensorDictModule
) -> TensorDictBase:
    """Return the value network's inputs after the steps of an index, flat, or (None) after all."""
    batch_size = tensordict.batch_size if steps is None else steps[0].shape
    following, inputs = tensordict.get("next"), TensorDict({}, batch_size)
    states = state_keys(network) if is_recurrent(network) else []
    observed = False
    for key in network.in_keys:
        before, after = tensordict.get(key, None), following.get(key, None)
        # Inputs that no step changes (a task id, say) need not be repeated under "next".
        found = before if after is None else after
        if found is None:
            continue
        observed |= after is not None and key not in states
        found = found if steps is None else found[steps]
        inputs.set(key, found)
    if not observed and not inputs.is_empty():
        raise KeyError(
            f"None of the value network's inputs {network.in_keys} is under 'next', and "
            f"{inputs.numel()} steps bootstrap from their own next observation. Collect with "
            "compact_obs=False."
        )
    if is_recurrent(network):  # sequences of one step, which go on from the state before it
        inputs = inputs.unsqueeze(-1)
        for key in filter(is_init, network.in_keys):
            inputs.set(key, torch.zeros_like(inputs.get(key)))
    return inputs
