"""The moments of the returns seen so far, and the scale that rewards are divided by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrl.envs import Transform

from ppokit._state import apply_without_cast
from ppokit.rewards.measurement import Moments, merged

if TYPE_CHECKING:
    from typing_extensions import Self


class ReturnStatistics(Transform):
    """A transform that holds the moments of the returns, in a buffer in float64.

    The moments are ``[4]``, or ``[S, 4]`` for S statistics. Every change assigns a new tensor, so
    that clones and saved states never change with it.
    """

    moments: Tensor  #: count, mean, sum of squared deviations; and the scale
    frozen: Tensor

    def __init__(
        self, statistics: str, clip: float | None, epsilon: float, *, count: int = 1
    ) -> None:
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
        self.register_buffer("moments", _as_buffer([_NONE] * count))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))

    @property
    def count(self) -> Tensor:
        """How many returns the statistics are of, one number for each statistic."""
        return self.moments[..., 0]

    @property
    def mean(self) -> Tensor:
        """Their mean."""
        return self.moments[..., 1]

    @property
    def m2(self) -> Tensor:
        """The sum of their squared deviations from the mean."""
        return self.moments[..., 2]

    @property
    def scale(self) -> Tensor:
        """The number that the last reward was divided by."""
        return self.moments[..., 3]

    def freeze(self) -> Self:
        """Stop the statistics; rewards are still scaled, by the statistics as they are."""
        self.frozen = torch.ones_like(self.frozen)
        return self

    def unfreeze(self) -> Self:
        """Let the statistics move again."""
        self.frozen = torch.zeros_like(self.frozen)
        return self

    def _check_count(self, count: int) -> None:
        """Raise where the statistics are not of so many rewards."""
        if self.moments.numel() != 4 * count and self.count.any():
            raise ValueError(
                f"There are {count} rewards with statistics of their own, counted by keys and by "
                f"their last dimension, but the statistics are of {self.moments.numel() // 4}. Use "
                "a RewardNormalizer for each kind of environment."
            )

    def _move_statistics(self, added: Sequence[Moments]) -> None:
        """Add moments, one for each statistic; their number is known from the first batch on."""
        moments, frozen = self.moments, bool(self.frozen)
        rows: list[Sequence[float]] = moments.reshape(-1, 4).tolist()
        if len(rows) != len(added):
            rows = [_NONE] * len(added)
        elif frozen:
            return
        if not frozen:
            rows = [self._moved(row, more) for row, more in zip(rows, added, strict=True)]
        # nn.Module's own assignment takes longer than a small batch's scan.
        self._buffers["moments"] = _as_buffer(rows, moments.device)

    def _moved(self, row: Sequence[float], moments: Moments) -> tuple[float, float, float, float]:
        running = self.statistics == "running"
        if running:
            moments = merged((row[0], row[1], row[2]), moments)
        count, mean, m2 = moments
        # Returns without spread give no scale: 1e-12 of the mean is rounding.
        if not count or math.sqrt(m2 / count) <= 1e-12 * abs(mean):
            return count, mean, m2, 1.0
        if running:
            return count, mean, m2, math.sqrt(m2 / count + self.epsilon)
        return count, mean, m2, math.sqrt(m2 / (count - 1)) + self.epsilon

    def _scaled(self, reward: Tensor, first: int) -> Tensor:
        """Return the reward ``[..., K]`` over the K scales that begin with the ``first``."""
        scales = self.scale.reshape(-1)[first : first + reward.shape[-1]]
        each = zip(reward.split(1, -1), scales, strict=True)
        parts = [_divided(part, scale, self.clip) for part, scale in each]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The number of open trajectories differs between checkpoints; and a copy into the old
        # tensors would change the clones and state dicts that share them.
        before = dict(self.named_buffers(recurse=False))
        for name, buffer in before.items():
            if (saved := state_dict.get(prefix + name)) is not None:
                setattr(self, name, buffer.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, buffer in before.items():  # float64, also with assign=True
            setattr(self, name, getattr(self, name).to(buffer.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        return apply_without_cast(self, super()._apply, fn, recurse)


_NONE = (0.0, 0.0, 0.0, 1.0)  # the statistics of nothing


def check_buffers(state: Mapping[str, Any]) -> None:
    """Raise a ValueError where a saved buffer has a shape that no normalizer has."""
    for name, saved in state.items():
        fits, expected = {
            "moments": (saved.shape[-1:] == (4,) and saved.ndim <= 2, "[4], or [S, 4]"),
            "frozen": (saved.ndim == 0 and saved.dtype is torch.bool, "[], of bool"),
            "open_ids": (saved.ndim == 1, "[N]"),
            "open_returns": (saved.ndim == 2 or saved.shape == (0,), "[N, F]"),
        }.get(name, (True, ""))
        if not fits:
            raise ValueError(
                f"{name!r} has shape {list(saved.shape)} and dtype {saved.dtype} in the state; a "
                f"RewardNormalizer has {expected}."
            )


def _as_buffer(rows: Sequence[Sequence[float]], device: torch.device | None = None) -> Tensor:
    numbers = rows[0] if len(rows) == 1 else rows
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _divided(x: Tensor, divisor: Tensor, bound: float | None) -> Tensor:
    """Return ``x / divisor``, between ``-bound`` and ``bound``."""
    y = x / divisor.to(x.device)
    return y if bound is None else y.clamp_(-bound, bound)
