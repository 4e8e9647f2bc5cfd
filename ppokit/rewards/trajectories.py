"""Returns that go on from one batch to the next, wherever the trajectory ids say so."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import check_trajectories
from ppokit.functional._checks import check_same_shape
from ppokit.rewards.returns import Ends


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
    check_same_shape({"the batch": ids.new_empty(tensordict.batch_size), key: ids})
    check_trajectories(tensordict, done, dim, mask=mask, key=key)
    ids = ids.movedim(dim, -1).long()
    if ids.device.type == "cpu":
        first = ids[..., 0] if mask is None else ids[..., 0][mask.select(dim, 0)]
        if first.unique().numel() < first.numel():
            raise ValueError(
                f"{key!r} has rows that start with the same trajectory, so the rows' order in time "
                "is unknown. Normalise before the batch is cut into sequences; for collectors "
                "whose workers repeat ids (RayCollector), pass traj_key=None."
            )
    return ids


def carry_in(open_ids: Tensor, open_returns: Tensor, first_ids: Tensor, like: Tensor) -> Tensor:
    """Return R with which each row starts: that of its trajectory if it is open, else 0.

    Args:
        open_ids: ids of the open trajectories, ascending.
        open_returns: their R, ``[open, F]``.
        first_ids: the id of each row's first step, ``[*B]``.
        like: a tensor ``[*B, T, F]``.
    """
    initial = torch.zeros_like(like.select(-2, 0), dtype=torch.float64)
    if open_ids.numel() == 0:
        return initial
    known = open_ids.to(first_ids.device)
    slot = torch.searchsorted(known, first_ids.contiguous()).clamp_max(known.numel() - 1)
    continues = (known[slot] == first_ids).unsqueeze(-1)
    return torch.where(continues, open_returns.to(initial.device)[slot], initial)


def still_open(
    open_ids: Tensor, open_returns: Tensor, seen: Tensor, ends: Ends
) -> tuple[Tensor, Tensor]:
    """Return the ids and R of all trajectories that are open after a batch, ids ascending.

    Args:
        open_ids: ids of the trajectories that were open before it.
        open_returns: their R, ``[open, F]``.
        seen: the ids with which its rows start.
        ends: the ids with which they end ``[*B]``, whether those are open, and their R ``[*B, F]``.
    """
    last_ids, goes_on, carry = ends
    known, held = open_ids.to(last_ids.device), open_returns.to(carry.device)
    others = ~torch.isin(known, seen)
    all_ids, order = torch.cat([known[others], last_ids[goes_on]]).sort()
    all_carry = torch.cat([held.reshape(-1, carry.shape[-1])[others], carry[goes_on]])
    return all_ids, all_carry[order]
