"""Assigning sequences to minibatches."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ppokit.sequences.cutting import last_true


def assign_to_minibatches(
    counted: Tensor,
    real: Tensor,
    n: int,
    *,
    buckets: int,
    shuffle: bool,
    generator: torch.Generator | None,
) -> list[tuple[Tensor, int]]:
    """Return the sequences of each of ``n`` minibatches, int64, and their longest width.

    The shuffled sequences are divided into pools that fill ``buckets`` minibatches each. Each pool
    is sorted by length, and cut into minibatches of nearly equal numbers of valid frames. The
    minibatches come in random order.

    Args:
        counted: the frames in the loss ``[N, L]``, bool. A length is up to the last of them.
        real: the frames that are not padding, likewise. A width is up to the last of them.
        n: minibatches, from 1 to N.
        buckets: minibatches of a pool; 1 does not sort.
        shuffle: False leaves the sequences in their order, and does not sort either.
        generator: of the random numbers.
    """
    total = len(counted)
    if not 1 <= n <= total:
        raise ValueError(f"n must lie between 1 and the {total} sequences, got {n}.")
    if buckets < 1:
        raise ValueError(f"buckets must be a number of minibatches from 1, got {buckets}.")
    buckets = buckets if shuffle else 1
    order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
    turns = torch.arange(n) if buckets == 1 else torch.randperm(n, generator=generator)
    if buckets > 1:
        rank, pools = last_true(counted).cpu()[order], -(-n // buckets)
        pool = torch.arange(total) * pools // total
        # Ascending in one pool and descending in the next: a minibatch with sequences of both has
        # long ones of both, or short ones.
        rank = torch.where(pool % 2 == 0, rank, -rank) + pool * (2 * counted.shape[1] + 1)
        order = order[rank.argsort(stable=True)]
    in_order = order.split(_even_sizes(counted.sum(1).cpu()[order], n))
    widths = last_true(real).clamp(min=1).cpu()
    minibatches = [in_order[turn] for turn in turns.tolist()]
    return [(rows.to(counted.device), int(widths[rows].max())) for rows in minibatches]


def _even_sizes(frames: Tensor, n: int) -> list[int]:
    """Return how many successive sequences each minibatch gets: at least one.

    If all frames were in one row and the row were cut into n equal parts, each sequence is in the
    minibatch of its middle.
    """
    total, ends = len(frames), frames.cumsum(0)
    ideal = 2 * int(ends[-1]) * torch.arange(1, n) // n
    bounds = [0]
    for nth, bound in enumerate(torch.searchsorted(2 * ends - frames, ideal).tolist(), 1):
        bounds.append(min(max(bound, bounds[-1] + 1), total - n + nth))
    bounds.append(total)
    return [end - start for start, end in itertools.pairwise(bounds)]
