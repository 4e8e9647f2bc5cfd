"""Assigning sequences to minibatches, and gathering those."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ppokit.sequences.cutting import expand, last_true, map_entries


class Assignment(NamedTuple):
    """Minibatches of sequences, one after the other."""

    order: Tensor  #: the sequences ``[N]``, int64, on the CPU
    sizes: list[int]  #: sequences in each minibatch
    widths: list[int]  #: steps of its longest sequence


def assign_to_minibatches(
    counted: Tensor,
    real: Tensor,
    n: int,
    *,
    buckets: int,
    shuffle: bool,
    generator: torch.Generator | None,
) -> Assignment:
    """Assign each sequence to one of ``n`` minibatches.

    The shuffled sequences are divided into pools that fill ``buckets`` minibatches each. Each pool
    is sorted by length, and cut into minibatches of nearly equal numbers of valid frames. Those
    come in random order.

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
        raise ValueError(f"n must lie between 1 and the {total} sequences there are, got {n}.")
    if type(buckets) is not int or buckets < 1:
        raise ValueError(f"buckets must be a whole number of minibatches, got {buckets!r}.")
    buckets = buckets if shuffle else 1
    order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
    turns = torch.arange(n) if buckets == 1 else torch.randperm(n, generator=generator)
    frames, lengths = counted.sum(1).cpu(), _lengths(counted)
    widths = lengths if real is counted else _lengths(real)
    if buckets > 1:
        rank, pools = lengths[order], -(-n // buckets)
        pool = torch.arange(total) * pools // total
        # Rising in one pool and falling in the next: a minibatch with sequences of both has long
        # ones of both, or short ones.
        rank = torch.where(pool % 2 == 0, rank, -rank) + pool * (2 * counted.shape[1] + 1)
        order = order[rank.argsort(stable=True)]
    in_order = order.split(_even_sizes(frames[order], n))
    minibatches = [in_order[turn] for turn in turns.tolist()]
    sizes = [len(rows) for rows in minibatches]
    return Assignment(
        torch.cat(minibatches), sizes, [int(widths[rows].max()) for rows in minibatches]
    )


def _lengths(mask: Tensor) -> Tensor:
    return last_true(mask).clamp(min=1).cpu()


def _even_sizes(frames: Tensor, n: int) -> list[int]:
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


def gather_minibatches(sequences: TensorDictBase, assignment: Assignment) -> Iterator[TensorDict]:
    """Yield the minibatches ``[n, width]`` of an assignment."""
    order, sizes, widths = assignment
    order = order.to(order.device if sequences.device is None else sequences.device)
    for rows, width in zip(order.split(sizes), widths, strict=True):
        yield _take(sequences, rows, width)


def _take(sequences: TensorDictBase, rows: Tensor, width: int) -> TensorDict:
    """Return the first ``width`` steps of some sequences ``[n, width]``."""

    def steps(x: Tensor) -> Tensor:
        if x.stride(1) == 0:  # one value for all steps stays one value
            first = x.select(1, 0)
            if x.stride(0) == 0:  # and so does one for all sequences
                return expand(first.narrow(0, 0, len(rows)), width)
            return expand(first.index_select(0, rows), width)
        return x.narrow(1, 0, width).index_select(0, rows)

    others = lambda x: x[:, :width][rows]  # noqa: E731
    return map_entries(sequences, steps, others, torch.Size((len(rows), width)))
