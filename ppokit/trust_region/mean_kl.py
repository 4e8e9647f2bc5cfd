"""The mean KL over minibatches and ranks, by all-reduces that leave no rank waiting.

Every rank of the group takes part in every all-reduce. A rank that computes the mean contributes
its KLs and counts as active. A rank whose batch is over contributes zeros, and takes part until no
rank is active: that all-reduce closes the batch on every rank. So ranks may hold different numbers
of minibatches. Without a group there is no communication.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import get_tensor, key_parts
from ppokit.distributed import meeting_device, resolve_group, sum_over_ranks
from ppokit.functional import _checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FIX = (
    "DualClipPPOLoss writes 'kl'; for torchrl's ClipPPOLoss build the KLEarlyStopper or "
    "AdaptiveLearningRate with kl_key='kl_approx', or pass the KL itself."
)
AnyKL: TypeAlias = TensorDictBase | Mapping[object, Any] | Tensor | float


def find_kl(losses_or_kl: AnyKL, key: NestedKey) -> Any:
    """Return the KL at ``key`` of losses or of PPOUpdate's statistics, or the KL itself."""
    if isinstance(losses_or_kl, TensorDictBase):
        return get_tensor(losses_or_kl, key, fix=_FIX)
    if not isinstance(losses_or_kl, Mapping):
        return losses_or_kl
    kl = losses_or_kl.get("/".join(key_parts(key)))
    if kl is None:
        raise KeyError(f"There is no KL at {key!r} among {[*losses_or_kl]}. {_FIX}")
    return kl


def mean_over_ranks(
    kl: Tensor | float, weight: Tensor | float | None, group: ProcessGroup | None
) -> float:
    """Return the mean of the KLs of all active ranks, weighted by ``weight``, in one transfer."""
    kl_sum, frame_sum, _ = sums_over_ranks(kl, weight, group).tolist()
    if not frame_sum > 0:  # after the all-reduce, so that all ranks raise
        raise _bad_weight(torch.as_tensor(kl), weight)
    return kl_sum / frame_sum


def sums_over_ranks(
    kl: Tensor | float, weight: Tensor | float | None, group: ProcessGroup | None
) -> Tensor:
    """Return the sums over ranks of KL times weight, of weights and of active ranks, ``[3]``."""
    values = torch.as_tensor(kl, dtype=torch.float64).detach()
    if isinstance(weight, int | float):  # torch.as_tensor would wait for the device
        frames = values.new_full((), weight)
    else:
        frames = torch.ones_like(values) if weight is None else torch.as_tensor(weight).to(values)
    if frames.shape != values.shape or (
        _checks.reads_are_free(frames.device) and not (frames >= 0).all()
    ):
        raise _bad_weight(values, weight)
    # The KL of no frames is often NaN.
    weighted = (values * frames).masked_fill(frames == 0, 0.0).sum()
    return _all_reduce(torch.stack([weighted, frames.sum(), torch.ones_like(weighted)]), group)


def answer_until_all_are_done(group: ProcessGroup | None) -> None:
    """Take part in the all-reduces of ranks whose batch is not over yet, until there is none."""
    active = 0.0 if resolve_group(group) is None else 1.0
    while active:
        *_, active = _all_reduce(torch.zeros(3, dtype=torch.float64), group).tolist()


def warn_not_finite(kl: float, consequence: str) -> None:
    """Warn that the mean KL is not finite."""
    warnings.warn(
        f"The KL divergence is {kl}: {consequence}. A log-probability is not finite; look for "
        "actions at the edge of a bounded distribution, or a learning rate that is too high.",
        RuntimeWarning,
        stacklevel=3,
    )


def _all_reduce(sums: Tensor, group: ProcessGroup | None) -> Tensor:
    ranks = resolve_group(group)
    return sums if ranks is None else sum_over_ranks(sums.to(meeting_device(ranks)), ranks)


def _bad_weight(values: Tensor, weight: Tensor | float | None) -> ValueError:
    return ValueError(
        "weight must be the number of valid frames behind each KL: "
        f"shape {list(values.shape)}, none below 0, and not 0 everywhere. Here it is {weight}."
    )
