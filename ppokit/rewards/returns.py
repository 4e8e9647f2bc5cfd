"""Discounted returns of a batch: their moments, and trajectories that go on in the next batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit.functional import masked_mean, reversed_discounted_returns

Moments = tuple[float, float, float]  # count, mean, sum of squared deviations
OpenReturns = tuple[Tensor, Tensor]  # ids of trajectories [N], CLOSED for none, and their R [N, F]
CLOSED = -1  # the id where no trajectory goes on
MAX_OTHERS = 1 << 16  # open trajectories that are not in the batch; the oldest are dropped


def objectives(tensors: Iterable[Tensor], *, batch_ndim: int, dim: int) -> list[Tensor]:
    """Return each objective of tensors ``[*B, T, ..., K]`` as ``[*B, T, F]``, agents in F."""
    parts = [part for tensor in tensors for part in tensor.split(1, -1)]
    return [part.flatten(batch_ndim).movedim(dim, -2) for part in parts]


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


def masked_moments(returns: Tensor, counted: Tensor) -> Tensor:
    """Return the moments ``[3]`` of the returns where ``counted`` is True."""
    count = counted.sum().double()
    mean = torch.where(count > 0, masked_mean(returns, counted), 0)
    deviation = torch.where(counted, returns - mean, 0)
    return torch.stack((count, mean, deviation.square().sum()))


def as_numbers(moments: Tensor) -> Moments:
    """Return moments ``[3]`` as numbers: the few operations that follow are faster on these."""
    count, mean, m2 = moments.tolist()
    return count, mean, m2


def masked_return_moments(
    reward: Tensor,
    done: Tensor,
    initial: Tensor | None,
    counted: Tensor,
    *,
    gamma: float,
    last: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what ``return_moments`` does, of the rewards that count alone.

    ``last`` is the last valid step of each row ``[*B, 1]``.
    """
    clean = torch.where(counted, reward, 0).double()
    returns, _ = reversed_discounted_returns(clean, done, gamma=gamma, initial=initial)
    return masked_moments(returns, counted), at_step(torch.where(done, 0, returns), last)


def at_step(x: Tensor, step: Tensor) -> Tensor:
    """Return one step of each row of ``[*B, T, F]``, ``step`` being ``[*B, 1]``."""
    return x.take_along_dim(step.unsqueeze(-1), -2).squeeze(-2)


def initial_returns(
    open_returns: OpenReturns, first_ids: Tensor, features: int, *, key: NestedKey
) -> tuple[Tensor, OpenReturns]:
    """Return R with which each row starts, 0 for a new trajectory, and the other open returns.

    ``first_ids`` are those of each row's first step ``[*B]``, CLOSED for rows of padding alone.

    Raises:
        ValueError: two rows start with the same trajectory, or F has changed.
    """
    known, returns = (x.to(first_ids.device) for x in open_returns)
    if known.numel() and returns.shape[-1] != features:
        raise ValueError(
            f"The batch has {features} rewards a frame, but the trajectories that were left open "
            f"have {returns.shape[-1]}: these are other environments. Use a normalizer for each, "
            "or call reset_returns() in between."
        )
    first = first_ids.flatten()
    if first.shape == known.shape and known.numel():  # rows in the order of the batch before
        goes_on = first == known
        begun, ended = first[~goes_on], known[~goes_on] == CLOSED
        # Trajectories that begin have higher ids, each its own.
        are_new = begun.gt(known.max()).all() and len(begun.unique()) == len(begun)
        if are_new and ended.all():
            initial = torch.where(goes_on.unsqueeze(-1), returns, 0)
            return initial.view(*first_ids.shape, features), (known[:0], returns[:0])
    distinct, numbers = torch.cat([first, known]).unique(return_inverse=True)
    of_first, of_known = numbers.split([len(first), len(known)])
    starting = of_first.bincount(minlength=len(distinct))  # how many rows start with each id
    if starting[distinct != CLOSED].gt(1).any():
        raise ValueError(
            f"{key!r} has rows that start with the same trajectory, so the rows' order in time is "
            "unknown. Normalise before the batch is cut into sequences; for collectors whose "
            "workers repeat ids (RayCollector), pass traj_key=None."
        )
    # Of an id that is there twice, as where a collector started anew, the rows' own comes first.
    positions = torch.arange(len(known), device=known.device)
    place = torch.full_like(distinct, len(known)).scatter_reduce(0, of_known, positions, "amin")
    returns = torch.cat([returns.view(-1, features), returns.new_zeros(1, features)])
    initial = returns[place[of_first]].view(*first_ids.shape, features)
    others = (starting[of_known] == 0) & (known != CLOSED)
    return initial, (known[others], returns[:-1][others])


def open_after(last_ids: Tensor, carry: Tensor, others: OpenReturns) -> OpenReturns:
    """Return the open returns after a batch: those of its rows in order, then others."""
    other_ids, other_returns = others
    # Collectors that reset at each iteration leave trajectories behind that never come back.
    if other_ids.numel() > MAX_OTHERS:
        latest = other_ids.argsort()[-MAX_OTHERS:]
        other_ids, other_returns = other_ids[latest], other_returns[latest]
    returns = carry.reshape(-1, carry.shape[-1])
    return torch.cat([last_ids.flatten(), other_ids]), torch.cat([returns, other_returns])
