"""One set of statistics on several ranks: each adds what all of them have found in a batch.

Two rounds a batch. In the first each rank tells whether its batch is fit, and what its statistics
are so far: where one has to raise, all do, and none waits for another. In the second they exchange
the moments of this batch, never totals, so that no return is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppokit.distributed import sum_over_ranks
from ppokit.rewards.batch import Measured
from ppokit.rewards.returns import Moments
from ppokit.rewards.statistics import merged

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def measure_together(
    measure: Callable[[], Measured], so_far: Tensor, ranks: ProcessGroup
) -> Measured:
    """Return what ``measure`` does, with the moments of the batches of all ranks.

    Args:
        measure: what this rank finds in its own batch.
        so_far: its statistics before; they must be the same on all ranks.
        ranks: the group.

    Raises:
        Exception: what ``measure`` raises.
        RuntimeError: another rank's has raised, or the ranks do not go on from one state.
        ValueError: the batches of the ranks have different numbers of rewards.
    """
    try:
        found, error = measure(), None
    except Exception as raised:
        found, error = None, raised
    state = so_far.detach().double().cpu().reshape(-1, 4).sum(0).tolist()
    count = 0 if found is None else len(found.moments)
    table = _gather([[float(count), *state[:3]]], ranks).squeeze(1)
    if error is not None:
        raise error
    assert found is not None
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
    moments = _gather(found.moments, ranks)
    return found._replace(moments=[_merged_over(column) for column in moments.unbind(1)])


def _merged_over(moments: Tensor) -> Moments:
    """Merge ``[ranks, 3]``, in the order of the ranks: the same to the last bit on each of them."""
    each = [(row[0], row[1], row[2]) for row in moments.tolist()]
    return reduce(merged, each)


def _gather(values: Sequence[Sequence[float]], ranks: ProcessGroup) -> Tensor:
    """Return every rank's values ``[ranks, N, M]``, float64."""
    own = torch.tensor(values, dtype=torch.float64)
    table = own.new_zeros(ranks.size(), *own.shape)
    table[ranks.rank()] = own
    return sum_over_ranks(table, ranks)
