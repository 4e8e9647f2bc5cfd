"""Which sequences share a minibatch, and in which order the minibatches come."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def draw(
    frames: Tensor,
    lengths: Tensor,
    n: int,
    *,
    buckets: int,
    shuffle: bool,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Return which sequences are in each of ``n`` minibatches, each sequence once.

    The shuffled sequences are dealt into pools that fill ``buckets`` minibatches each. Each pool is
    sorted by length, and cut into minibatches of nearly equal numbers of valid frames. Those come
    in random order.

    Args:
        frames: valid frames of each sequence ``[N]``, int64, on the CPU.
        lengths: by which they are sorted ``[N]``, int64, on the CPU.
        n: minibatches, from 1 to N.
        buckets: minibatches of a pool; 1 does not sort.
        shuffle: False leaves the sequences in their order, and does not sort either.
        generator: of the random numbers.

    Raises:
        ValueError: n or buckets is out of range.
    """
    total = len(frames)
    if not 1 <= n <= total:
        raise ValueError(f"n must lie between 1 and the {total} sequences there are, got {n}.")
    if type(buckets) is not int or buckets < 1:
        raise ValueError(f"buckets must be a whole number of minibatches, got {buckets!r}.")
    if not shuffle:
        return list(torch.arange(total).split(_sizes(frames, n)))
    order = torch.randperm(total, generator=generator)
    pools = -(-n // buckets)
    if buckets > 1:
        rank = lengths[order]
        if pools > 1:
            pool = torch.arange(total) * pools // total
            # Up in one pool and down in the next: a minibatch that has sequences of both has long
            # ones of both, or short ones.
            rank = torch.where(pool % 2 == 0, rank, -rank) + pool * (2 * int(lengths.max()) + 1)
        order = order[rank.argsort(stable=True)]
    parts = order.split(_sizes(frames[order], n))
    if buckets == 1:
        return list(parts)
    return [parts[i] for i in torch.randperm(n, generator=generator).tolist()]


def largest(numbers: Tensor, parts: list[Tensor]) -> list[int]:
    """Return the largest of the numbers at the indices of each part."""
    listed = iter(numbers[torch.cat(parts)].tolist())
    return [max(itertools.islice(listed, len(part))) for part in parts]


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
