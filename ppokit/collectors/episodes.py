"""The open episodes of a collector's environments, and the batches that are cut from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from traceback import extract_tb
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.envs import GymWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type

from ppokit._batch import Entries, Policy, is_private, version_of, write_policy_version
from ppokit._calls import explain
from ppokit.collectors.batch import EpisodeCounts, Record, assemble_batch, unseen_observations
from ppokit.collectors.environments import Envs, VectorEnvs
from ppokit.collectors.infos import Infos
from ppokit.collectors.normalization import updated_parts
from ppokit.collectors.policy import CollectorPolicy
from ppokit.collectors.values import StoredValues
from ppokit.policies.compiled_policy import CompiledPolicy
from ppokit.spaces import Actions, Leaf, gym_env, observation_leaves

BLOCK_BITS = 36
LARGEST_ID = ((1 << 27) - 2) << BLOCK_BITS  #: of a state; ids are int64
_ENVIRONMENTS = str(Path(__file__).with_name("environments.py"))
_OF_DTYPES = (
    "Pass observation_dtype=, for floating-point observations, observation_transform="
    "ObservationNormalizer(shape), or use gymnasium's DtypeObservation. A mask must be "
    "bool: declare it as Box(0, 1, shape, np.bool_), or write mask.bool()."
)
_blocks = SimpleNamespace(used=0)  # how many collectors of this process have ids


def first_trajectory_id(worker_idx: int | None, now: float | None = None) -> int:
    """Return the first trajectory id of a collector that starts now.

    Without workers, each collector of a process has 2**36 ids, from 0 on. The layout of a worker's
    ids: worker (12 bits), start time in seconds (27, which repeat after four years), counter (24).
    """
    if worker_idx is None:
        _blocks.used += 1
        return (_blocks.used - 1) << BLOCK_BITS
    if not 0 <= worker_idx < 1 << 12:
        raise ValueError(f"worker_idx must be from 0 to 4,095, got {worker_idx}.")
    second = int(time.time() if now is None else now) % (1 << 27)
    return worker_idx << 51 | second << 24


class Episodes:
    """The open episodes of the environments, between two batches.

    It keeps the next observations, trajectory ids, sums over episodes, and recurrent states.
    """

    def __init__(
        self,
        envs: Envs,
        wrapper: GymWrapper,
        num_envs: int,
        counts: EpisodeCounts,
        device: torch.device | None,
        observation_dtype: torch.dtype | None,
        first_id: int,
        compiled: CompiledPolicy | None,
        reads: Collection[tuple[str, ...]],
        info_keys: tuple[str, ...],
        values: StoredValues | None,
        compact: bool,
    ) -> None:
        self._compiled, self._reads = compiled, reads
        self._infos, self._values, self._compact = Infos(info_keys), values, compact
        self._envs, self._wrapper, self._num_envs = envs, wrapper, num_envs
        self._counts, self._device, self._dtype = counts, device, observation_dtype
        self._actions = Actions(wrapper, joined=isinstance(envs, VectorEnvs))
        self._reward = wrapper.reward_spec.zero()
        self.unused_id = first_id
        self.take_new_ids()
        self.leaves: list[Leaf] = []
        self.are_over = False  #: a state was loaded; the next batch begins new episodes
        self.begin()

    @property
    def keys(self) -> list[NestedKey]:
        """The entries of an observation."""
        return [leaf.key for leaf in self.leaves]

    def begin(self, *, new_ids: bool = False) -> None:
        """Reset all environments, and begin new episodes with their observations."""
        first = self._envs.reset()
        self.are_over = False
        self.leaves = observation_leaves(self._wrapper, first[0][1], self._dtype, self._reads)
        if not self.leaves:
            raise TypeError(
                "The observation has no entry: it is an empty Dict, or a Tuple of unlike Dicts."
            )
        record = self._record(steps=0)
        for i, (observation, info) in enumerate(first):
            record.write(0, i, observation, info)
            record.write_info(0, i, info)
        self._start = [rows[0] for rows in record.observed]
        if record.infos:
            self._infos.begin(record)
        called = self._actions, self.keys, self._num_envs, self._device, self._compiled
        self.policy = CollectorPolicy(*called)  # recurrent states are zero
        self._counts.open.clear()
        if new_ids:
            self.take_new_ids()

    def take_new_ids(self, at_least: int = 0) -> None:
        """Give the open episodes ids that no other had, from ``at_least`` on."""
        block, own = at_least >> BLOCK_BITS, self.unused_id >> BLOCK_BITS
        if own != block < _blocks.used and at_least:  # of another collector of this process
            at_least = _blocks.used << BLOCK_BITS
        first = max(self.unused_id, at_least)
        _blocks.used = max(_blocks.used, (first >> BLOCK_BITS) + 1)
        self._ids, self.unused_id = np.arange(first, first + self._num_envs), first + self._num_envs

    def keep_state(self) -> Callable[[], None]:
        """Return a function that restores the ids, and that the episodes go on."""
        kept = self._ids.copy(), self.unused_id, self.are_over

        def restore() -> None:
            self._ids, self.unused_id, self.are_over = kept

        return restore

    def collect(
        self,
        steps: int,
        policy: Policy,
        transform: TensorDictModuleBase | None,
        exploration_type: ExplorationType,
        *,
        updates_transform: bool,
    ) -> tuple[TensorDictBase, int]:
        """Return a batch ``[num_envs, steps]``, and how many of its frames belong to an episode."""
        counts = updates_transform and transform is not None
        counting = updated_parts(transform) if counts else ()
        if self.are_over:
            self.begin()
        record = self._record(steps)
        version = version_of(policy)  # shared weights may change under way
        try:
            with set_exploration_type(exploration_type):
                kept = () if self._values is None else self._values.begin(policy)
                self.policy.begin(policy, transform, exploration_type, kept)
                transformed, written = self._act(record)
        except (RuntimeError, ValueError) as error:
            if not any(x.filename == _ENVIRONMENTS for x in extract_tb(error.__traceback__)):
                given = {x.key: ([self._num_envs, *x.shape], x.dtype) for x in self.leaves}
                explain(error, "The policy", given, policy, of_dtypes=_OF_DTYPES)
            raise
        self._start = [rows[-1].clone() for rows in record.observed]
        ids, self.unused_id = record.traj_ids(self._ids, self.unused_id)
        infos, unseen = self._infos.take(record) if record.infos else {}, None
        if transform is not None or self._values is not None:
            unseen = unseen_observations(record, self._device)
            unseen = unseen if transform is None else transform(unseen)
        features = {key: written.pop(key) for key in kept if is_private(key)}
        of_steps = transformed, written, unseen, ids, self._device
        batch = assemble_batch(record, infos, *of_steps)
        if self._values is not None and unseen is not None:
            features |= {key: batch[key] for key in kept if key not in features}
            self._values.write(batch, features, unseen, record)
        self._counts.write(batch)
        self._actions.check_choices(batch, written)
        for part in counting:
            part.update(record.raw_observations())
        resets = 0 if record.is_reset is None else int(record.is_reset.sum())
        return write_policy_version(version, batch), batch.numel() - resets

    def _act(self, record: Record) -> tuple[Entries, Entries]:
        """Step all environments; return the entries of the transform and of the policy."""
        for rows, start in zip(record.observed, self._start, strict=True):
            rows[0].copy_(start)
        act, step, starts, keys = self.policy.act, self._envs.step, record.starts, self.keys
        rows_at = zip(*(x[:-1] for x in record.observed), strict=True)
        for t, rows in enumerate(rows_at):
            if self._device is not None:
                rows = [row.to(self._device) for row in rows]
            observed = dict(zip(keys, rows, strict=True))
            step(act(observed, starts), record, t)
        return self.policy.finish(starts)

    def _record(self, steps: int) -> Record:
        is_array = isinstance(gym_env(self._wrapper).observation_space, Box)
        single = is_array and len(self.leaves) == 1  # stored without encoding
        of_batch = self.leaves, steps, self._num_envs, self._reward, single
        return Record(*of_batch, self._infos.keys, self._compact)
