"""Normalising the advantage over the valid frames of a minibatch, on one rank or on all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppokit.distributed import resolve_group, sum_over_ranks
from ppokit.functional import masked_mean, masked_std
from ppokit.objectives.padding import PaddedLoss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NormalizedAdvantage(PaddedLoss):
    """``ClipPPOLoss`` whose advantage is normalised over valid frames, and over all ranks."""

    group: ProcessGroup | None

    def _maybe_normalize_advantage(
        self, advantage: Tensor, tensordict: TensorDictBase, *, update_norm: bool
    ) -> Tensor:
        if self._meets_ranks():
            # Also of a single frame: the other ranks wait for its part.
            return self._standardize_advantage(advantage, tensordict)
        return super()._maybe_normalize_advantage(advantage, tensordict, update_norm=update_norm)

    def _meets_ranks(self) -> bool:
        """Return whether the ranks wait for each other once in each forward."""
        return self.normalize_advantage and resolve_group(self.group) is not None

    def _standardize_advantage(self, advantage: Tensor, tensordict: TensorDictBase) -> Tensor:
        mask = self._mask(tensordict, advantage)
        group = resolve_group(self.group)
        if mask is None and group is None:
            return super()._standardize_advantage(advantage, tensordict)
        excluded = {dim % advantage.ndim for dim in self.normalize_advantage_exclude_dims}
        dims = tuple(dim for dim in range(advantage.ndim) if dim not in excluded)
        if group is None:
            mean = masked_mean(advantage, mask, dims, keepdim=True)
            std = masked_std(advantage, mask, dims, keepdim=True)
        else:
            mean, std = _over_ranks(advantage, mask, dims, group)
        # torchrl's floor, so that padding a batch changes nothing
        return (advantage - mean) / std.clamp_min(torch.finfo(torch.float).resolution)


def _over_ranks(
    advantage: Tensor, mask: Tensor | None, dims: tuple[int, ...], group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of the valid frames of all ranks.

    In two rounds, first the mean and then the deviations from it, so that a mean that is large
    beside the spread does not cancel it.
    """
    frames = advantage.double()
    valid = torch.ones_like(frames) if mask is None else mask.double()
    frames = frames if mask is None else torch.where(mask, frames, 0)
    total, count = sum_over_ranks(
        torch.stack([frames.sum(dims, keepdim=True), valid.sum(dims, keepdim=True)]), group
    )
    mean = total / count
    squares = sum_over_ranks((valid * (frames - mean).square()).sum(dims, keepdim=True), group)
    # One frame has no spread; it stays what it is, as torchrl leaves it.
    alone = count <= 1
    std = torch.where(alone, 1, (squares / (count - 1)).sqrt())
    return torch.where(alone, 0, mean).to(advantage.dtype), std.to(advantage.dtype)
