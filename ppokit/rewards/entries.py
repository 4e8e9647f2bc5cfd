"""The entries of a reward, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor

from ppokit._checks import check_bool, check_float
from ppokit._keys import as_key, check_shapes, get_tensor, key_parts, missing_entry

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
        keys = (self.reward, self.raw, self.end, *self.ends)
        reward, raw, end, *ends = (as_key(k[1:]) if k[0] == "next" else k for k in keys)
        return RewardKeys(reward, raw, tuple(ends), end, self.needs_end)

    def read(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the reward, and where its trajectories end, of the same shape."""
        reward = get_tensor(tensordict, self.reward, fix=_FIX)
        check_float(self.reward, reward)
        ended: Any = None
        flags = {key: x for key in self.ends if (x := tensordict.get(key, None)) is not None}
        if self.end not in flags and (self.needs_end or not flags):
            raise missing_entry(tensordict, self.end, _FIX)
        for key, flag in flags.items():
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
