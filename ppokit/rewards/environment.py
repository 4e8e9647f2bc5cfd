"""A reward normalizer inside an environment: where it stands, and the returns step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase, Transform

from ppokit._keys import as_key, key_parts
from ppokit.rewards.measurement import Moments, as_numbers, countable, masked_moments


def in_environment(transform: Transform) -> bool:
    """Return whether the transform belongs to an environment."""
    return isinstance(_outermost(transform), EnvBase)


def in_buffer(transform: Transform) -> bool:
    """Return whether the transform belongs to a replay buffer.

    A buffer puts what it gets into a Compose of its own, and that in eval mode.
    """
    holder = _outermost(transform)
    return isinstance(holder, Transform) and holder is not transform and not holder.training


def is_alone(transform: Transform) -> bool:
    """Return whether nothing holds the transform; so it is in ``append_transform(invert=True)``."""
    return _outermost(transform) is transform


def _outermost(transform: Transform) -> Any:
    # Transform.container raises where the outermost holder is no environment.
    holder: Any = transform
    while isinstance(holder, Transform):
        reference = holder.__dict__.get("_container")
        parent = None if reference is None else reference()
        if parent is None:
            break
        holder = parent
    return holder


def step_returns(
    reward: Tensor,
    done: Tensor,
    carried: Tensor,
    stepped: Tensor | None,
    *,
    gamma: float,
    key: NestedKey,
    nonfinite: str,
) -> tuple[Moments, Tensor]:
    """Return the moments of one step's R, and R carried after the step.

    ``reward`` and ``done`` are ``[*B, ..., 1]``, ``carried`` is R before the step or empty for 0,
    and ``stepped`` tells which rows ``[*B]`` have taken a step.
    """
    counted = countable(reward, stepped, key, nonfinite)
    clean = torch.where(counted, reward, 0).double()
    if carried.shape != clean.shape:
        if carried.any():
            raise ValueError(
                f"{key!r} has shape {list(clean.shape)}, but the environment's rows of the step "
                f"before had {list(carried.shape)}: which of them go on is not known. Reset the "
                "environment in between, or normalise the collected batch instead."
            )
        carried = torch.zeros_like(clean)
    carried = carried.to(clean.device)
    returns = clean + gamma * carried
    after = torch.where(done, 0, returns)
    if stepped is not None:
        after = torch.where(_over(stepped, after.ndim), after, carried)
    return as_numbers(masked_moments(returns, counted)), after


def after_reset(carried: Tensor, tensordict: TensorDictBase, ends: Sequence[NestedKey]) -> Tensor:
    """Return R after a reset: 0 where a ``"_reset"`` flag beside an end is True, or everywhere."""
    keys = [as_key((*key_parts(end)[:-1], "_reset")) for end in ends]
    resets = [reset for key in keys if (reset := tensordict.get(key, None)) is not None]
    if not resets:
        return torch.zeros_like(carried)
    for reset in resets if carried.numel() else ():
        carried = torch.where(_over(reset, carried.ndim).to(carried.device), 0, carried)
    return carried


def _over(flag: Tensor, ndim: int) -> Tensor:
    """Return the flag with dimensions of 1 after its own, up to ``ndim``."""
    return flag.reshape(flag.shape + (1,) * (ndim - flag.ndim))


def refuse_batches(normalizer: Any) -> None:
    """Raise where an option of the normalizer needs whole batches."""
    if normalizer.statistics == "batch":
        raise ValueError(
            "statistics='batch' needs a whole batch, and an environment gives one step at a "
            "time. Use statistics='running', or call the normalizer on the collected batch."
        )
    if normalizer.group is not None and not normalizer.frozen:
        raise ValueError(
            "group= needs whole batches: ranks step their environments at different times, and "
            "would wait for each other. Call the normalizer on the collected batch, or freeze "
            "it; without group= each rank's environments have statistics of their own."
        )
