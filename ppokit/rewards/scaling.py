"""The moments of the returns, the scale, and scaled rewards beside the raw ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded

from ppokit.rewards.keys import RewardKeys
from ppokit.rewards.measurement import Moments, merged


def check_options(statistics: str, clip: float | None, epsilon: float, nonfinite: str) -> None:
    """Raise a ValueError if an option of the normalizer is out of range."""
    if statistics not in ("running", "batch"):
        raise ValueError(f"statistics must be 'running' or 'batch', got {statistics!r}.")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive or None, got {clip}.")
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be 0 or more, got {epsilon}.")
    if nonfinite not in ("raise", "ignore"):
        raise ValueError(f"nonfinite must be 'raise' or 'ignore', got {nonfinite!r}.")


def move_statistics(normalizer: Any, added: Moments) -> None:
    """Add the moments of a batch, unless the statistics are frozen."""
    if normalizer.frozen:
        return
    moments: Tensor = normalizer.moments
    running = normalizer.statistics == "running"
    if running:
        before = moments.tolist()
        added = merged((before[0], before[1], before[2]), added)
    count, mean, m2 = added
    scale = 1.0
    # Returns without spread give no scale: 1e-12 of the mean is rounding.
    if count and math.sqrt(m2 / count) > 1e-12 * abs(mean):
        if running:
            scale = math.sqrt(m2 / count + normalizer.epsilon)
        else:
            scale = math.sqrt(m2 / (count - 1)) + normalizer.epsilon
    values = torch.tensor((count, mean, m2, scale), dtype=torch.float64, device=moments.device)
    # nn.Module's own assignment takes longer than a small batch's scan.
    normalizer._buffers["moments"] = values


def scaled(normalizer: Any, reward: Tensor) -> Tensor:
    """Return the reward over its scale, clipped."""
    y = (reward / normalizer.scale.to(reward.device)).to(reward.dtype)
    return y if normalizer.clip is None else y.clamp_(-normalizer.clip, normalizer.clip)


def check_buffers(state: Mapping[str, Any]) -> None:
    """Raise a ValueError where a saved buffer has a shape that no normalizer has."""
    for name, saved in state.items():
        fits, expected = {
            "moments": (saved.shape == (4,), "[4]"),
            "frozen": (saved.ndim == 0 and saved.dtype is torch.bool, "[], of bool"),
            "open_ids": (saved.ndim == 1, "[N]"),
            "open_returns": (
                (saved.ndim == 2 or saved.shape == (0,))
                and len(saved) == len(state.get("open_ids", saved)),
                "[N, F], as many as open_ids",
            ),
        }.get(name, (True, ""))
        if not fits:
            raise ValueError(
                f"{name!r} has shape {list(saved.shape)} and dtype {saved.dtype} in the state; a "
                f"RewardNormalizer has {expected}."
            )
        if name == "moments" and not saved[0] >= 0:
            raise ValueError(f"'moments' has the count {saved[0].item()} in the state.")


def refuse_normalized(
    normalizer: Any, tensordict: TensorDictBase, keys: RewardKeys, before: Any = None
) -> None:
    """Raise where there is a raw reward that was not there ``before`` the step."""
    if not is_normalized(normalizer, tensordict, keys):
        return
    if before is None or before.get(keys.raw, None) is not tensordict.get(keys.raw):
        raise _normalized_already(keys.raw)


def is_normalized(normalizer: Any, tensordict: TensorDictBase, keys: RewardKeys) -> bool:
    """Return whether the reward of a batch is normalised already."""
    if tensordict.get(keys.raw, None) is None:
        return False
    # A collector hands its postproc the same TensorDict for every batch, and writes the new
    # rewards into the same tensor: the raw reward is then that of the batch before.
    if normalizer._written is None:
        return True
    reward, before = normalizer._written
    return tensordict.get(keys.reward, None) is not reward or _version_of(reward) == before


def check_sampled(normalizer: Any, tensordict: TensorDictBase) -> TensorDictBase:
    """Return a batch from a buffer, or raise a ValueError if it lacks a raw reward."""
    keys = normalizer._keys
    there = tensordict.get(keys.reward, None) is not None
    if there and tensordict.get(keys.raw, None) is None:
        raise ValueError(
            f"The replay buffer holds {keys.reward!r} without {keys.raw!r}: it was written "
            "before the normalizer was appended, or the raw reward was dropped since. "
            "Rewards are normalised when they are written: append it first, and keep both."
        )
    return tensordict


def write(
    normalizer: Any, tensordict: TensorDictBase, keys: RewardKeys, reward: Tensor
) -> tuple[Tensor, int]:
    """Write raw and scaled reward; return the scaled one with its version."""
    result = scaled(normalizer, reward)
    tensordict.set(keys.raw, reward)
    tensordict.set(keys.reward, result)
    return result, _version_of(result)


def scaled_reward_spec(normalizer: Any, reward_spec: TensorSpec) -> TensorSpec:
    """Add the raw reward; the scaled one is bounded by ``clip``."""
    assert isinstance(reward_spec, Composite)
    clip, keys = normalizer.clip, normalizer._env_keys
    raw = reward_spec.get(keys.reward, None)
    if raw is None:
        present = sorted(map(str, reward_spec.keys(True, True)))
        raise KeyError(
            f"{keys.reward!r} is no reward of this environment, which has "
            f"{', '.join(present)}. Pass it as reward_key, with a leading 'next'."
        )
    if keys.raw in reward_spec.keys(True, True):
        raise _normalized_already(keys.raw)
    like: dict[str, Any] = {"shape": raw.shape, "dtype": raw.dtype, "device": raw.device}
    reward_spec[keys.raw] = raw.clone()
    reward_spec[keys.reward] = Unbounded(**like) if clip is None else Bounded(-clip, clip, **like)
    return reward_spec


def _normalized_already(raw: NestedKey) -> ValueError:
    return ValueError(
        f"The batch holds {raw!r}: its reward is normalised already, by another RewardNormalizer "
        "or by an earlier call of this one. Keep one of them, in the environment or on the batch."
    )


def _version_of(tensor: Tensor) -> int:
    """Return how often the tensor was written in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
