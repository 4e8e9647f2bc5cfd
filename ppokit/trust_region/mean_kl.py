"""The mean KL over minibatches and ranks, by all-reduces that leave no rank waiting.

Every rank of the group takes part in every all-reduce. A rank that computes the mean contributes
its KLs and counts as active. One whose batch is over contributes nothing, is not active, and takes
part until no rank is active: that all-reduce closes the batch on every rank. So ranks may hold
different numbers of minibatches. Without a group there is no communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import get_tensor, key_parts
from ppokit.distributed import meeting_device, resolve_group, sum_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_FIX = (
    "DualClipPPOLoss writes 'kl'; for torchrl's ClipPPOLoss make the KLEarlyStopper with "
    "kl_key='kl_approx', or pass the KL itself."
)
AnyKL: TypeAlias = TensorDictBase | Mapping[Any, Any] | Tensor | float


def find_kl(losses_or_kl: AnyKL, key: NestedKey) -> Any:
    """Return the KL at ``key`` of the losses, or the KL itself."""
    if not isinstance(losses_or_kl, TensorDictBase):
        if not isinstance(losses_or_kl, Mapping):
            return losses_or_kl
        parts, kl = key_parts(key), losses_or_kl
        for part in parts:
            kl = kl.get(part) if isinstance(kl, Mapping) else None
        found = (kl, losses_or_kl.get(key), losses_or_kl.get("/".join(parts)))
        for kl in found:
            if kl is not None:
                return kl
        raise KeyError(f"There is no KL at {key!r} among {[*losses_or_kl]}. {_FIX}")
    return get_tensor(losses_or_kl, key, fix=_FIX)


def mean_over_ranks(
    kl: Tensor | float, weight: Tensor | float | None, group: ProcessGroup | None
) -> float:
    """Return the mean of the KLs of all active ranks, weighted by ``weight``, in one transfer."""
    values = torch.as_tensor(kl, dtype=torch.float64).detach()
    if values.numel() == 0:
        raise ValueError("The KL is an empty tensor: pass the KL of at least one minibatch.")
    if weight is None:
        frames = torch.ones_like(values)
    elif isinstance(weight, Tensor):
        frames = weight.to(values)
    else:
        # torch.as_tensor would wait for the device.
        frames = torch.full((), weight, dtype=values.dtype, device=values.device)
    if frames.shape != values.shape:
        raise _bad_weight(values, weight)
    # The KL of no frames is often NaN.
    weighted = (values * frames).masked_fill(frames == 0, 0.0).sum()
    bad = (~((frames >= 0) & (frames < math.inf))).sum().to(values.dtype)
    # Checked after the all-reduce, so that a rank with bad weights makes all ranks raise.
    sums = torch.stack([weighted, frames.sum(), bad, torch.ones_like(weighted)])
    kl_sum, frame_sum, bad_weights, _ = _all_reduce(sums, group)
    if bad_weights or not frame_sum:
        raise _bad_weight(values, weight)
    return kl_sum / frame_sum


def answer_until_all_are_done(group: ProcessGroup | None) -> None:
    """Take part in the all-reduces of ranks whose batch is not over yet, until there is none."""
    if resolve_group(group) is None:
        return
    nothing = torch.zeros(4, dtype=torch.float64)
    active = 1.0
    while active:
        *_, active = _all_reduce(nothing, group)


def _all_reduce(sums: Tensor, group: ProcessGroup | None) -> list[float]:
    ranks = resolve_group(group)
    if ranks is not None:
        sums = sum_over_ranks(sums.to(meeting_device(ranks)), ranks)
    return sums.tolist()


def _bad_weight(values: Tensor, weight: Tensor | float | None) -> ValueError:
    return ValueError(
        "weight must be the number of valid frames behind each KL: "
        f"shape {list(values.shape)}, finite, not negative, and not 0 everywhere. Here it is "
        f"{weight}; in a process group the fault may be another rank's."
    )
