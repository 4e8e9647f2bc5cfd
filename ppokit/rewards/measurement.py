"""Computes a batch's return moments, on one rank or several, without changing any state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import check_trajectories, get_if_any, per_frame, time_dim, valid_mask
from ppokit.distributed import gather_over_ranks, raise_for_ranks
from ppokit.functional import return_moments
from ppokit.rewards.keys import RewardKeys
from ppokit.rewards.return_statistics import merged
from ppokit.rewards.returns import (
    CLOSED,
    Moments,
    OpenReturns,
    as_numbers,
    at_step,
    countable,
    initial_returns,
    masked_return_moments,
    objectives,
    open_after,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Measurement(NamedTuple):
    """The rewards of each key, the moments of each objective, and the returns that go on."""

    rewards: list[Tensor]
    moments: list[Moments]
    open_returns: OpenReturns | None


def measure(
    batch: TensorDictBase,
    keys: Sequence[RewardKeys],
    open_returns: OpenReturns,
    *,
    gamma: float,
    mask_key: NestedKey,
    traj_key: NestedKey | None,
    nonfinite: str,
) -> Measurement:
    """Return rewards and return moments of a batch ``[*B, T]``, which continues open returns."""
    ndim, dim = batch.ndim, time_dim(batch, who="RewardNormalizer")
    rewards, dones = map(list, zip(*(one.read(batch) for one in keys), strict=True))
    mask = valid_mask(batch, mask_key)
    streams = objectives(rewards, batch_ndim=ndim, dim=dim)
    ended = objectives(dones, batch_ndim=ndim, dim=dim)
    ids = None if traj_key is None else get_if_any(batch, traj_key)
    frames = None if mask is None else mask.movedim(dim, -1)
    if frames is not None:
        ended = [end & frames.unsqueeze(-1) for end in ended]
    initial: Sequence[Tensor | None] = [None] * len(streams)
    others = None
    if ids is not None and traj_key is not None:
        done = reduce(torch.logical_or, (per_frame(done, ndim) for done in dones))
        check_trajectories(batch, done, dim, mask=mask, key=traj_key)
        ids = ids.movedim(dim, -1).long()
        first = ids.select(-1, 0)
        if frames is not None:
            first = torch.where(frames.select(-1, 0), first, CLOSED)
        widths = [stream.shape[-1] for stream in streams]
        carried, others = initial_returns(open_returns, first, sum(widths), key=traj_key)
        initial = carried.split(widths, -1)
    last = _last_steps(frames, streams[0])
    scans: list[tuple[Tensor, Tensor]] = []
    if mask is None:
        scans = [
            return_moments(reward, end, gamma=gamma, initial=start)
            for reward, end, start in zip(streams, ended, initial, strict=True)
        ]
    if mask is not None or not all(moments.isfinite().all() for moments, _ in scans):
        each = zip(keys, rewards, strict=True)
        counted = [countable(reward, mask, one.reward, nonfinite) for one, reward in each]
        counted = objectives(counted, batch_ndim=ndim, dim=dim)
        scans = [
            masked_return_moments(*four, gamma=gamma, last=last)
            for four in zip(streams, ended, initial, counted, strict=True)
        ]
    after = None
    if ids is not None and others is not None:
        # A trajectory goes on if it does for any agent or objective.
        goes_on = ~torch.cat([at_step(end, last) for end in ended], -1).all(-1)
        if frames is not None:
            goes_on &= frames.any(-1)
        last_ids = torch.where(goes_on, ids.take_along_dim(last, -1).squeeze(-1), CLOSED)
        after = open_after(last_ids, torch.cat([carry for _, carry in scans], -1), others)
    return Measurement(rewards, [as_numbers(moments) for moments, _ in scans], after)


def _last_steps(frames: Tensor | None, stream: Tensor) -> Tensor:
    """Return the last valid step of each row ``[*B, 1]`` of a stream ``[*B, T, F]``."""
    *rows, steps, _ = stream.shape
    if frames is None:
        return torch.full((*rows, 1), steps - 1, device=stream.device)
    return torch.where(frames, torch.arange(steps, device=stream.device), 0).amax(-1, keepdim=True)


def measure_together(
    measure: Callable[[], Measurement], so_far: Tensor, ranks: ProcessGroup
) -> Measurement:
    """Return what ``measure`` does, with the moments of the batches of all ranks.

    In a first all-reduce each rank tells whether its batch is accepted, and its statistics so far:
    where one raises, all do, and none waits for another. The second exchanges the moments of this
    batch, never totals, so that no return is counted twice. ``so_far``, the statistics before, must
    be the same on all ranks.
    """
    try:
        measurement, error = measure(), None
    except Exception as raised:
        measurement, error = None, raised
    state = so_far.detach().double().cpu().reshape(-1, 4).sum(0).tolist()
    count = 0 if measurement is None else len(measurement.moments)
    table = gather_over_ranks([count, *state[:3]], ranks)
    raise_for_ranks(error, table[:, 0] == 0)
    assert measurement is not None
    counts = [int(count) for count in table[:, 0]]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The ranks' batches have {counts} rewards with statistics of their own; on all ranks "
            "they must be of the same environments."
        )
    if not torch.equal(table, table[:1].expand_as(table)):
        raise RuntimeError(
            "The ranks' statistics differ before this batch (count, mean and m2 are "
            f"{table[:, 1:].tolist()}): each would scale by its own. Load one state on all ranks, "
            "and call the normalizer on all of them or, to evaluate on one, a frozen clone()."
        )
    # Merged in the order of the ranks: the same to the last bit on each of them.
    each = gather_over_ranks(measurement.moments, ranks).transpose(0, 1).tolist()
    return measurement._replace(moments=[reduce(merged, of_ranks) for of_ranks in each])
