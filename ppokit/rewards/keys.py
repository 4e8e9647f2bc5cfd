"""Which entries of a batch belong to a reward, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import as_key, check_shapes, get_tensor, key_parts
from ppokit.functional._checks import check_bool, check_float

FIX = "Environments and collectors write it; other names are given at construction."
_ENDS = (
    "A reward ends with flags of its own shape, or with one that holds for all agents of the "
    "frame, [*B, T, 1]: name it with done_key=, as ('next', 'done')."
)


@dataclass(frozen=True)
class RewardKeys:
    """The entries of one reward.

    ``ends`` are the flags that end its trajectories, the nearest first: an end of all agents, above
    the reward, is an end of each of them. ``needs_first`` tells that the first must be there, and
    not just any.
    """

    reward: NestedKey
    raw: NestedKey
    ends: tuple[NestedKey, ...]
    needs_first: bool

    @classmethod
    def of(cls, reward: NestedKey, raw: NestedKey | None, done: NestedKey | None) -> RewardKeys:
        """Return the keys of a reward; what is None lies where torchrl's environments have it."""
        *node, name = key_parts(reward)
        raw = (*node, f"raw_{name}") if raw is None else raw
        if as_key(raw) == as_key(reward):
            raise ValueError(
                f"reward_key and raw_key are both {raw!r}: the scaled reward would be written over "
                "the raw one. Give two names."
            )
        *node, name = (*node, "done") if done is None else key_parts(done)
        depths = range(len(node), int(node[:1] == ["next"]) - 1, -1)
        ends = tuple(as_key((*node[:depth], name)) for depth in depths)
        return cls(as_key(reward), as_key(raw), ends, done is not None)

    @property
    def end(self) -> NestedKey:
        """The flag that is there in any case."""
        return self.ends[0 if self.needs_first else -1]

    def in_environment(self) -> RewardKeys:
        """Return the keys without the ``"next"`` that a batch has."""
        reward, raw, *ends = (_without_next(key) for key in (self.reward, self.raw, *self.ends))
        return RewardKeys(reward, raw, tuple(ends), self.needs_first)

    def read(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the reward, and where its trajectories end, of the same shape.

        A flag ``[*B, T, 1]`` holds for all agents of its frame.
        """
        reward = get_tensor(tensordict, self.reward, fix=FIX)
        check_float(self.reward, reward)
        ended: Tensor | None = None
        for key in self.ends:
            flag = tensordict.get(key, None)
            if flag is None and (key is not self.ends[0] or not self.needs_first):
                continue
            flag = get_tensor(tensordict, key, fix=FIX) if flag is None else flag
            check_bool(key, flag)
            if flag.shape != reward.shape:
                flag = _fitted(flag, reward, tensordict.ndim)
                of_agents = max(flag.ndim, reward.ndim) > tensordict.ndim + 1
                check_shapes({self.reward: reward, key: flag}, fix=_ENDS if of_agents else None)
            ended = flag if ended is None else ended | flag
        ended = get_tensor(tensordict, self.end, fix=FIX) if ended is None else ended
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


def _fitted(flag: Tensor, reward: Tensor, batch_ndim: int) -> Tensor:
    """Return the flag for every reward that it holds for; as it is where that is not clear."""
    if not batch_ndim < flag.ndim <= reward.ndim:
        return flag
    if flag.shape[-1] != 1 or flag.shape[:-1] != reward.shape[: flag.ndim - 1]:
        return flag
    return flag.view(flag.shape + (1,) * (reward.ndim - flag.ndim)).expand(reward.shape)
