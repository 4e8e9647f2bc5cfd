"""Recording what the environments and the policy return, and assembling the batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import MASK_KEY, TRAJ_KEY, Entries, get_if_any, key_parts
from ppokit.functional import reversed_discounted_returns
from ppokit.spaces import Info, Leaf

FLAGS = ("done", "terminated", "truncated")
ALIGNMENT = 64  # bytes
PACK = 64  # steps


class Final(NamedTuple):
    """The observation after the last step of an episode, whose row holds the next episode's."""

    time: int
    env: int
    observation: list[np.ndarray]  #: one array for each leaf
    infos: list[object]  #: one for each entry of info that is stored


class Record:
    """Observations ``[T + 1, n, ...]``, rewards ``[T, n, ...]`` and flags ``[T, n]`` of a batch.

    Row t of the observations is what the policy sees at time t. An environment whose episode ends
    is reset in the same step, and the next row holds the first observation of the next episode; or
    in a step of its own, which belongs to no episode. The tensors ``observed`` and ``reward`` are
    the memory of the arrays that environments write to, ``arrays`` and ``rewards``.

    With ``compact``, the rows of all steps lie in the memory of the batch ``[n, T, ...]``.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        steps: int,
        num_envs: int,
        reward: Tensor,
        single: bool,
        info_keys: Sequence[str] = (),
        compact: bool = False,
    ) -> None:
        self.leaves, self.steps, self.num_envs = leaves, steps, num_envs
        self.compact = compact
        #: of each leaf, the observations before each step ``[n, T, ...]``, and its rows
        self.before, self.observed = [], []
        for leaf in leaves:
            if compact:
                before = torch.empty((num_envs, steps, *leaf.shape), dtype=leaf.dtype)
                rows = [*before.unbind(1), torch.empty((num_envs, *leaf.shape), dtype=leaf.dtype)]
            else:
                rows = _rows(steps + 1, (num_envs, *leaf.shape), leaf.dtype)
                before = rows[:-1].transpose(0, 1)
            self.before.append(before)
            self.observed.append(rows)
        self.reward = torch.empty((steps, num_envs, *reward.shape), dtype=reward.dtype)
        self.rewards = self.reward.numpy()
        self.largest_reward = float(np.finfo(self.rewards.dtype).max)
        self.arrays: list[Sequence[np.ndarray]] = [
            [row.numpy() for row in rows] if compact else rows.numpy() for rows in self.observed
        ]
        #: entries of info by key, time and environment; None where there is none
        self.infos: dict[str, list[list[object]]] = {
            key: [[None] * num_envs for _ in range(steps + 1)] for key in info_keys
        }
        self.reward_shape = tuple(reward.shape)
        self._single = self.arrays[0] if single else None
        self.terminated, self.truncated = np.zeros((2, steps, num_envs), dtype=np.bool_)
        self.is_reset: np.ndarray | None = None  #: which steps are resets; None where none can be
        self.finals: list[Final] = []
        self.starts: list[int] = []  #: environments in the order in which they began an episode

    def single_row(self, row: int) -> np.ndarray | None:
        """Return the memory ``[n, ...]`` of observations of one array; None of others."""
        return None if self._single is None else self._single[row]

    def write(self, row: int, env: int, observation: object, info: Info) -> None:
        """Store an observation of one environment."""
        for leaf, array in zip(self.leaves, self.arrays, strict=True):
            array[row][env] = leaf.read(observation, info, env)

    def write_info(self, row: int, env: int, info: Info) -> None:
        """Store the entries of ``info`` beside an observation."""
        for key, rows in self.infos.items():
            rows[row][env] = _copied(info.get(key))

    def end(
        self,
        time: int,
        env: int,
        terminated: object,
        truncated: object,
        observation: object,
        info: Info,
    ) -> None:
        """Store the end of an episode, in an environment that is reset in the same step."""
        self.terminated[time, env], self.truncated[time, env] = terminated, truncated
        final = [np.array(leaf.read(observation, info, env)) for leaf in self.leaves]
        infos = [_copied(info.get(key)) for key in self.infos]
        self.finals.append(Final(time, env, final, infos))
        self.starts.append(env)

    def raw_observations(self) -> TensorDict:
        """Return the observations before each step ``[n, T]``, without the transform."""
        raw = {leaf.key: x for leaf, x in zip(self.leaves, self.before, strict=True)}
        found = TensorDict(raw, [self.num_envs, self.steps])
        mask = None if self.is_reset is None else torch.from_numpy(~self.is_reset.T)
        return found if mask is None else found.set(MASK_KEY, mask)

    def traj_ids(self, current: np.ndarray, unused: int) -> tuple[Tensor, int]:
        """Return the trajectory ids ``[n, T]`` and the next unused one; update the current."""
        done = self.terminated | self.truncated
        numbers = done.cumsum().reshape(done.shape)
        after = np.where(done, unused - 1 + numbers, current)
        ids = np.maximum.accumulate(np.concatenate([current[None], after]))
        current[:] = ids[-1]
        return torch.from_numpy(ids[:-1].T.copy()), unused + int(done.sum())


class Columns:
    """Entries ``[n, ...]`` of the steps of a batch.

    They are joined every so many steps: thousands of objects that live for a batch make Python's
    garbage collector look through all objects, which takes a tenth of a second.

    A network may return the same memory in each step, such as an expanded parameter: entries that
    do in the first two steps of a batch are copied in all.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._steps: list[Entries] = []
        self._packed: dict[NestedKey, list[Tensor]] = defaultdict(list)
        self._first: Entries | None = None  # as it was given
        self._copied: Collection[NestedKey] | None = None  # None before the second step

    def append(self, entries: Entries) -> None:
        """Add the entries of a step."""
        if not entries:
            return
        if self._copied is None:
            if self._first is not None:
                pairs = [(key, x, self._first.get(key)) for key, x in entries.items()]
                self._copied = [key for key, x, y in pairs if _in_one_memory(x, y)]
            self._first = entries if self._first is None else None
            entries = {key: x.clone() for key, x in entries.items()}
        elif self._copied:
            entries = {k: x.clone() if k in self._copied else x for k, x in entries.items()}
        self._steps.append(entries)
        if len(self._steps) == PACK:
            self._pack()

    def _pack(self) -> None:
        for key in dict.fromkeys(key for entries in self._steps for key in entries):
            rows = [entries[key] for entries in self._steps if key in entries]
            # A network may return a dict, which becomes a TensorDict without batch size.
            rows = [x if isinstance(x, Tensor) else x.copy().auto_batch_size_(1) for x in rows]
            # faster than torch.stack
            self._packed[key].append(torch.cat(rows).unflatten(0, (len(rows), len(rows[0]))))
        self._steps.clear()

    def take(self) -> Entries:
        """Return the entries of all steps ``[n, T, ...]``, and drop them."""
        self._pack()
        packed = self._packed
        self._begin()
        return {k: torch.cat(rows).transpose(0, 1).contiguous() for k, rows in packed.items()}


def _copied(value: object) -> object:
    """Return a copy as an array, because an environment may write to it; None is none."""
    try:
        return None if value is None else np.array(value)
    except (TypeError, ValueError):  # ragged; named later
        return value


def _in_one_memory(x: Tensor, y: Tensor | None) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return True
    return x.data_ptr() == y.data_ptr()


class EpisodeCounts:
    """Adds up steps or rewards over episodes, as torchrl's StepCounter and RewardSum do."""

    names = "step_count", "episode_reward"

    def __init__(self, *, step_count: bool, episode_reward: bool) -> None:
        flags = zip(self.names, (step_count, episode_reward), strict=True)
        self.wanted = [name for name, is_wanted in flags if is_wanted]
        self.open: dict[str, Tensor] = {}  #: of the episodes that go on

    def write(self, batch: TensorDictBase) -> None:
        """Write ``("next", name)`` of each count into a batch ``[n, T]``."""
        for name in self.wanted:
            each, done = batch.get(("next", "reward")), batch.get(("next", "done"))
            dtype = each.dtype
            if name == "step_count":
                each, dtype = torch.ones_like(each[..., :1]), torch.int64
            mask = get_if_any(batch, MASK_KEY)
            each = each if mask is None else each * mask.unsqueeze(-1)
            start, done = self.open.get(name), done.expand_as(each)
            total, self.open[name] = reversed_discounted_returns(
                each.double(), done, gamma=1.0, initial=start
            )
            batch.set(("next", name), total.to(dtype))


def _rows(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty ``[count, *shape]`` whose rows are aligned as fresh tensors are.

    Matrix products may round differently where their operands are not.
    """
    size = math.prod(shape)
    lane = ALIGNMENT // dtype.itemsize
    return torch.empty((count, -(-size // lane) * lane), dtype=dtype)[:, :size].unflatten(1, shape)


def assemble_batch(
    record: Record,
    infos: Mapping[str, tuple[Tensor, Tensor]],
    transformed: Entries,
    written: Entries,
    unseen: TensorDictBase | None,
    ids: Tensor,
    device: torch.device | None,
) -> TensorDict:
    """Return the batch ``[n, T]`` that torchrl's ``Collector`` would yield.

    ``unseen`` are the observations that the policy did not see, transformed; see
    :func:`unseen_observations`.
    """
    root, following = _observations(record)
    for key, value in transformed.items():
        root[key] = value
        if not record.compact and unseen is not None:
            following[key] = _after_steps(value, unseen[key], record)
    for key, (before, after) in infos.items():
        root[key], following[key] = before, after
    flags = record.terminated, record.truncated
    terminated, truncated = (torch.from_numpy(flag.T[..., None].copy()) for flag in flags)
    root |= {name: torch.zeros_like(terminated) for name in FLAGS}
    following["reward"] = record.reward.transpose(0, 1).contiguous()
    following["done"] = terminated | truncated
    following |= {"terminated": terminated.clone(), "truncated": truncated.clone()}
    names = [None, "time"]
    batch = TensorDict(batch_size=[record.num_envs, record.steps], names=names, device=device)
    for key, value in [*root.items(), (TRAJ_KEY, ids)]:
        batch.set(key, value)
    if record.is_reset is not None:
        batch.set(MASK_KEY, torch.from_numpy(~record.is_reset.T))
    for key, value in following.items():
        batch.set(("next", *key_parts(key)), value)
    for key, value in written.items():
        batch.set(key, value)
    return batch


def _observations(record: Record) -> tuple[Entries, Entries]:
    """Return the observations before and after each step, ``[n, T, ...]``."""
    root, following = {}, {}
    for i, leaf in enumerate(record.leaves):
        root[leaf.key] = record.before[i].contiguous()
        if record.compact:
            continue
        # a copy, also where the rows of one environment are contiguous already
        rows = cast("Tensor", record.observed[i])
        after = rows[1:].transpose(0, 1).clone(memory_format=torch.contiguous_format)
        following[leaf.key] = after
        array = after.numpy()
        for final in record.finals:
            array[final.env, final.time] = final.observation[i]
    return root, following


def unseen_observations(record: Record, device: torch.device | None) -> TensorDictBase:
    """Return the observations that the policy did not see: the last ones, and the final ones."""
    values: dict[NestedKey, Tensor] = {}
    for i, leaf in enumerate(record.leaves):
        finals = [
            torch.from_numpy(final.observation[i]).reshape(leaf.shape).to(leaf.dtype)
            for final in record.finals
        ]
        values[leaf.key] = torch.stack([*record.observed[i][-1], *finals])
    rows = record.num_envs + len(record.finals)
    return TensorDict(values, [rows], device=device)  # pyright: ignore[reportArgumentType]


def _after_steps(value: Tensor, unseen: Tensor, record: Record) -> Tensor:
    """Return what is after each step ``[n, T, ...]``; what is not before another is ``unseen``."""
    n = record.num_envs
    after = torch.cat([value[:, 1:], unseen[:n].unsqueeze(1)], 1)
    if record.finals:
        envs, times = zip(*[(final.env, final.time) for final in record.finals], strict=True)
        after[list(envs), list(times)] = unseen[n:]
    return after
