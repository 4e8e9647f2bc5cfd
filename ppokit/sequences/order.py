"""Which sequences share a minibatch, and in which order the minibatches come."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ppokit import kernels
from ppokit.sequences.cutting import last_true


class Dealt(NamedTuple):
    """Minibatches of sequences, one after the other."""

    order: Tensor  #: the sequences ``[N]``, int64, on the CPU
    sizes: list[int]  #: how many are in each minibatch
    widths: list[int]  #: the steps of its longest one


def draw(
    counted: Tensor,
    real: Tensor,
    n: int,
    *,
    buckets: int,
    shuffle: bool,
    generator: torch.Generator | None,
) -> Dealt:
    """Return which sequences are in each of ``n`` minibatches, each sequence once.

    The shuffled sequences are dealt into pools that fill ``buckets`` minibatches each. Each pool is
    sorted by length, and cut into minibatches of nearly equal numbers of valid frames. Those come
    in random order.

    Args:
        counted: the frames that count ``[N, L]``, bool. A length is up to the last of them.
        real: those that are not padding, likewise. A width is up to the last of them.
        n: minibatches, from 1 to N.
        buckets: minibatches of a pool; 1 does not sort.
        shuffle: False leaves the sequences in their order, and does not sort either.
        generator: of the random numbers.

    Raises:
        ValueError: n or buckets is out of range.
    """
    total = len(counted)
    if not 1 <= n <= total:
        raise ValueError(f"n must lie between 1 and the {total} sequences there are, got {n}.")
    if type(buckets) is not int or buckets < 1:
        raise ValueError(f"buckets must be a whole number of minibatches, got {buckets!r}.")
    buckets = buckets if shuffle else 1
    order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
    turns = torch.arange(n) if buckets == 1 else torch.randperm(n, generator=generator)
    native = kernels.direct_kernel()
    if native is not None:
        dealt = torch.empty_like(order)
        found = native.deal(counted, real, order, turns, dealt, buckets)
        if found is not NotImplemented:
            return Dealt(dealt, *found)
    return _deal(counted, real, order, turns, buckets)


def _deal(counted: Tensor, real: Tensor, order: Tensor, turns: Tensor, buckets: int) -> Dealt:
    total, n = len(order), len(turns)
    frames, lengths = counted.sum(1).cpu(), _lengths(counted)
    widths = lengths if real is counted else _lengths(real)
    if buckets > 1:
        rank, pools = lengths[order], -(-n // buckets)
        pool = torch.arange(total) * pools // total
        # Up in one pool and down in the next: a minibatch that has sequences of both has long ones
        # of both, or short ones.
        rank = torch.where(pool % 2 == 0, rank, -rank) + pool * (2 * counted.shape[1] + 1)
        order = order[rank.argsort(stable=True)]
    found = order.split(_sizes(frames[order], n))
    parts = [found[turn] for turn in turns.tolist()]
    sizes = [len(part) for part in parts]
    return Dealt(torch.cat(parts), sizes, [int(widths[part].max()) for part in parts])


def _lengths(mask: Tensor) -> Tensor:
    return last_true(mask).clamp(min=1).cpu()


def _sizes(frames: Tensor, n: int) -> list[int]:
    """Return how many successive sequences each minibatch gets: at least one.

    A sequence is in the minibatch in which its middle would be, were all frames in one row and cut
    into n equal parts.
    """
    total, ends = len(frames), frames.cumsum(0)
    ideal = 2 * int(ends[-1]) * torch.arange(1, n) // n
    bounds = [0]
    for nth, bound in enumerate(torch.searchsorted(2 * ends - frames, ideal).tolist(), 1):
        bounds.append(min(max(bound, bounds[-1] + 1), total - n + nth))
    bounds.append(total)
    return [end - start for start, end in itertools.pairwise(bounds)]
