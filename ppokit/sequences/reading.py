"""What a batch says of its episodes and of its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import (
    as_key,
    check_trajectories,
    get_tensor,
    key_parts,
    per_frame,
    time_dim,
    valid_mask,
)
from ppokit.functional._checks import check_bool

# The names that torchrl's LSTMModule and GRUModule give their states by themselves.
_TORCHRL_STATES = ("recurrent_state_h", "recurrent_state_c", "recurrent_state")


def check_time(tensordict: TensorDictBase) -> None:
    """Raise unless the last dimension of the batch runs in time order."""
    dim = time_dim(tensordict, who="SequenceBatcher")
    if dim != tensordict.ndim - 1:
        raise ValueError(
            f'The dimension named "time" of a batch of shape {list(tensordict.batch_size)} is '
            f"{dim}; it must be the last. Use batch.transpose({dim}, -1)."
        )


def read_starts(
    tensordict: TensorDictBase,
    *,
    done_key: NestedKey,
    cut_keys: Sequence[NestedKey],
    mask_key: NestedKey,
    traj_key: NestedKey,
) -> tuple[Tensor, Tensor | None]:
    """Return where an unbroken run of frames starts, and which frames are valid; both ``[*B, T]``.

    In place of a mask that the batch does not have, there is None.
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
        cut = get_tensor(tensordict, key, fix=fix)
        check_bool(repr(key), cut)
        starts |= per_frame(cut, ndim)
    valid = valid_mask(tensordict, mask_key)
    check_trajectories(tensordict, done, ndim - 1, mask=valid, key=traj_key)
    if valid is not None:
        if not valid.any():
            raise ValueError(f"{mask_key!r} masks every frame: there is nothing to cut.")
        starts[..., 1:] |= ~valid[..., :-1]  # a frame after a gap starts a run, too
    return starts, valid


def find_states(tensordict: TensorDictBase, *, written: bool = False) -> list[NestedKey]:
    """Return the entries that have torchrl's own names for states, nested ones too.

    Args:
        tensordict: where to look.
        written: those that a network has written for the next step, rather than those it has read.
    """
    keys = map(key_parts, tensordict.keys(True, True))
    found = [key for key in keys if key[-1] in _TORCHRL_STATES and (key[0] == "next") == written]
    return [as_key(key[1:] if written else key) for key in found]
