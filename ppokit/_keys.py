"""Entries of a batch: keys, masks, time order, and the errors for missing entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit.functional._checks import check_same_shape

MASK_KEY = ("collector", "mask")
TRAJ_KEY = ("collector", "traj_ids")
VERSION_KEY = "policy_version"


def get_tensor(tensordict: TensorDictBase, key: NestedKey, *, fix: str) -> Tensor:
    """Return the tensor at ``key``, or raise a KeyError that names the entries of the batch."""
    tensor = tensordict.get(key, None)
    if tensor is None:
        raise missing_entry(tensordict, key, fix)
    return tensor


def missing_entry(tensordict: TensorDictBase, key: NestedKey, fix: str) -> KeyError:
    """Return the error for an entry that is not there."""
    present = ", ".join(sorted(str(k) for k in tensordict.keys(True, True)))
    return KeyError(f"{as_key(key)!r} is not in the batch. {fix} The batch holds: {present}.")


def refuse_locked(tensordict: TensorDictBase, *, who: str) -> None:
    """Raise, before anything is counted, if a block could not write into the batch."""
    if tensordict.is_locked:
        raise RuntimeError(
            f"The batch is locked, and {who} writes into it: unlock_() it, or pass "
            "batch.clone(recurse=False)."
        )


def get_if_any(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return the tensor at ``key`` or None: for entries that are seldom there, faster than ``get``.

    The key must be in canonical form. Names are looked up level by level, so that a captured graph
    depends on the absence of an entry.
    """
    found: Any = tensordict
    for name in (key,) if isinstance(key, str) else key:
        if not is_tensor_collection(found) or name not in found.keys():
            return None
        found = found.get(name)
    return found


def key_parts(key: NestedKey) -> tuple[str, ...]:
    """Return the names that a key is made of."""
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else key  # pyright: ignore[reportReturnType]


def key_list(keys: NestedKey | list[NestedKey] | None) -> list[NestedKey]:
    """Return the keys of a loss's ``tensor_keys``: one, those of several action heads, or none."""
    if keys is None:
        return []
    return [as_key(key) for key in (keys if isinstance(keys, list) else [keys])]


def as_key(key: NestedKey) -> NestedKey:
    """Return ``key`` in tensordict's canonical form."""
    return unravel_key(key)


def time_dim(tensordict: TensorDictBase, *, who: str) -> int:
    """Return the dimension that runs in time order.

    A dimension named "time" is trusted, and so is the last of two or more. An unnamed 1-D batch may
    be a shuffled minibatch, so it raises ValueError.
    """
    if tensordict.batch_size.numel() == 0:
        raise ValueError(f"{who} got an empty batch of shape {list(tensordict.batch_size)}.")
    if "time" in (names := tensordict.names or []):
        return names.index("time")
    if tensordict.ndim >= 2:
        return tensordict.ndim - 1
    raise ValueError(
        f"{who} needs time order, and a batch of shape {list(tensordict.batch_size)} without a "
        'dimension named "time" may be shuffled. Call it before the batch goes through a replay '
        'buffer, name the dimension (batch.names = ["time"]), or pass [B, T].'
    )


def check_time_is_last(tensordict: TensorDictBase, *, who: str) -> None:
    """Raise a ValueError where a dimension named "time" is not the last one."""
    if "time" in (names := tensordict.names or [])[:-1]:
        dim = names.index("time")
        raise ValueError(
            f'The dimension named "time" of a batch of shape {list(tensordict.batch_size)} is '
            f"{dim}; {who} needs it to be the last. Use batch.transpose({dim}, -1)."
        )


def mask_key_of(loss: Any) -> NestedKey | None:
    """Return the key of the mask of valid frames that a loss reads, or None if it reads none."""
    key = getattr(loss, "loss_mask_key", "auto")
    return MASK_KEY if key == "auto" else None if key is None else as_key(key)


def valid_mask(tensordict: TensorDictBase, key: NestedKey | None = MASK_KEY) -> Tensor | None:
    """Return the mask of valid frames, of the shape of the batch, or None if there is none."""
    mask = None if key is None else get_if_any(tensordict, key)
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        raise TypeError(f"{key!r} has dtype {mask.dtype}; a mask must be torch.bool.")
    if mask.shape == (*tensordict.batch_size, 1):
        mask = mask.squeeze(-1)
    if mask.shape != tensordict.batch_size:
        raise ValueError(
            f"{key!r} has shape {list(mask.shape)}, but the batch has shape "
            f"{list(tensordict.batch_size)}; a mask has one flag for each frame."
        )
    return mask


def last_valid_steps(mask: Tensor, dim: int) -> Tensor:
    """Return True where a step is valid and the one after it is not, or does not exist."""
    steps = mask.shape[dim]
    following = torch.cat(
        [mask.narrow(dim, 1, steps - 1), torch.zeros_like(mask.narrow(dim, 0, 1))], dim
    )
    return mask & ~following


def check_trajectories(
    tensordict: TensorDictBase, done: Tensor, dim: int, *, mask: Tensor | None, key: NestedKey
) -> None:
    """Raise where a trajectory id changes although the step before was not done (in any flag).

    Such data is shuffled, or was cut out of a buffer across a seam. It reads values, so it runs on
    CPU only.
    """
    ids = get_if_any(tensordict, key)
    if ids is None or torch.compiler.is_compiling():
        return
    if ids.shape != tensordict.batch_size:
        raise ValueError(
            f"{key!r} has shape {list(ids.shape)}, but the batch has shape "
            f"{list(tensordict.batch_size)}; there is one trajectory id for each frame."
        )
    if ids.device.type != "cpu":
        return
    steps, done = ids.shape[dim], per_frame(done, tensordict.ndim)
    changed = ids.narrow(dim, 1, steps - 1) != ids.narrow(dim, 0, steps - 1)
    unannounced = changed & ~done.narrow(dim, 0, steps - 1)
    if mask is not None:
        unannounced &= mask.narrow(dim, 1, steps - 1)
    if unannounced.any():
        where = unannounced.nonzero()[0].tolist()
        raise ValueError(
            f"{key!r} changes after {where} although that step is not done, in "
            f"{int(unannounced.sum())} place(s): the batch has lost its time order. Use the batch "
            "as it was collected, before any shuffling or sampling; from MultiSyncCollector, with "
            "cat_results='stack'."
        )


def per_frame(flag: Tensor, batch_ndim: int) -> Tensor:
    """Reduce the trailing dimensions of a flag: True where any is."""
    if flag.ndim == batch_ndim + 1 and flag.shape[-1] == 1:
        return flag.squeeze(-1)
    return flag.flatten(batch_ndim).any(-1) if flag.ndim > batch_ndim else flag


def check_shapes(tensors: Mapping[NestedKey, Tensor], *, fix: str | None = None) -> None:
    """Raise unless all tensors have one shape; the message names their keys, and the fix."""
    first, *others = tensors.values()
    for tensor in others:  # a loop that graphs of dynamic shapes can hold
        if tensor.shape != first.shape:
            check_same_shape({repr(as_key(key)): x for key, x in tensors.items()}, fix=fix)


def version_of(policy: Any) -> Tensor | None:
    """Return a copy of the policy's buffer ``policy_version``, or None."""
    version = getattr(policy, VERSION_KEY, None)
    return version.detach().clone() if isinstance(version, Tensor) else None


def write_policy_version(version: Tensor | None, batch: TensorDictBase) -> TensorDictBase:
    """Write ``"policy_version"`` of each frame, if there is one."""
    if version is not None:
        batch.set(VERSION_KEY, version.expand(batch.batch_size).clone())
    return batch
