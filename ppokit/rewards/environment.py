"""A reward normalizer inside an environment or a buffer: its place, its spec, and its resets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, TensorSpec, Unbounded
from torchrl.envs import EnvBase, Transform

from ppokit._host import on_host
from ppokit._keys import as_key, key_parts
from ppokit.rewards.entries import normalized_already
from ppokit.rewards.measurement import over


def in_environment(transform: Transform) -> bool:
    """Return whether the transform belongs to an environment."""
    return isinstance(_outermost(transform), EnvBase)


def in_buffer(transform: Transform) -> bool:
    """Return whether the transform belongs to a replay buffer.

    A buffer puts its transforms into a Compose, and that in eval mode.
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


def after_reset(carried: Tensor, tensordict: TensorDictBase, ends: Sequence[NestedKey]) -> Tensor:
    """Return R after a reset: 0 where a ``"_reset"`` flag beside an end is True, or everywhere."""
    keys = [as_key((*key_parts(end)[:-1], "_reset")) for end in ends]
    resets = [reset for key in keys if (reset := tensordict.get(key, None)) is not None]
    if not resets:
        return torch.zeros_like(carried)
    for reset in on_host(*resets) if carried.numel() else ():
        carried = torch.where(over(reset, carried.ndim), 0, carried)
    return carried


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


def scaled_reward_spec(normalizer: Any, reward_spec: Any) -> TensorSpec:
    """Add the raw reward; the scaled one is bounded by ``clip``."""
    clip, keys = normalizer.clip, normalizer._env_keys
    raw = reward_spec.get(keys.reward, None)
    if raw is None:
        present = sorted(map(str, reward_spec.keys(True, True)))
        raise KeyError(
            f"{keys.reward!r} is no reward of this environment, which has "
            f"{', '.join(present)}. Pass it as reward_key, with a leading 'next'."
        )
    if keys.raw in reward_spec.keys(True, True):
        raise normalized_already(keys.raw)
    like: dict[str, Any] = {"shape": raw.shape, "dtype": raw.dtype, "device": raw.device}
    reward_spec[keys.raw] = raw.clone()
    reward_spec[keys.reward] = Unbounded(**like) if clip is None else Bounded(-clip, clip, **like)
    return reward_spec
