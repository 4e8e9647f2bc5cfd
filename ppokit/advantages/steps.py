"""Steps that are not like the others: the last, the truncated, the terminated, the padding."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit._keys import last_valid_steps


def steps_on_their_own(done: Tensor, terminated: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Return True where the observation after t is not that at t+1, and its value counts.

    That is the last step, and every truncation; a terminated step has no value after it.
    """
    valid = torch.ones_like(done) if mask is None else mask
    return valid & ~terminated & (done | last_valid_steps(valid, dim))


def bootstrap_inputs(
    tensordict: TensorDictBase, rows: Tensor, in_keys: list[NestedKey]
) -> TensorDictBase:
    """Return the value network's inputs after the steps in ``rows``, as a flat batch.

    Raises:
        KeyError: the batch holds no next observation at all.
    """
    root = tensordict.select(*in_keys, strict=False)[rows]
    following = tensordict.get("next").select(*in_keys, strict=False)[rows]
    if following.is_empty() and not root.is_empty():
        raise KeyError(
            f"None of the value network's inputs {in_keys} is under 'next', and "
            f"{int(rows.sum())} steps bootstrap from their own next observation. Collect with "
            "compact_obs=False."
        )
    joined = root.clone(False).update({"next": following})
    # torchrl writes NaN for an observation that it has not kept, and takes the one before for it.
    following = TorchRLGAE._sanitize_next_obs_nan(joined, in_keys).get("next")
    # Inputs that no step changes (a task id, say) need not be repeated under "next".
    return TorchRLGAE._fill_missing_next_inputs(following, root, in_keys)


def without_padding(
    mask: Tensor, dim: int, reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn padding into zeros that end their own trajectory, so that nothing leaks out of it."""
    padding = TorchRLGAE._expand_to_match(~mask, reward)
    last = TorchRLGAE._expand_to_match(last_valid_steps(mask, dim), done)
    reward, value, next_value = (x.masked_fill(padding, 0) for x in (reward, value, next_value))
    return reward, value, next_value, done | padding | last
