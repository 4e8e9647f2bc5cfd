"""Values that a collector stores with the observations, so that GAE needs no value network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import (
    Entries,
    Policy,
    as_key,
    get_if_any,
    in_keys_of,
    in_parts,
    is_recurrent,
    out_keys_of,
)
from ppokit._calls import call, explain, obstacle, parts, shapes_of, works_in_place
from ppokit.collectors.batch import Record
from ppokit.policies.tensor_policy import modules_of_policy

VALUE_KEY = "state_value"


class StoredValues:
    """Evaluates a value network once on each observation of a batch.

    What its first modules would compute is taken from the policy, if they are modules of it.
    """

    def __init__(self, network: TensorDictModuleBase) -> None:
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
        self._others: list[TensorDictModuleBase] = []  # modules to call in this batch

    def _shared(self, policy: Policy) -> list[TensorDictModule]:
        """Return the first modules of the network that the policy has called, too.

        Modules within others that do more than call them in turn are not looked at.
        """
        modules = modules_of_policy(policy)
        of_policy = [] if isinstance(modules, str) else [y for x in modules for y in parts(x)]
        own = [x for x in of_policy if isinstance(x, TensorDictModule)]
        written = [key for x in own for key in x.out_keys]

        def is_shared(part: TensorDictModuleBase) -> bool:
            is_plain = isinstance(part, TensorDictModule) and obstacle(part) is None
            return is_plain and any(
                x.module is part.module
                and (x.in_keys, x.out_keys) == (part.in_keys, part.out_keys)
                and obstacle(x) is None
                and all(written.count(key) == 1 for key in x.out_keys)
                for x in own
            )

        shared = [*takewhile(is_shared, parts(self.network))]
        shared_layers = {layer for part in shared for layer in part.modules()}
        others = [x for part in of_policy for x in part.modules() if x not in shared_layers]
        return [] if any(map(works_in_place, others)) else shared  # they may change the features

    def begin(self, policy: Policy) -> list[NestedKey]:
        """Begin a batch; return the policy's entries that the network need not compute."""
        shared = self._shared(policy)
        self._others = parts(self.network)[len(shared) :] if shared else [self.network]
        return [*dict.fromkeys(as_key(key) for part in shared for key in part.out_keys)]

    def write(
        self, batch: TensorDictBase, kept: Entries, unseen: TensorDictBase, record: Record
    ) -> None:
        """Write ``"state_value"`` and ``("next", "state_value")``, which is 0 after terminations.

        Raises:
            ValueError: a value is not finite, or of another shape than ``[n, T, 1]``.
        """
        reads = dict.fromkeys(as_key(key) for part in self._others for key in in_keys_of(part))
        inputs = {key: get_if_any(batch, key) for key in reads if key not in kept}
        frames = TensorDict(batch_size=batch.batch_size, device=batch.device)
        for key, x in (inputs | kept).items():
            frames = frames if x is None else frames.set(key, x)
        frame_parts = in_parts(frames.reshape(-1))
        values = [self._evaluate(self._others, part.clone()) for part in frame_parts]
        value = torch.cat(values).unflatten(0, batch.batch_size)
        rows = {(env, record.steps - 1): env for env in range(record.num_envs)}
        rows |= {(x.env, x.time): record.num_envs + i for i, x in enumerate(record.finals)}
        # GAE evaluates the same rows in this order, with the same rounding.
        places = sorted((env, time) for env, time in rows if not record.terminated[time, env])
        after = value.roll(-1, 1)
        if places:
            envs, times = (list(x) for x in zip(*places, strict=True))
            own = torch.tensor([rows[place] for place in places])
            after[envs, times] = self._evaluate([self.network], unseen.gather(0, own))
        terminated = batch["next", "terminated"]
        batch[VALUE_KEY], batch["next", VALUE_KEY] = value, after.masked_fill(terminated, 0)

    def _evaluate(self, modules: Sequence[TensorDictModuleBase], frames: TensorDictBase) -> Tensor:
        try:
            value = call(modules, frames)[VALUE_KEY]
        except (KeyError, RuntimeError, ValueError) as error:
            explain(error, "The value network", shapes_of(frames), self.network)
            raise
        if value.shape != (len(frames), 1) or not value.isfinite().all():
            raise ValueError(
                f"The value network's {VALUE_KEY!r} has shape {list(value.shape)}, or is nan or "
                f"inf; it must be finite and of shape {[len(frames), 1]}."
            )
        return value
