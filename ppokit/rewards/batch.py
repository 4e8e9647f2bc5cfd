"""What a collected batch adds to the statistics, found before anything is moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import per_frame, time_dim, valid_mask
from ppokit.rewards.keys import RewardKeys
from ppokit.rewards.returns import (
    Ends,
    Moments,
    as_stream,
    countable,
    joined,
    scan_all,
    scan_valid,
)
from ppokit.rewards.trajectories import Open, carry_in, carry_out, trajectory_ids


class Measured(NamedTuple):
    """What was found: the rewards of each key, the moments of each objective, what is left open."""

    rewards: list[Tensor]
    moments: list[Moments]
    open: Open | None


class Stream(NamedTuple):
    """One objective of one reward, ``[*B, T, F]``: F rewards a frame that share statistics."""

    reward: Tensor
    ended: Tensor
    counted: Callable[[], Tensor]  # which rewards count; asked where not all do


def measure(
    batch: TensorDictBase,
    keys: Sequence[RewardKeys],
    held: Open,
    *,
    gamma: float,
    mask_key: NestedKey,
    traj_key: NestedKey | None,
    nonfinite: str,
) -> Measured:
    """Return what a batch ``[*B, T]`` adds to what the batches before left open.

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
    elsewhere = None
    if ids is not None and traj_key is not None:
        widths = [stream.reward.shape[-1] for stream in streams]
        first_valid = None if mask is None else mask.select(dim, 0)
        carried, elsewhere = carry_in(
            held, ids.select(-1, 0), first_valid, sum(widths), key=traj_key
        )
        initial = carried.split(widths, -1) if len(widths) > 1 else [carried]
    frames = None if mask is None else mask.movedim(dim, -1).unsqueeze(-1)
    scans = [
        _scan(stream, ids, start, gamma, frames)
        for stream, start in zip(streams, initial, strict=True)
    ]
    ends = [end for _, end in scans if end is not None]
    return Measured(
        [reward for reward, _ in signals],
        [moments for moments, _ in scans],
        carry_out(joined(ends), elsewhere) if elsewhere is not None else None,
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
