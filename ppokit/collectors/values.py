"""Values that a collector stores with the observations, so that GAE needs no value network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import (
    Entries,
    Policy,
    as_key,
    get_if_any,
    in_cached_parts,
    in_keys_of,
    is_recurrent,
    out_keys_of,
)
from ppokit._calls import call, leaves
from ppokit.collectors.batch import Record

VALUE_KEY = "state_value"


class StoredValues:
    """Evaluates a value network once on each observation of a batch.

    What its first modules would compute is taken from the policy, if they are modules of it.
    """

    def __init__(self, network: Any) -> None:
        if is_recurrent(network):
            raise ValueError(
                "value_network is recurrent: leave it out, and pass it to GAE, which continues "
                "from the stored states."
            )
        if VALUE_KEY not in [*map(as_key, out_keys_of(network))]:
            raise ValueError(
                f"value_network must be a TensorDictModule that writes {VALUE_KEY!r}; "
                f"{type(network).__name__} writes {[*out_keys_of(network)]}."
            )
        self.network = network

    def _shared(self, policy: Policy) -> list[Any]:
        """Return the first modules of the network that the policy has called, too."""
        own = [*leaves(policy)]
        written = [key for part in own for key in out_keys_of(part)]

        def is_shared(part: Any) -> bool:
            names = "module", "in_keys", "out_keys"
            of_part = [getattr(part, name, None) for name in names]
            is_there = any([getattr(x, name, None) for name in names] == of_part for x in own)
            return is_there and all(written.count(key) == 1 for key in part.out_keys)

        return [*takewhile(is_shared, leaves(self.network))]

    def kept(self, policy: Policy) -> list[NestedKey]:
        """Return the entries that the policy writes and the network need not compute."""
        return [as_key(key) for part in self._shared(policy) for key in part.out_keys]

    def write(
        self,
        batch: TensorDictBase,
        kept: Entries,
        policy: Policy,
        unseen: TensorDictBase,
        record: Record,
    ) -> None:
        """Write ``"state_value"`` and ``("next", "state_value")``, which is 0 after terminations.

        Raises:
            ValueError: a value is not finite, or of another shape than ``[n, T, 1]``.
        """
        shared = self._shared(policy)
        others = [*leaves(self.network)][len(shared) :] if shared else [self.network]
        reads = dict.fromkeys(as_key(key) for part in others for key in in_keys_of(part))
        inputs = {key: get_if_any(batch, key) for key in reads if key not in kept}
        given: Any = {key: x for key, x in (inputs | kept).items() if x is not None}
        frames = TensorDict(given, batch.batch_size, device=batch.device).reshape(-1)
        parts = [self._evaluate(others, part.clone()) for part in in_cached_parts(frames)]
        value = torch.cat(parts).unflatten(0, batch.batch_size)
        rows = {(env, record.steps - 1): env for env in range(record.num_envs)}
        rows |= {(x.env, x.time): record.num_envs + i for i, x in enumerate(record.finals)}
        # GAE evaluates the same rows in this order, so its numbers are the same to the bit.
        places = sorted((env, time) for env, time in rows if not record.terminated[time, env])
        after = value.roll(-1, 1)
        if places:
            envs, times = (list(x) for x in zip(*places, strict=True))
            own: Any = unseen[[rows[place] for place in places]]
            after[envs, times] = self._evaluate([self.network], own)
        terminated = batch["next", "terminated"]
        batch[VALUE_KEY], batch["next", VALUE_KEY] = value, after.masked_fill(terminated, 0)

    def _evaluate(self, modules: Sequence[Any], frames: TensorDictBase) -> Tensor:
        value = call(modules, frames)[VALUE_KEY]
        if value.shape != (len(frames), 1) or not value.isfinite().all():
            raise ValueError(
                f"The value network's {VALUE_KEY!r} has shape {list(value.shape)}, or is nan or "
                f"inf; it must be finite and of shape {[len(frames), 1]}."
            )
        return value
