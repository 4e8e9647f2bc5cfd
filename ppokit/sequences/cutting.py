"""Cutting a batch into sequences at episode starts, and every so many steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import (
    as_key,
    check_time_is_last,
    check_trajectories,
    get_tensor,
    key_parts,
    per_frame,
    time_dim,
    valid_mask,
)
from ppokit.functional._checks import check_bool, check_same_shape

# The names that torchrl's LSTMModule and GRUModule give their states by default.
_TORCHRL_STATES = ("recurrent_state_h", "recurrent_state_c", "recurrent_state")


class Cuts(NamedTuple):
    """Sequences as positions in the flattened batch, each ``[N]``, int64."""

    first: Tensor  #: the first frame, burn-in included
    burn_in: Tensor  #: number of burn-in frames
    length: Tensor  #: number of frames after them


def check_time(tensordict: TensorDictBase) -> None:
    """Raise unless the last dimension of the batch runs in time order."""
    time_dim(tensordict, who="SequenceBatcher")
    check_time_is_last(tensordict, who="SequenceBatcher")


def read_starts(
    tensordict: TensorDictBase,
    *,
    done_key: NestedKey,
    cut_keys: Sequence[NestedKey],
    mask_key: NestedKey,
    traj_key: NestedKey,
) -> tuple[Tensor, Tensor | None]:
    """Return where an unbroken run of frames starts, and the mask of valid frames; ``[*B, T]``.

    A batch without a mask gives None.
    """
    ndim = tensordict.ndim
    done = get_tensor(
        tensordict, done_key, fix="Collectors write it; another name is given with done_key=."
    )
    check_bool(repr(done_key), done)
    done = per_frame(done, ndim)
    starts = torch.ones_like(done)
    starts[..., 1:] = done[..., :-1]
    for key in cut_keys:
        fix = "Append torchrl's InitTracker() to the environment, or pass cut_keys=()."
        cuts = get_tensor(tensordict, key, fix=fix)
        check_bool(repr(key), cuts)
        starts |= per_frame(cuts, ndim)
    valid = valid_mask(tensordict, mask_key)
    check_trajectories(tensordict, done, ndim - 1, mask=valid, key=traj_key)
    if valid is not None:
        if not valid.any():
            raise ValueError(f"{mask_key!r} masks every frame: there is nothing to cut.")
        starts[..., 1:] |= ~valid[..., :-1]  # a frame after a gap starts a run, too
    return starts, valid


def cut(starts: Tensor, valid: Tensor | None, seq_len: int | None, burn_in: int) -> Cuts:
    """Cut the runs of a batch into sequences.

    A run is a stretch of valid frames with one start, its first. It is cut every ``seq_len`` steps,
    or not at all. Each piece is preceded by up to ``burn_in`` frames of the same run.

    Args:
        starts: where a run starts ``[*B, T]``, bool, True at the first step of every row.
        valid: the mask of valid frames ``[*B, T]``, bool; None for all.
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
    burn_in_length = before.clamp(max=burn_in)
    return Cuts(first[run] + before - burn_in_length, burn_in_length, length)


def lay_out(cuts: Cuts, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the burn-in frames, the frames in the loss, and the positions of all, ``[N, width]``.

    Padding has the position of the sequence's last frame.
    """
    steps = torch.arange(width, device=cuts.first.device)
    start, end = cuts.burn_in.unsqueeze(-1), (cuts.burn_in + cuts.length).unsqueeze(-1)
    index = cuts.first.unsqueeze(-1) + torch.minimum(steps, end - 1)
    return steps < start, (steps >= start) & (steps < end), index


def last_true(mask: Tensor) -> Tensor:
    """Return one more than the last step of ``[N, L]`` that is True, ``[N]``; 0 if none is."""
    steps = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * steps).amax(1)


def find_states(tensordict: TensorDictBase, *, written: bool = False) -> list[NestedKey]:
    """Return the entries that have torchrl's own names for states, nested ones too.

    Args:
        tensordict: the batch.
        written: the states that a network has written for the next step, under ``"next"``, rather
            than those that it has read.
    """
    keys = map(key_parts, tensordict.keys(True, True))
    states = [key for key in keys if key[-1] in _TORCHRL_STATES and (key[0] == "next") == written]
    return [as_key(key[1:] if written else key) for key in states]


def check_states_are_stored(batch: TensorDictBase, keys: Iterable[NestedKey] | None) -> None:
    """Raise unless these states are stored for every frame; None stands for torchrl's own names."""
    # Without a primer torchrl's modules write states and never read one, without a warning.
    for key in find_states(batch, written=True) if keys is None else keys:
        state = get_tensor(
            batch,
            key,
            fix="The policy must store its recurrent state at every step: append "
            "lstm.make_tensordict_primer() to the environment.",
        )
        frames = state.new_empty(state.shape[: batch.ndim])
        check_same_shape({"the batch": state.new_empty(batch.batch_size), repr(key): frames})
