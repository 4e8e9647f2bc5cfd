"""From what happened to the TensorDict that torchrl's ``Collector`` would yield."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import TRAJ_KEY, key_parts
from ppokit.collectors.policies import FLAGS, Entries
from ppokit.collectors.record import Record


def assemble(
    record: Record,
    transform: Any,
    transformed: Entries,
    written: Entries,
    ids: Tensor,
    device: torch.device | None,
) -> TensorDict:
    """Return the batch ``[n, T]``.

    Args:
        record: what the environments did.
        transform: the module that was applied to the observations, or None.
        transformed: what it wrote, ``[n, T, ...]``.
        written: what the policy wrote, ``[n, T, ...]``.
        ids: trajectory ids ``[n, T]``.
        device: where the batch goes.
    """
    root, following = _observations(record)
    if transform is not None:
        extra = _transform_extra(record, transform, device)
        for key, value in transformed.items():
            root[key] = value
            following[key] = _shifted(value, extra[key], record)
    flags = np.zeros((2, record.num_envs, record.steps, 1), dtype=np.bool_)
    for end in record.ends:
        flags[:, end.env, end.time, 0] = end.terminated, end.truncated
    terminated, truncated = torch.from_numpy(flags)
    root |= {name: torch.zeros_like(terminated) for name in FLAGS}
    following["reward"] = record.reward.transpose(0, 1).contiguous()
    following["done"] = terminated | truncated
    following |= {"terminated": terminated.clone(), "truncated": truncated.clone()}
    names: Any = [None, "time"]
    batch = TensorDict(batch_size=[record.num_envs, record.steps], names=names, device=device)
    for key, value in [*root.items(), (TRAJ_KEY, ids)]:
        batch.set(key, value)
    for key, value in following.items():
        batch.set(("next", *key_parts(key)), value)
    for key, value in written.items():
        batch.set(key, value)
    return batch


def _observations(record: Record) -> tuple[Entries, Entries]:
    """Return the observations before and after each step, ``[n, T, ...]``."""
    root, following = {}, {}
    for i, leaf in enumerate(record.leaves):
        rows = record.observed[i].transpose(0, 1)
        root[leaf.key] = rows[:, :-1].contiguous()
        # a copy, also where there is one environment and the rows are in order as they are
        after = rows[:, 1:].clone(memory_format=torch.contiguous_format)
        following[leaf.key] = after
        array = after.numpy()
        for end in record.ends:
            array[end.env, end.time] = end.final[i]
    return root, following


def _transform_extra(record: Record, transform: Any, device: Any) -> TensorDictBase:
    """Transform the observations that the policy did not see: the last ones, and the final ones."""
    values: dict[NestedKey, Tensor] = {}
    for i, leaf in enumerate(record.leaves):
        finals = [torch.from_numpy(end.final[i]).reshape(leaf.shape) for end in record.ends]
        values[leaf.key] = torch.stack([*record.observed[i][-1], *finals])
    rows = record.num_envs + len(record.ends)
    return transform(TensorDict(values, [rows], device=device))  # pyright: ignore[reportArgumentType]


def _shifted(value: Tensor, extra: Tensor, record: Record) -> Tensor:
    """Return ``value`` one step later, with the values after the last steps from ``extra``."""
    n = record.num_envs
    after = torch.cat([value[:, 1:], extra[:n].unsqueeze(1)], 1)
    if record.ends:
        envs, times = zip(*[(end.env, end.time) for end in record.ends], strict=True)
        after[list(envs), list(times)] = extra[n:]
    return after
