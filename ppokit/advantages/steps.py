"""Steps that are not like the others: the last, the truncated, the terminated, the padding."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit._keys import last_valid_steps
from ppokit._recurrent import is_recurrent, state_keys
from ppokit.advantages.recurrent import as_sequences


def steps_on_their_own(done: Tensor, terminated: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Return True where the observation after t is not that at t+1, and its value counts.

    That is the last step, and every truncation; a terminated step has no value after it.
    """
    if mask is not None:
        return mask & ~terminated & (done | last_valid_steps(mask, dim))
    ends = done.clone()
    ends.select(dim, -1).fill_(True)
    return ends & ~terminated


def bootstrap_inputs(
    tensordict: TensorDictBase, steps: tuple[Tensor, ...] | None, network: TensorDictModule
) -> TensorDictBase:
    """Return what the value network reads after some steps, as a flat batch, or after all of them.

    Args:
        tensordict: the batch ``[*B, T]``.
        steps: an index for each of its dimensions; None means all steps.
        network: the value network.

    Raises:
        KeyError: the batch holds no next observation at all.
    """
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
        if after is not None and before is not None and found.is_floating_point():
            # torchrl writes NaN for an observation that it has not kept: the one before stands in.
            before = before if steps is None else before[steps]
            found = torch.where(found.isnan(), before, found)
        inputs.set(key, found)
    if not observed and not inputs.is_empty():
        raise KeyError(
            f"None of the value network's inputs {network.in_keys} is under 'next', and "
            f"{inputs.numel()} steps bootstrap from their own next observation. Collect with "
            "compact_obs=False."
        )
    return as_sequences(inputs, network) if is_recurrent(network) else inputs


def without_padding(
    mask: Tensor, dim: int, reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn padding into zeros that end their own trajectory, so that nothing leaks out of it."""
    padding = TorchRLGAE._expand_to_match(~mask, reward)
    last = TorchRLGAE._expand_to_match(last_valid_steps(mask, dim), done)
    reward, value, next_value = (x.masked_fill(padding, 0) for x in (reward, value, next_value))
    return reward, value, next_value, done | padding | last
