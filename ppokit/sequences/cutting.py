"""Where sequences begin and end in a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cuts(NamedTuple):
    """Sequences as positions in the flattened batch, each ``[N]``, int64."""

    first: Tensor  #: of the sequence's frames, burn-in included
    burn_in: Tensor  #: how many frames of burn-in
    length: Tensor  #: how many frames follow them


def cut(starts: Tensor, valid: Tensor | None, seq_len: int | None, burn_in: int) -> Cuts:
    """Cut the runs of a batch into sequences.

    A run is a stretch of valid frames with one start, its first. It is cut every ``seq_len`` steps,
    or not at all. Each piece is preceded by up to ``burn_in`` frames of the same run.

    Args:
        starts: where a run starts ``[*B, T]``, bool, True at the first step of every row.
        valid: which frames count ``[*B, T]``, bool; None for all.
        seq_len: the longest piece, in steps; None for whole runs.
        burn_in: the most frames that precede a piece.
    """
    goes_on = ~starts if valid is None else valid & ~starts
    begins, goes_on = (starts if valid is None else starts & valid).flatten(), goes_on.flatten()
    ends = torch.ones_like(goes_on)
    torch.logical_not(goes_on[1:], out=ends[:-1])
    if valid is not None:
        ends &= valid.flatten()
    first, last = begins.nonzero().squeeze(-1), ends.nonzero().squeeze(-1)
    total = last + 1 - first
    if seq_len is None:
        return Cuts(first, torch.zeros_like(first), total)
    pieces = (total + seq_len - 1) // seq_len
    run = torch.repeat_interleave(pieces)
    nth = torch.arange(len(run), device=run.device) - (pieces.cumsum(0) - pieces)[run]
    before = nth * seq_len
    length = (total[run] - before).clamp(max=seq_len)
    burnt = before.clamp(max=burn_in)
    return Cuts(first[run] + before - burnt, burnt, length)


def lay_out(cuts: Cuts, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which frames are of burn-in, which count, and the positions of all, ``[N, width]``.

    What lies behind a sequence's last frame has the position of that frame.
    """
    steps = torch.arange(width, device=cuts.first.device)
    burnt, end = cuts.burn_in.unsqueeze(-1), (cuts.burn_in + cuts.length).unsqueeze(-1)
    index = cuts.first.unsqueeze(-1) + torch.minimum(steps, end - 1)
    return steps < burnt, (steps >= burnt) & (steps < end), index


def last_true(mask: Tensor) -> Tensor:
    """Return one more than the last step of ``[N, L]`` that is True, ``[N]``; 0 if none is."""
    steps = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * steps).amax(1)
