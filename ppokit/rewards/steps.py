"""The accumulators of an environment that is stepped: R of each row, or of each of its agents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import as_key, key_parts
from ppokit.rewards.returns import Moments, countable, masked_moments


def step_returns(
    reward: Tensor,
    done: Tensor,
    held: Tensor,
    stepped: Tensor | None,
    *,
    gamma: float,
    key: NestedKey,
    nonfinite: str,
) -> tuple[list[Moments], Tensor]:
    """Return the moments of one step's R, for each objective, and what is held after the step.

    Args:
        reward: ``[*B, ..., K]``.
        done: the same shape.
        held: R before the step; empty for 0.
        stepped: which rows have taken a step ``[*B]``; None for all.
        gamma: discount.
        key: where the reward is, for the message.
        nonfinite: see :class:`~ppokit.RewardNormalizer`.

    Raises:
        ValueError: a reward is not finite, or rows have come or gone without a reset.
    """
    counted = countable(reward, stepped, key, nonfinite)
    clean = torch.where(counted, reward, 0).double()
    if held.shape != clean.shape:
        if held.any():
            raise ValueError(
                f"{key!r} has shape {list(clean.shape)}, but the environment's rows of the step "
                f"before had {list(held.shape)}: which of them go on is not known. Reset the "
                "environment in between, or normalise the collected batch instead."
            )
        held = torch.zeros_like(clean)
    held = held.to(clean.device)
    returns = clean + gamma * held
    moments = [
        masked_moments(*pair) for pair in zip(returns.unbind(-1), counted.unbind(-1), strict=True)
    ]
    after = torch.where(done, 0, returns)
    if stepped is not None:
        after = torch.where(_over(stepped, after.ndim), after, held)
    return moments, after


def after_reset(held: Tensor, tensordict: TensorDictBase, ends: Sequence[NestedKey]) -> Tensor:
    """Return what is held after a reset of those that the ``"_reset"`` beside an end tells, or all.

    Args:
        held: R before, empty for 0.
        tensordict: what the reset was called with.
        ends: the keys of the flags that end trajectories.
    """
    keys = [as_key((*key_parts(end)[:-1], "_reset")) for end in ends]
    resets = [reset for key in keys if (reset := tensordict.get(key, None)) is not None]
    if not resets:
        return torch.zeros_like(held)
    for reset in resets if held.numel() else ():
        held = torch.where(_over(reset, held.ndim).to(held.device), 0, held)
    return held


def _over(flag: Tensor, ndim: int) -> Tensor:
    """Return the flag with dimensions of 1 after its own, up to ``ndim``."""
    return flag.reshape(flag.shape + (1,) * (ndim - flag.ndim))
