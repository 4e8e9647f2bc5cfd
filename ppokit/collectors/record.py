"""What the environments did during one batch, in time-major arrays that are filled in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ppokit.collectors.spaces import Leaf

ALIGNMENT = 64  # bytes
PACK = 64  # steps


class End(NamedTuple):
    """The last step of an episode, and what was observed after it."""

    time: int
    env: int
    terminated: bool
    truncated: bool
    final: list[np.ndarray]  # one array for each leaf


class Record:
    """Observations ``[T + 1, n, ...]``, rewards ``[T, n, ...]`` and the ends of episodes.

    Row t of the observations is what the policy sees at time t: after the end of an episode, the
    first observation of the next one.
    """

    def __init__(
        self, leaves: Sequence[Leaf], steps: int, num_envs: int, reward: Tensor, bare: bool
    ) -> None:
        self.leaves = leaves
        self.steps = steps
        self.num_envs = num_envs
        self.observed = [_rows(steps + 1, (num_envs, *leaf.shape), leaf.dtype) for leaf in leaves]
        self.reward = torch.empty((steps, num_envs, *reward.shape), dtype=reward.dtype)
        self.rewards = self.reward.numpy()
        self.arrays = [rows.numpy() for rows in self.observed]
        self.only = self.arrays[0] if bare else None  # where all observations go as they are
        self.ends: list[End] = []

    def write(self, row: int, env: int, observation: Any, info: Mapping[str, Any]) -> None:
        """Store an observation of one environment."""
        if self.only is not None:
            self.only[row, env] = observation
            return
        for leaf, array in zip(self.leaves, self.arrays, strict=True):
            array[row, env] = leaf.read(observation, info)

    def end(
        self,
        time: int,
        env: int,
        terminated: Any,
        truncated: Any,
        observation: Any,
        info: Mapping[str, Any],
    ) -> None:
        """Store the end of an episode."""
        final = [np.array(leaf.read(observation, info)) for leaf in self.leaves]
        self.ends.append(End(time, env, bool(terminated), bool(truncated), final))

    def raw_observations(self) -> TensorDict:
        """Return what was observed before each step ``[n, T]``, as the environments gave it."""
        raw: Any = {
            leaf.key: rows[:-1].transpose(0, 1)
            for leaf, rows in zip(self.leaves, self.observed, strict=True)
        }
        return TensorDict(raw, [self.num_envs, self.steps])

    def traj_ids(self, current: np.ndarray, unused: int) -> tuple[Tensor, int]:
        """Return the trajectory ids ``[n, T]`` and the next unused one; update the current."""
        ids = np.empty((self.num_envs, self.steps), dtype=np.int64)
        ids[:] = current[:, None]
        for end in self.ends:
            ids[end.env, end.time + 1 :] = current[end.env] = unused
            unused += 1
        return torch.from_numpy(ids), unused


class Column:
    """Tensors ``[n, ...]``, one a step.

    They are packed now and then: thousands of objects that stay for a batch make Python's garbage
    collector look through all there are, which takes a tenth of a second.
    """

    def __init__(self) -> None:
        self._loose: list[Tensor] = []
        self._packed: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        """Add a step."""
        self._loose.append(value)
        if len(self._loose) == PACK:
            self._packed.append(torch.cat(self._loose))
            self._loose.clear()

    def take(self) -> Tensor:
        """Return all steps ``[n, T, ...]``, and be empty."""
        n, *shape = (self._loose or self._packed)[0].shape
        n = n if self._loose else n // PACK
        rows = torch.cat(self._packed + self._loose).view(-1, n, *shape)
        self._loose.clear()
        self._packed.clear()
        return rows.transpose(0, 1).contiguous()


def by_environment(steps: Sequence[Tensor]) -> Tensor:
    """Return ``[n, T, ...]`` from T times ``[n, ...]``."""
    # one cat is five times as fast as a stack of many small tensors, which takes a view of each
    rows = torch.cat(list(steps)).view(len(steps), *steps[0].shape)
    return rows.transpose(0, 1).contiguous()


def _rows(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty ``[count, *shape]`` whose rows are aligned as fresh tensors are.

    Matrix products may round differently where their operands are not.
    """
    size = math.prod(shape)
    lane = ALIGNMENT // dtype.itemsize
    return torch.empty((count, -(-size // lane) * lane), dtype=dtype)[:, :size].unflatten(1, shape)
