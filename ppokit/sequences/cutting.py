"""Cutting a batch into sequences and minibatches, gathering their entries, and the inverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import as_key, key_parts

SHAPE_KEY = ("sequence", "batch_size")

# The names that torchrl's LSTMModule and GRUModule give their states by default.
_TORCHRL_STATES = ("recurrent_state_h", "recurrent_state_c", "recurrent_state")


def cut(
    starts: Tensor, valid: Tensor | None, seq_len: int | None, burn_in: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequences of a batch, whose runs are cut every ``seq_len`` steps (None: not).

    ``starts`` and ``valid`` are bool ``[*B, T]``. A run is a stretch of valid frames with one
    start, its first. Up to ``burn_in`` frames of the same run precede each piece. Returned are the
    frames of burn-in, the frames in the loss, and the positions of all in the flattened batch,
    ``[N, L]`` each. Padding has the position of the sequence's last frame.
    """
    goes_on = ~starts if valid is None else valid & ~starts
    begins, goes_on = (starts if valid is None else starts & valid).flatten(), goes_on.flatten()
    ends = torch.ones_like(goes_on)
    torch.logical_not(goes_on[1:], out=ends[:-1])
    if valid is not None:
        ends &= valid.flatten()
    first, last = begins.nonzero().squeeze(-1), ends.nonzero().squeeze(-1)
    length = last + 1 - first
    warm = torch.zeros_like(first)  # burn-in frames of each piece
    if seq_len is not None:
        pieces = (length + seq_len - 1) // seq_len
        run = torch.repeat_interleave(pieces)
        nth = torch.arange(len(run), device=run.device) - (pieces.cumsum(0) - pieces)[run]
        before = nth * seq_len
        warm = before.clamp(max=burn_in)
        first, length = first[run] + before - warm, (length[run] - before).clamp(max=seq_len)
    # seq_len is the width even if all are shorter: a replay buffer's storage takes one width.
    width = int(length.max()) if seq_len is None else burn_in + seq_len
    steps = torch.arange(width, device=first.device)
    start, end = warm.unsqueeze(-1), (warm + length).unsqueeze(-1)
    index = first.unsqueeze(-1) + torch.minimum(steps, end - 1)
    return steps < start, (steps >= start) & (steps < end), index


def last_true(mask: Tensor) -> Tensor:
    """Return one more than the last step of ``[N, L]`` that is True, ``[N]``; 0 if none is."""
    steps = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * steps).amax(1)


class Lengths(NamedTuple):
    """Numbers of steps of each sequence ``[N]``, int64 on the host."""

    burn_in: Tensor  #: frames of burn-in
    frames: Tensor  #: frames in the loss
    end: Tensor  #: steps until the last frame in the loss
    width: Tensor  #: steps until the padding

    def split(self, parts: Sequence[Tensor]) -> list[Lengths]:
        """Return the lengths of each part of the sequences, given their indices."""
        order, sizes = torch.cat([*parts]), [len(rows) for rows in parts]
        columns = (x[order].split(sizes) for x in self)
        return [Lengths(*column) for column in zip(*columns, strict=True)]


def lengths_of(counted: Tensor, burn_in: Tensor | None) -> Lengths:
    """Return the lengths of sequences; a device is read once.

    ``counted`` are the frames in the loss, and ``burn_in`` those of burn-in, bool ``[N, L]``.
    """
    frames, end = counted.sum(1), last_true(counted)
    if burn_in is None:
        warm, width = torch.zeros_like(end), end
    else:
        warm, width = burn_in.sum(1), last_true(counted | burn_in)
    return Lengths(*torch.stack([warm, frames, end, width]).cpu())


def find_states(tensordict: TensorDictBase, *, written: bool = False) -> list[NestedKey]:
    """Return the entries with torchrl's names for states, or those ``written`` under "next"."""
    keys = map(key_parts, tensordict.keys(True, True))
    states = [key for key in keys if key[-1] in _TORCHRL_STATES and (key[0] == "next") == written]
    return [as_key(key[1:] if written else key) for key in states]


def gather(tensordict: TensorDictBase, index: Tensor) -> TensorDictBase:
    """Return the frames at these positions ``[N, L]``, int64, of the flattened batch."""
    frames = tensordict.contiguous().reshape(-1)[index]  # lazy stacks index otherwise
    frames.names = [None, "time"]
    return frames


def expand(x: Tensor, width: int) -> Tensor:
    """Return ``[N, width, ...]``, the same at every step, of ``[N, ...]``, without a copy."""
    return x.unsqueeze(1).expand(-1, width, *x.shape[1:])


def next_key(key: NestedKey) -> NestedKey:
    """Return the key of the state after a step, for that of the state before it."""
    return as_key(("next", *key_parts(key)))


def assign_to_minibatches(
    lengths: Lengths,
    n: int,
    *,
    buckets: int,
    shuffle: bool,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Return the sequences of each of ``n`` minibatches, int64 on the host."""
    total = len(lengths.end)
    if not 1 <= n <= total:
        raise ValueError(f"n must lie between 1 and the {total} sequences, got {n}.")
    buckets = buckets if shuffle else 1
    order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
    turns = torch.arange(n) if buckets == 1 else torch.randperm(n, generator=generator)
    if buckets > 1:
        rank, pools = lengths.end[order], -(-n // buckets)
        pool = torch.arange(total) * pools // total
        # Ascending in one pool and descending in the next: a minibatch with sequences of both has
        # long ones of both, or short ones.
        rank = torch.where(pool % 2 == 0, rank, -rank) + pool * (2 * rank.max() + 1)
        order = order[rank.argsort(stable=True)]
    in_order = order.split(_even_sizes(lengths.frames[order], n))
    return [in_order[turn] for turn in turns.tolist()]


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
    return [end - start for start, end in pairwise(bounds)]


def take(
    sequences: TensorDictBase, states: Mapping[NestedKey, Tensor], rows: Tensor, width: int
) -> TensorDictBase:
    """Return some sequences ``[n, width]``; their ``rows`` are on the host."""
    rows = rows.to(sequences.get(SHAPE_KEY).device, non_blocking=True)
    part: Any = sequences[rows, :width]
    part.names = [None, "time"]
    for key, state in states.items():
        part.set(key, expand(state[rows, 0], width))
    return part
