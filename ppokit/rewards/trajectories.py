"""Returns that go on from one batch to the next, wherever the trajectory ids say so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import check_time_order
from ppokit.functional._checks import check_same_shape
from ppokit.kernels import direct_kernel
from ppokit.rewards.returns import CLOSED, Ends

# Trajectories that are open and not in the batch; the oldest are forgotten.
MOST_ELSEWHERE = 1 << 16

Open = tuple[Tensor, Tensor]  # ids of trajectories ``[N]``, CLOSED for none, and their R ``[N, F]``


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


def carry_in(
    held: Open, first_ids: Tensor, first_valid: Tensor | None, features: int, *, key: NestedKey
) -> tuple[Tensor, Open]:
    """Return R with which each row starts, 0 where nothing is open, and what is open elsewhere.

    Args:
        held: what the batches before left open, those of their rows in order first.
        first_ids: the id of each row's first step, ``[*B]``.
        first_valid: which rows hold anything, or None: all.
        features: F.
        key: where the ids are, for the message.

    Raises:
        ValueError: two rows start with the same trajectory, or F has changed.
    """
    if first_valid is not None:
        first_ids = torch.where(first_valid, first_ids, CLOSED)
    first = first_ids.flatten()
    rows = first.numel()
    known, returns = _at_least(rows, held, features, first.device)
    if _go_on(first, known):  # as from a collector; R is 0 where a trajectory begins
        initial, elsewhere = returns[:rows], (known[rows:], returns[rows:])
    else:
        _check_distinct(first[first != CLOSED], key)
        initial, elsewhere = _look_up(known, returns, first.contiguous())
    return initial.view(*first_ids.shape, features), elsewhere


def _at_least(rows: int, held: Open, features: int, device: torch.device) -> Open:
    """Return what is open, on the device, and padded for all rows."""
    known, returns = held
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
    if (kernel := direct_kernel()) is not None:
        go_on = kernel.rows_go_on(first, known)
        if go_on is not NotImplemented:
            return go_on
    own = known[: len(first)]
    begins = (own == CLOSED) & (first > known.max())
    new = first[begins]
    return bool(((own == first) | begins).all() and (new[1:] > new[:-1]).all())


def _look_up(known: Tensor, returns: Tensor, first: Tensor) -> tuple[Tensor, Open]:
    known, order = known.sort(stable=True)
    # Of an id that is there twice, as where a collector started anew, the rows' own comes first.
    distinct = known != CLOSED
    distinct[1:] &= known[1:] != known[:-1]
    known, returns = known[distinct], returns[order[distinct]]
    if len(known) == 0:
        return returns.new_zeros(len(first), returns.shape[-1]), (known, returns)
    slot = torch.searchsorted(known, first).clamp_max(len(known) - 1)
    goes_on = known[slot] == first
    elsewhere = torch.ones_like(known, dtype=torch.bool)
    elsewhere[slot[goes_on]] = False
    initial = torch.where(goes_on.unsqueeze(-1), returns[slot], 0)
    return initial, (known[elsewhere], returns[elsewhere])


def carry_out(ends: Ends, elsewhere: Open) -> Open:
    """Return what is open after a batch: its rows' trajectories in their order, then the others.

    Args:
        ends: the ids with which the rows end ``[*B]``, CLOSED where none goes on; R ``[*B, F]``.
        elsewhere: what is open, but was not in the batch.
    """
    last_ids, carry = ends
    ids, returns = last_ids.flatten(), carry.reshape(-1, carry.shape[-1])
    others, others_returns = elsewhere
    if others.numel() == 0:
        return ids, returns
    # Collectors that reset at each iteration leave trajectories behind that never come back.
    if others.numel() > MOST_ELSEWHERE:
        latest = others.argsort()[-MOST_ELSEWHERE:]
        others, others_returns = others[latest], others_returns[latest]
    return torch.cat([ids, others]), torch.cat([returns, others_returns])
