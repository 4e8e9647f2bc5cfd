"""Returns that go on from one batch to the next, wherever the trajectory ids say so."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import check_trajectories
from ppokit.functional._checks import check_same_shape
from ppokit.rewards.returns import Ends

Open = tuple[Tensor, Tensor]  # ids of trajectories ``[N]``, CLOSED for none, and their R ``[N, F]``
CLOSED = -1


def trajectory_ids(
    tensordict: TensorDictBase, key: NestedKey | None, done: Tensor, dim: int, mask: Tensor | None
) -> Tensor | None:
    """Return the trajectory ids ``[*B, T]``, or None if there are none.

    Raises:
        ValueError: they do not say where R continues, because time order is lost or two rows start
            with the same trajectory.
    """
    ids = None if key is None else tensordict.get(key, None)
    if ids is None or key is None:
        return None
    if ids.shape != tensordict.batch_size:
        check_same_shape({"the batch": ids.new_empty(tensordict.batch_size), key: ids})
    check_trajectories(tensordict, done, dim, mask=mask, key=key)
    ids = ids.movedim(dim, -1).long()
    if ids.device.type == "cpu":
        first = ids.select(-1, 0)
        first = first if mask is None else first[mask.select(dim, 0)]
        if first.numel() > 1 and first.unique().numel() < first.numel():
            raise ValueError(
                f"{key!r} has rows that start with the same trajectory, so the rows' order in time "
                "is unknown. Normalise before the batch is cut into sequences; for collectors "
                "whose workers repeat ids (RayCollector), pass traj_key=None."
            )
    return ids


def carry_in(held: Open, first_ids: Tensor, like: Tensor) -> tuple[Tensor, Open]:
    """Return R with which each row starts, 0 where nothing is open, and what is open elsewhere.

    Args:
        held: what the batches before left open.
        first_ids: the id of each row's first step, ``[*B]``.
        like: a tensor ``[*B, T, F]``.
    """
    known, returns = held
    if known.device != like.device:
        known, returns = known.to(like.device), returns.to(like.device)
    shape = (*first_ids.shape, like.shape[-1])
    if known.numel() == 0:
        return torch.zeros(shape, dtype=torch.float64, device=like.device), held
    first = first_ids.flatten().contiguous()
    rows = first.numel()
    if known.numel() >= rows:
        own, others = known[:rows], known[rows:]
        goes_on = own == first
        moved = others.numel() and torch.isin(others, first).any()
        if (goes_on | (own == CLOSED)).all() and not moved:
            # Every row goes on with its own trajectory, or with a new one: nothing to look up.
            initial = torch.where(goes_on.unsqueeze(-1), returns[:rows], 0)
            return initial.view(shape), (others, returns[rows:])
    known, order = known.sort(stable=True)
    # Of an id that is there twice, as where a collector started anew, the rows' own comes first.
    distinct = known != CLOSED
    distinct[1:] &= known[1:] != known[:-1]
    known, returns = known[distinct], returns[order[distinct]]
    if known.numel() == 0:
        return torch.zeros(shape, dtype=torch.float64, device=like.device), (known, returns)
    slot = torch.searchsorted(known, first).clamp_max(known.numel() - 1)
    goes_on = known[slot] == first
    elsewhere = torch.ones_like(known, dtype=torch.bool)
    elsewhere[slot[goes_on]] = False
    initial = torch.where(goes_on.unsqueeze(-1), returns[slot], 0)
    return initial.view(shape), (known[elsewhere], returns[elsewhere])


def carry_out(ends: Ends, elsewhere: Open) -> Open:
    """Return what is open after a batch: its rows' trajectories in their order, then the others.

    Args:
        ends: the ids with which the rows end ``[*B]``, whether those are open, and R ``[*B, F]``.
        elsewhere: what is open, but was not in the batch.
    """
    last_ids, goes_on, carry = ends
    ids = torch.where(goes_on, last_ids, CLOSED).flatten()
    returns = carry.reshape(-1, carry.shape[-1])
    if elsewhere[0].numel() == 0:
        return ids, returns
    return torch.cat([ids, elsewhere[0]]), torch.cat([returns, elsewhere[1]])
