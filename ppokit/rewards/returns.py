"""Returns of a batch: their moments, and the R with which each row ends."""

from __future__ import annotations

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit.functional import discounted_returns, masked_mean, return_moments

Moments = tuple[float, float, float]  # count, mean, sum of squared deviations
Ends = tuple[Tensor, Tensor]  # of each row: the trajectory that goes on after it, and its R
CLOSED = -1  # the id where no trajectory goes on


def as_stream(x: Tensor, *, batch_ndim: int, dim: int) -> Tensor:
    """Return ``[*B, T, F]``: time second to last, what follows the batch in one dimension."""
    x = x if x.ndim == batch_ndim + 1 else x.flatten(batch_ndim)
    return x if dim == batch_ndim - 1 else x.movedim(dim, -2)


def countable(reward: Tensor, mask: Tensor | None, key: NestedKey, nonfinite: str) -> Tensor:
    """Return which rewards count: those that are valid, and finite.

    Raises:
        ValueError: a valid reward is not finite, and ``nonfinite`` is ``"raise"``.
    """
    valid = torch.ones_like(reward, dtype=torch.bool)
    if mask is not None:
        valid &= mask.reshape(mask.shape + (1,) * (reward.ndim - mask.ndim))
    bad = valid & ~reward.isfinite()
    if nonfinite == "raise" and bad.any():
        raise ValueError(
            f"{int(bad.sum())} of {int(valid.sum())} rewards at {key!r} are not finite, the "
            f"first at {bad.nonzero()[0].tolist()}: one would poison the statistics for ever. "
            "Mend the environment, or pass nonfinite='ignore' to leave them out."
        )
    return valid & ~bad


def masked_moments(returns: Tensor, counted: Tensor) -> Moments:
    """Return the moments of the returns where ``counted`` is True."""
    count = counted.sum().double()
    mean = torch.where(count > 0, masked_mean(returns, counted), 0)
    deviation = torch.where(counted, returns - mean, 0)
    return _numbers(torch.stack((count, mean, deviation.square().sum())))


def scan_all(
    reward: Tensor, done: Tensor, ids: Tensor | None, initial: Tensor | None, gamma: float
) -> tuple[Moments, Ends | None]:
    """Return moments and ends of rows without padding: one pass over rewards ``[*B, T, F]``.

    ``ids`` are ``[*B, T]``, and ``initial`` is R before the first step, ``[*B, F]``. The moments
    are not finite if a reward is not.
    """
    tensors, carry = return_moments(reward, done, gamma=gamma, initial=initial)
    moments = _numbers(tensors)
    if ids is None:
        return moments, None
    closed = done.select(-2, -1)
    closed = closed.squeeze(-1) if closed.shape[-1] == 1 else closed.all(-1)
    return moments, (ids.select(-1, -1).masked_fill(closed, CLOSED), carry)


def scan_valid(
    reward: Tensor,
    done: Tensor,
    ids: Tensor | None,
    initial: Tensor | None,
    gamma: float,
    *,
    frames: Tensor,
    counted: Tensor,
) -> tuple[Moments, Ends | None]:
    """Return moments and ends of rows with padding, or with rewards that do not count.

    As :func:`scan_all`; ``frames`` tells which frames are valid, and ``counted`` which rewards.
    """
    clean = torch.where(counted, reward, 0).double()
    returns, _ = discounted_returns(clean, done, gamma=gamma, initial=initial)
    moments = masked_moments(returns, counted)
    if ids is None:
        return moments, None
    frames = frames.expand_as(done)
    steps = torch.arange(ids.shape[-1], device=ids.device).unsqueeze(-1)
    last = torch.where(frames, steps, 0).amax(-2, keepdim=True)
    carry = torch.where(done, 0, returns).gather(-2, last).squeeze(-2)
    last_ids = ids.gather(-1, last[..., 0, 0].unsqueeze(-1)).squeeze(-1)
    goes_on = (frames & ~done).gather(-2, last).squeeze(-2).any(-1)
    return moments, (torch.where(goes_on, last_ids, CLOSED), carry)


def joined(ends: list[Ends]) -> Ends:
    """Return the ends of the rows of several scans: a trajectory goes on if it does in any."""
    if len(ends) == 1:
        return ends[0]
    ids = torch.stack([last_ids for last_ids, _ in ends]).amax(0)  # CLOSED is below all ids
    return ids, torch.cat([carry for _, carry in ends], -1)


def _numbers(moments: Tensor) -> Moments:
    # The few operations that follow take longer on 0-dim tensors than the scan.
    count, mean, m2 = moments.tolist()
    return count, mean, m2
