"""The entries of a reward: how they are read and written, and whether they are scaled already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor

from ppokit._host import on_host, write_count
from ppokit._keys import as_key, check_shapes, get_if_any, get_tensor, key_parts, missing_entry
from ppokit.functional._checks import check_bool, check_float

_FIX = "Environments and collectors write it; other names are given at construction."
_ENDS = (
    "A done flag has the shape of its reward, [*B, T, 1], or of several agents [*B, T, agents, 1]; "
    "a flag [*B, T, 1] holds for all agents of a frame. Name it with done_key=."
)


@dataclass(frozen=True)
class RewardKeys:
    """The entries of one reward.

    ``ends`` are the flags that end its trajectories, the nearest first: a flag of all agents, above
    the reward, ends the trajectory of each of them. ``end`` is the one that must be there; if
    ``needs_end`` is False, any of them will do.
    """

    reward: NestedKey
    raw: NestedKey
    ends: tuple[NestedKey, ...]
    end: NestedKey
    needs_end: bool

    @classmethod
    def of(cls, reward: NestedKey, raw: NestedKey | None, done: NestedKey | None) -> RewardKeys:
        """Return the keys of a reward; None stands for the name in torchrl's environments."""
        if isinstance(reward, list):
            raise TypeError(f"reward_key is {reward}: use a RewardNormalizer for each reward.")
        *node, name = key_parts(reward)
        raw = (*node, f"raw_{name}") if raw is None else raw
        *node, name = (*node, "done") if done is None else key_parts(done)
        depths = range(len(node), int(node[:1] == ["next"]) - 1, -1)
        ends = tuple(as_key((*node[:depth], name)) for depth in depths)
        end = ends[-1] if done is None else ends[0]
        return cls(as_key(reward), as_key(raw), ends, end, done is not None)

    def in_environment(self) -> RewardKeys:
        """Return the keys without the ``"next"`` that a batch has."""
        reward, raw, end, *ends = map(_without_next, (self.reward, self.raw, self.end, *self.ends))
        return RewardKeys(reward, raw, tuple(ends), end, self.needs_end)

    def signals(self, tensordict: TensorDictBase, *others: NestedKey | None) -> list[Tensor | None]:
        """Return the entries that there are, and others."""
        keys = (self.reward, *self.ends, *others)
        return [get_if_any(tensordict, key) for key in keys if key is not None]

    def read(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the reward, and where its trajectories end, of the same shape, on the host."""
        reward = get_tensor(tensordict, self.reward, fix=_FIX)
        check_float(self.reward, reward)
        ended: Any = None
        present = [key for key in self.ends if tensordict.get(key, None) is not None]
        if self.end not in present and (self.needs_end or not present):
            raise missing_entry(tensordict, self.end, _FIX)
        flags = [get_tensor(tensordict, key, fix=_FIX) for key in present]
        for key, flag in zip(present, on_host(*flags), strict=True):
            check_bool(key, flag)
            if flag.ndim > tensordict.ndim and flag.shape == (*reward.shape[: flag.ndim - 1], 1):
                flag = expand_as_right(flag.squeeze(-1), reward)
            check_shapes({self.reward: reward, key: flag}, fix=_ENDS)
            ended = flag if ended is None else ended | flag
        if reward.shape == tensordict.batch_size or reward.shape[-1] != 1:
            raise ValueError(
                f"{self.reward!r} has shape {list(reward.shape)} in a batch of shape "
                f"{list(tensordict.batch_size)}; the convention is [*B, T, 1] or [*B, T, agents, "
                "1]. Add the trailing dimension with .unsqueeze(-1); store each of several "
                "objectives under its own key, with a RewardNormalizer for each."
            )
        return reward, ended


def _without_next(key: NestedKey) -> NestedKey:
    return as_key(key[1:]) if key[0] == "next" and not isinstance(key, str) else key


def write(
    normalizer: Any, tensordict: TensorDictBase, keys: RewardKeys, reward: Tensor
) -> tuple[Tensor, int]:
    """Write raw and scaled reward; return the scaled one with its version."""
    scaled = (reward / normalizer.scale).to(reward.dtype)  # a number of the host divides anywhere
    if normalizer.clip is not None:
        scaled.clamp_(-normalizer.clip, normalizer.clip)
    tensordict.set(keys.raw, reward)
    tensordict.set(keys.reward, scaled)
    return scaled, write_count(scaled)


def is_normalized(normalizer: Any, tensordict: TensorDictBase, keys: RewardKeys) -> bool:
    """Return whether the reward of a batch is normalized already."""
    if tensordict.get(keys.raw, None) is None:
        return False
    # A collector hands its postproc the same TensorDict for every batch, and writes the new
    # rewards into the same tensor: the raw reward is then that of the batch before.
    if normalizer._written is None:
        return True
    reward, before = normalizer._written
    return tensordict.get(keys.reward, None) is not reward or write_count(reward) == before


def refuse_normalized(
    normalizer: Any, tensordict: TensorDictBase, keys: RewardKeys, before: Any = None
) -> None:
    """Raise where there is a raw reward that was not there ``before`` the step."""
    if not is_normalized(normalizer, tensordict, keys):
        return
    if before is None or before.get(keys.raw, None) is not tensordict.get(keys.raw):
        raise normalized_already(keys.raw)


def normalized_already(raw: NestedKey) -> ValueError:
    """Return the error for a reward that is normalized already."""
    return ValueError(
        f"The batch holds {raw!r}: its reward is normalized already, by another RewardNormalizer "
        "or by an earlier call of this one. Keep one of them, in the environment or on the batch. "
        "If another block wrote the entry, pass raw_key=."
    )


def check_sampled(tensordict: TensorDictBase, keys: RewardKeys) -> None:
    """Raise a ValueError if a batch from a buffer lacks the raw reward."""
    is_there = tensordict.get(keys.reward, None) is not None
    if is_there and tensordict.get(keys.raw, None) is None:
        raise ValueError(
            f"The replay buffer holds {keys.reward!r} without {keys.raw!r}: it was written "
            "before the normalizer was appended, or the raw reward was dropped since. "
            "Rewards are normalized when they are written: append it first, and keep both."
        )
