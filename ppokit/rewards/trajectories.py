"""Returns of trajectories that go on from one batch to the next, by their ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import check_time_order
from ppokit.functional._checks import check_same_shape
from ppokit.rewards.returns import CLOSED, Ends

MAX_OTHERS = 1 << 16  # open trajectories that are not in the batch; the oldest are dropped

# ids of trajectories ``[N]``, CLOSED for none, and their R ``[N, F]``
OpenReturns = tuple[Tensor, Tensor]


def trajectory_ids(
    tensordict: TensorDictBase,
    key: NestedKey | None,
    done: Callable[[], Tensor],
    dim: int,
    mask: Tensor | None,
) -> Tensor | None:
    """Return the trajectory ids ``[*B, T]``, or None if there are none; only they need ``done``.

    Raises:
        ValueError: they do not say where R continues, because time order is lost.
    """
    ids = None if key is None else tensordict.get(key, None)
    if ids is None or key is None:
        return None
    if ids.shape != tensordict.batch_size:
        check_same_shape({"the batch": ids.new_empty(tensordict.batch_size), key: ids})
    check_time_order(ids, done(), dim, mask=mask, key=key)
    return (ids if dim == ids.ndim - 1 else ids.movedim(dim, -1)).long()


def initial_returns(
    open_returns: OpenReturns,
    first_ids: Tensor,
    first_valid: Tensor | None,
    features: int,
    *,
    key: NestedKey,
) -> tuple[Tensor, OpenReturns]:
    """Return R with which each row starts, 0 for a new trajectory, and the other open returns.

    ``first_ids`` are those of each row's first step ``[*B]``, and ``first_valid`` tells which rows
    hold anything.

    Raises:
        ValueError: two rows start with the same trajectory, or F has changed.
    """
    if first_valid is not None:
        first_ids = torch.where(first_valid, first_ids, CLOSED)
    first = first_ids.flatten()
    rows = first.numel()
    known, returns = _padded(rows, open_returns, features, first.device)
    if _go_on(first, known):  # as from a collector; R is 0 where a trajectory begins
        initial, others = returns[:rows], (known[rows:], returns[rows:])
    else:
        _check_distinct(first[first != CLOSED], key)
        initial, others = _look_up(known, returns, first.contiguous())
    return initial.view(*first_ids.shape, features), others


def _padded(
    rows: int, open_returns: OpenReturns, features: int, device: torch.device
) -> OpenReturns:
    """Return the open returns on the device, padded to one for each row at least."""
    known, returns = open_returns
    if known.numel() and returns.shape[-1] != features:
        raise ValueError(
            f"The batch has {features} rewards a frame, but the trajectories that were left open "
            f"have {returns.shape[-1]}: these are other environments. Use a normalizer for each, "
            "or call reset_returns() in between."
        )
    if known.device != device:
        known, returns = known.to(device), returns.to(device)
    if (missing := rows - known.numel()) <= 0:
        return known, returns
    known = torch.cat([known, known.new_full((missing,), CLOSED)])
    return known, torch.cat([returns.view(-1, features), returns.new_zeros(missing, features)])


def _check_distinct(ids: Tensor, key: NestedKey) -> None:
    if len(ids) > 1 and len(ids.unique()) < len(ids):
        raise ValueError(
            f"{key!r} has rows that start with the same trajectory, so the rows' order in time is "
            "unknown. Normalise before the batch is cut into sequences; for collectors whose "
            "workers repeat ids (RayCollector), pass traj_key=None."
        )


def _go_on(first: Tensor, known: Tensor) -> bool:
    """Return whether each row goes on with its own trajectory, or with one numbered after all."""
    own = known[: len(first)]
    begins = (own == CLOSED) & (first > known.max())
    new = first[begins]
    return bool(((own == first) | begins).all() and (new[1:] > new[:-1]).all())


def _look_up(known: Tensor, returns: Tensor, first: Tensor) -> tuple[Tensor, OpenReturns]:
    known, order = known.sort(stable=True)
    # Of an id that is there twice, as where a collector started anew, the rows' own comes first.
    distinct = known != CLOSED
    distinct[1:] &= known[1:] != known[:-1]
    known, returns = known[distinct], returns[order[distinct]]
    if len(known) == 0:
        return returns.new_zeros(len(first), returns.shape[-1]), (known, returns)
    index = torch.searchsorted(known, first).clamp_max(len(known) - 1)
    goes_on = known[index] == first
    remains = torch.ones_like(known, dtype=torch.bool)
    remains[index[goes_on]] = False
    initial = torch.where(goes_on.unsqueeze(-1), returns[index], 0)
    return initial, (known[remains], returns[remains])


def open_after(ends: Ends, others: OpenReturns) -> OpenReturns:
    """Return the open returns after a batch: those of its rows in order, then others."""
    last_ids, carry = ends
    ids, returns = last_ids.flatten(), carry.reshape(-1, carry.shape[-1])
    other_ids, other_returns = others
    if other_ids.numel() == 0:
        return ids, returns
    # Collectors that reset at each iteration leave trajectories behind that never come back.
    if other_ids.numel() > MAX_OTHERS:
        latest = other_ids.argsort()[-MAX_OTHERS:]
        other_ids, other_returns = other_ids[latest], other_returns[latest]
    return torch.cat([ids, other_ids]), torch.cat([returns, other_returns])
