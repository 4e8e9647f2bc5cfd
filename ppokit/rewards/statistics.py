"""The spread of the returns seen so far, and what a reward is divided by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrl.envs import Transform

from ppokit.functional.scaling import scaled
from ppokit.rewards.returns import Moments

if TYPE_CHECKING:
    from typing_extensions import Self


class ReturnStatistics(Transform):
    """A transform that holds the moments of the returns, in a buffer in float64.

    Every change assigns a new tensor, so that clones and saved states never change with it.
    """

    moments: Tensor  #: count, mean, sum of squared deviations; and the scale
    frozen: Tensor

    def __init__(self, statistics: str, clip: float | None, epsilon: float) -> None:
        if statistics not in ("running", "batch"):
            raise ValueError(f"statistics must be 'running' or 'batch', got {statistics!r}.")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive or None, got {clip}.")
        if not epsilon >= 0:
            raise ValueError(f"epsilon must be 0 or more, got {epsilon}.")
        super().__init__()
        self.statistics = statistics
        self.clip = clip
        self.epsilon = epsilon
        self.register_buffer("moments", torch.tensor((0.0, 0.0, 0.0, 1.0), dtype=torch.float64))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))

    @property
    def count(self) -> Tensor:
        """How many returns the statistics are of."""
        return self.moments[0]

    @property
    def mean(self) -> Tensor:
        """Their mean."""
        return self.moments[1]

    @property
    def m2(self) -> Tensor:
        """The sum of their squared deviations from the mean."""
        return self.moments[2]

    @property
    def scale(self) -> Tensor:
        """What the last reward was divided by."""
        return self.moments[3]

    def freeze(self) -> Self:
        """Stop the statistics; rewards are still scaled, by the statistics as they are."""
        self.frozen = torch.ones_like(self.frozen)
        return self

    def unfreeze(self) -> Self:
        """Let the statistics move again."""
        self.frozen = torch.zeros_like(self.frozen)
        return self

    def _move_statistics(self, moments: Moments) -> None:
        if self.frozen:
            return
        if self.statistics == "running":
            count, mean, m2, _ = self.moments.tolist()
            moments = _merged((count, mean, m2), moments)
        count, mean, m2 = moments
        scale = 1.0
        # Returns without spread say nothing about a scale: 1e-12 is rounding beside the mean.
        if count and math.sqrt(m2 / count) > 1e-12 * abs(mean):
            if self.statistics == "running":
                scale = math.sqrt(m2 / count + self.epsilon)
            else:
                scale = math.sqrt(m2 / (count - 1)) + self.epsilon
        before, numbers = self.moments, (count, mean, m2, scale)
        # Past nn.Module's assignment, which takes longer than a small batch's scan.
        self._buffers["moments"] = torch.tensor(numbers, dtype=before.dtype, device=before.device)

    def _scaled(self, reward: Tensor) -> Tensor:
        return scaled(reward, self.scale, self.clip)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # How many trajectories are open differs from checkpoint to checkpoint; and a copy into the
        # old tensors would reach the clones and the state dicts that share them.
        for name, buffer in self.named_buffers(recurse=False):
            if prefix + name in state_dict:
                setattr(self, name, buffer.new_empty(state_dict[prefix + name].shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Moves to a device are welcome; a cast of the module must not round the statistics.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self


def _merged(a: Moments, b: Moments) -> Moments:
    """What :func:`ppokit.functional.merge_moments` does, on numbers."""
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = a, b
    count, delta = count_a + count_b, mean_b - mean_a
    share_b = count_b / max(count, 1)
    return count, mean_a + delta * share_b, m2_a + m2_b + delta**2 * count_a * share_b
