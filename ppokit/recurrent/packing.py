"""Rows of steps, put together so that none of them is padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppokit import kernels


class Packing(NamedTuple):
    """Where the runs of a batch ``[B, T]`` are: steps of a row that nothing interrupts.

    Packed frames are ordered by their step in a run, and among those of one step the longer runs
    come first: what :class:`torch.nn.utils.rnn.PackedSequence` is.
    """

    frames: Tensor  #: the place in the flattened batch of each packed frame ``[F]``
    starts: Tensor  #: likewise of the first frame of each run ``[N]``
    sizes: list[int]  #: how many runs have a frame at each step; together F


def pack(is_init: Tensor, mask: Tensor | None) -> Packing:
    """Return where the runs are: from a row's start or a True, to the next or the last valid frame.

    Args:
        is_init: bool ``[B, T]``.
        mask: the valid frames ``[B, T]``, bool; None for all. What comes after a row's last one is
            in no run, what comes before it is.

    Example:
        >>> is_init = torch.tensor([[False, True, False], [False, False, False]])
        >>> pack(is_init, None)
        Packing(frames=tensor([3, 1, 0, 4, 2, 5]), starts=tensor([3, 1, 0]), sizes=[3, 2, 1])
    """
    native = kernels.direct_kernel()
    if native is not None:
        frames, first = (torch.empty(is_init.numel(), dtype=torch.int64) for _ in range(2))
        found = native.pack(is_init, mask, frames, first)
        if found is not NotImplemented:
            return Packing(frames[: found[0]], first[: found[1]], found[2])
    return _pack(is_init, mask)


def _pack(is_init: Tensor, mask: Tensor | None) -> Packing:
    rows, steps = is_init.shape
    step = torch.arange(steps, device=is_init.device)
    starts = is_init.clone()
    starts[:, 0] = True
    ends = torch.full((rows,), steps, device=is_init.device)
    if mask is not None:
        ends = torch.where(mask, step + 1, 0).amax(1)
        starts &= step < ends.unsqueeze(1)
    first = starts.flatten().nonzero().squeeze(1)
    row = first // steps
    # A run ends with its row, or where the next one starts.
    last = (row * steps + ends[row]).minimum(
        torch.cat([first[1:], first.new_full((1,), rows * steps)])
    )
    lengths, order = (last - first).sort(descending=True, stable=True)
    first = first[order]
    running = lengths > step[: int(lengths[0]), None]
    return Packing((first + step[: len(running), None])[running], first, running.sum(1).tolist())


class Pack(torch.autograd.Function):
    """Frames of a batch ``[B * T, I]``, in packed order ``[F, I]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frames: Tensor) -> Tensor:
        """Return some rows."""
        ctx.frames, ctx.rows = frames, len(x)
        return x.index_select(0, frames)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Put the gradients back; each row was taken once."""
        return Unpack.apply(*gradients, ctx.frames, ctx.rows), None


class Unpack(torch.autograd.Function):
    """Packed frames ``[F, I]`` back in their batch ``[rows, I]``; 0 where there are none."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, frames: Tensor, rows: int) -> Tensor:
        """Return the rows in their places."""
        ctx.frames = frames
        batch = packed.new_zeros(rows, packed.shape[1])
        return batch.index_copy_(0, frames, packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return those of the rows that were put there."""
        return Pack.apply(*gradients, ctx.frames), None, None
