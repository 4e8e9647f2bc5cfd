"""Steps that are not like the others: the last, the truncated, the terminated, the padding."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit._keys import last_valid_steps
from ppokit.advantages.recurrent import as_sequences, is_recurrent, state_keys


def steps_on_their_own(done: Tensor, terminated: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Return True where the observation after t is not that at t+1, and its value counts.

    That is the last step, and every truncation; a terminated step has no value after it.
    """
    valid = torch.ones_like(done) if mask is None else mask
    return valid & ~terminated & (done | last_valid_steps(valid, dim))


def bootstrap_inputs(
    tensordict: TensorDictBase, rows: Tensor | None, network: TensorDictModule
) -> TensorDictBase:
    """Return what the value network reads after the steps in ``rows`` (a flat batch), or after all.

    Raises:
        KeyError: the batch holds no next observation at all.
    """
    root = tensordict.select(*network.in_keys, strict=False)
    following = tensordict.get("next").select(*network.in_keys, strict=False)
    if rows is not None:
        root, following = root[rows], following[rows]
    states = state_keys(network) if is_recurrent(network) else []
    if following.exclude(*states).is_empty() and not root.is_empty():
        raise KeyError(
            f"None of the value network's inputs {network.in_keys} is under 'next', and "
            f"{root.numel()} steps bootstrap from their own next observation. Collect with "
            "compact_obs=False."
        )
    for key in network.in_keys:
        before, after = root.get(key, None), following.get(key, None)
        if before is None:
            continue
        if after is None:
            # Inputs that no step changes (a task id, say) need not be repeated under "next".
            following.set(key, before)
        elif after.is_floating_point() and after.shape == before.shape:
            # torchrl writes NaN for an observation that it has not kept: the one before stands in.
            following.set(key, torch.where(after.isnan(), before, after))
    return as_sequences(following, network) if is_recurrent(network) else following


def without_padding(
    mask: Tensor, dim: int, reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn padding into zeros that end their own trajectory, so that nothing leaks out of it."""
    padding = TorchRLGAE._expand_to_match(~mask, reward)
    last = TorchRLGAE._expand_to_match(last_valid_steps(mask, dim), done)
    reward, value, next_value = (x.masked_fill(padding, 0) for x in (reward, value, next_value))
    return reward, value, next_value, done | padding | last
