"""Computes a batch's return moments, on one rank or several, without changing any state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import per_frame, time_dim, valid_mask
from ppokit.distributed import gather_over_ranks
from ppokit.rewards.keys import RewardKeys
from ppokit.rewards.return_statistics import merged
from ppokit.rewards.returns import (
    Ends,
    Moments,
    as_stream,
    countable,
    joined,
    scan_all,
    scan_valid,
)
from ppokit.rewards.trajectories import OpenReturns, initial_returns, open_after, trajectory_ids

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Measurement(NamedTuple):
    """The rewards of each key, the moments of each objective, and the returns that go on."""

    rewards: list[Tensor]
    moments: list[Moments]
    open_returns: OpenReturns | None


class Stream(NamedTuple):
    """One objective of one reward, ``[*B, T, F]``: F rewards a frame that share statistics."""

    reward: Tensor
    ended: Tensor
    counted: Callable[[], Tensor]  # which rewards count, where not all do


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
    """Return rewards and return moments of a batch ``[*B, T]``, which continues open returns.

    Raises:
        KeyError: a key is missing.
        TypeError: a dtype is wrong.
        ValueError: a shape is wrong, rewards are not finite, or the order in time is not known.
    """
    dim = time_dim(batch, who="RewardNormalizer")
    signals = [one.read(batch) for one in keys]
    mask = valid_mask(batch, mask_key)
    ndim = batch.ndim

    def ended() -> Tensor:
        return reduce(torch.logical_or, (per_frame(done, ndim) for _, done in signals))

    ids = trajectory_ids(batch, traj_key, ended, dim, mask)
    streams: list[Stream] = []
    for one, (reward, done) in zip(keys, signals, strict=True):
        streams += _streams(reward, done, mask, ndim, dim, one.reward, nonfinite)
    initial: Sequence[Tensor | None] = [None] * len(streams)
    others = None
    if ids is not None and traj_key is not None:
        widths = [stream.reward.shape[-1] for stream in streams]
        first_valid = None if mask is None else mask.select(dim, 0)
        carried, others = initial_returns(
            open_returns, ids.select(-1, 0), first_valid, sum(widths), key=traj_key
        )
        initial = carried.split(widths, -1) if len(widths) > 1 else [carried]
    frames = None if mask is None else mask.movedim(dim, -1).unsqueeze(-1)
    scans = [
        _scan(stream, ids, start, gamma, frames)
        for stream, start in zip(streams, initial, strict=True)
    ]
    ends = [end for _, end in scans if end is not None]
    return Measurement(
        [reward for reward, _ in signals],
        [moments for moments, _ in scans],
        open_after(joined(ends), others) if others is not None else None,
    )


def _streams(
    reward: Tensor,
    done: Tensor,
    mask: Tensor | None,
    batch_ndim: int,
    dim: int,
    key: NestedKey,
    nonfinite: str,
) -> list[Stream]:
    """Return the objectives of a reward ``[*B, T, ..., K]``; agents, before the last, share one."""

    def counted() -> Tensor:
        valid = countable(reward, mask, key, nonfinite)
        return as_stream(valid, batch_ndim=batch_ndim, dim=dim)

    rewards = as_stream(reward, batch_ndim=batch_ndim, dim=dim)
    ended = as_stream(done, batch_ndim=batch_ndim, dim=dim)
    if (count := reward.shape[-1]) == 1:
        return [Stream(rewards, ended, counted)]
    each = [slice(k, None, count) for k in range(count)]
    return [Stream(rewards[..., k], ended[..., k], lambda k=k: counted()[..., k]) for k in each]


def _scan(
    stream: Stream, ids: Tensor | None, initial: Tensor | None, gamma: float, frames: Tensor | None
) -> tuple[Moments, Ends | None]:
    reward, ended, counted = stream
    if frames is None:
        moments, ends = scan_all(reward, ended, ids, initial, gamma)
        if all(map(math.isfinite, moments)):
            return moments, ends
        frames = torch.ones_like(ended)
    return scan_valid(reward, ended, ids, initial, gamma, frames=frames, counted=counted())


def measure_together(
    measure: Callable[[], Measurement], so_far: Tensor, ranks: ProcessGroup
) -> Measurement:
    """Return what ``measure`` does, with the moments of the batches of all ranks.

    In a first all-reduce each rank tells whether its batch is accepted, and its statistics so far:
    where one raises, all do, and none waits for another. The second exchanges the moments of this
    batch, never totals, so that no return is counted twice. ``so_far``, the statistics before, must
    be the same on all ranks.

    Raises:
        Exception: what ``measure`` raises.
        RuntimeError: another rank has raised, or the ranks do not go on from one state.
        ValueError: the batches of the ranks have different numbers of rewards.
    """
    try:
        measurement, error = measure(), None
    except Exception as raised:
        measurement, error = None, raised
    state = so_far.detach().double().cpu().reshape(-1, 4).sum(0).tolist()
    count = 0 if measurement is None else len(measurement.moments)
    table = gather_over_ranks([count, *state[:3]], ranks)
    if error is not None:
        raise error
    assert measurement is not None
    counts = [int(count) for count in table[:, 0]]
    if not all(counts):
        refused = [rank for rank, fit in enumerate(counts) if not fit]
        raise RuntimeError(
            f"Rank {', '.join(map(str, refused))} has refused its batch (its own error says why): "
            "no rank has normalised this one, and no statistics have moved."
        )
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
