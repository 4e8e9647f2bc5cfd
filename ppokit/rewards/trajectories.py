"""Returns that go on from one batch to the next, wherever the trajectory ids say so."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import check_trajectories
from ppokit.functional._checks import check_same_shape


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
    initial = torch.zeros_like(like.select(-2, 0))
    if open_ids.numel() == 0:
        return initial
    known = open_ids.to(first_ids.device)
    slot = torch.searchsorted(known, first_ids.contiguous()).clamp_max(known.numel() - 1)
    continues = (known[slot] == first_ids).unsqueeze(-1)
    return torch.where(continues, open_returns.to(initial.device)[slot], initial)


def carry_out(
    open_ids: Tensor,
    open_returns: Tensor,
    ids: Tensor,
    frames: Tensor,
    ended: Tensor,
    returns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the ids and R of all trajectories that are open after a batch.

    Args:
        open_ids: ids of the trajectories that were open before it, ascending.
        open_returns: their R, ``[open, F]``.
        ids: trajectory ids ``[*B, T]``.
        frames: which frames are valid, broadcast to ``[*B, T, F]``.
        ended: done, ``[*B, T, F]``.
        returns: R, ``[*B, T, F]``.
    """
    frames = frames.expand_as(ended)
    steps = torch.arange(ids.shape[-1], device=ids.device).unsqueeze(-1)
    last = torch.where(frames, steps, 0).amax(-2, keepdim=True)
    carry = torch.where(ended, 0, returns).gather(-2, last).squeeze(-2)
    last_ids = ids.gather(-1, last[..., 0, 0].unsqueeze(-1)).squeeze(-1)
    still_open = (frames & ~ended).gather(-2, last).squeeze(-2).any(-1)
    known, held = open_ids.to(ids.device), open_returns.to(returns.device)
    # Padding may hold any id, also that of a trajectory that is open elsewhere.
    others = ~torch.isin(known, ids[frames[..., 0]])
    all_ids, order = torch.cat([known[others], last_ids[still_open]]).sort()
    all_carry = torch.cat([held.reshape(-1, carry.shape[-1])[others], carry[still_open]])
    return all_ids, all_carry[order]
