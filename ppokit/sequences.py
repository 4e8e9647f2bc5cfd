"""Sequences for truncated back-propagation through time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import (
    MASK_KEY,
    TRAJ_KEY,
    as_key,
    check_trajectories,
    get_tensor,
    per_frame,
    time_dim,
    valid_mask,
)
from ppokit.functional._checks import check_bool, check_same_shape

# The names that torchrl's LSTMModule and GRUModule give their states by themselves.
_TORCHRL_STATES = ("recurrent_state_h", "recurrent_state_c", "recurrent_state")


class SequenceBatcher(TensorDictModuleBase):
    """Cuts a collected batch ``[*B, T]`` into sequences ``[N, L]`` for recurrent training.

    A sequence starts at every row's start, after every done, at every True of a cut key (episode
    starts), and every ``seq_len`` steps from there. No sequence crosses the end of a trajectory,
    and each valid frame is in exactly one sequence: nothing is dropped, nothing counted twice.

    - The recurrent state that was stored at a sequence's first step comes with it, expanded over
      the sequence without being copied: the networks resume from where collection was.
    - Short sequences are padded at the end. Padding repeats the sequence's last frame (so that
      every entry is one that the networks accept), with False in the cut keys; the mask of the
      frames that count is at ``("collector", "mask")``, ``[N, L]``, where torchrl's losses look.
    - The output has the names ``[None, "time"]`` and goes straight into a
      :class:`~torchrl.data.ReplayBuffer`, whose elements are then sequences.

    (Truncated back-propagation through time: Williams and Peng, 1990, Neural Computation 2(4).)

    Args:
        seq_len: longest sequence, in steps; None for whole trajectories.
        state_keys: recurrent states, stored by the policy at every step; None finds torchrl's own
            names, ``"recurrent_state_h"``, ``"recurrent_state_c"`` and ``"recurrent_state"``.
        cut_keys: bool entries that are True where an episode starts; ``()`` if there are none.
        done_key: the end of a trajectory.
        mask_key: where the mask is written, and read if the batch has one already.
        traj_key: trajectory ids; where one changes without a done, the batch is refused.

    Raises:
        ValueError: ``seq_len < 1``, the batch is empty, shapes differ, or the time order is unknown
            or lost.
        KeyError: the batch lacks done, a cut key or a state.
        TypeError: done or a cut key is not bool.

    Example:
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False, True, False, False, False]]).unsqueeze(-1)
        >>> batch = TensorDict({"x": torch.arange(5)[None], "next": {"done": done}}, [1, 5])
        >>> batcher = SequenceBatcher(2, cut_keys=())
        >>> sequences = batcher(batch)
        >>> sequences["x"], sequences["collector", "mask"][:, 1]
        (tensor([[0, 1],
                [2, 3],
                [4, 4]]), tensor([ True,  True, False]))
        >>> batcher.unbatch(sequences)["x"]
        tensor([[0, 1, 2, 3, 4]])
    """

    def __init__(
        self,
        seq_len: int | None,
        *,
        state_keys: Sequence[NestedKey] | None = None,
        cut_keys: Sequence[NestedKey] = ("is_init",),
        done_key: NestedKey = ("next", "done"),
        mask_key: NestedKey = MASK_KEY,
        traj_key: NestedKey = TRAJ_KEY,
    ) -> None:
        super().__init__()
        if seq_len is not None and (type(seq_len) is not int or seq_len < 1):
            raise ValueError(
                f"seq_len must be a whole number of at least 1 step, or None for whole "
                f"trajectories; got {seq_len!r}."
            )
        self.seq_len = seq_len
        self.state_keys = None if state_keys is None else [as_key(key) for key in state_keys]
        self.cut_keys = [as_key(key) for key in cut_keys]
        self.done_key, self.mask_key, self.traj_key = (
            as_key(done_key),
            as_key(mask_key),
            as_key(traj_key),
        )
        self.index_key: NestedKey = ("sequence", "index")
        self.shape_key: NestedKey = ("sequence", "batch_size")
        self.in_keys: list[NestedKey] = [self.done_key, *self.cut_keys, *(self.state_keys or [])]
        self.out_keys: list[NestedKey] = [self.mask_key, self.index_key, self.shape_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the sequences of a batch, ``[N, L]``.

        ``("sequence", "index")`` holds the position of each frame in the flattened batch, and
        ``("sequence", "batch_size")`` the batch's shape, for :meth:`unbatch`.
        """
        dim = time_dim(tensordict, who="SequenceBatcher")
        if dim != tensordict.ndim - 1:
            raise ValueError(
                f'The dimension named "time" of a batch of shape {list(tensordict.batch_size)} is '
                f"{dim}; it must be the last. Use batch.transpose({dim}, -1)."
            )
        states = self._states(tensordict)
        starts, valid = self._starts(tensordict, dim)
        position, offset, length = _cut(starts, valid, self.seq_len)
        first = position[offset == 0]
        # seq_len is the width even if all are shorter: a replay buffer's storage takes one width.
        width = int(length.max()) if self.seq_len is None else self.seq_len
        steps = torch.arange(width, device=first.device)
        mask = steps < length.unsqueeze(-1)
        index = first.unsqueeze(-1) + torch.minimum(steps, length.unsqueeze(-1) - 1)

        flat = tensordict.exclude(self.mask_key, *states).reshape(-1)
        sequences = flat[index]
        for key in self.cut_keys:
            cut = sequences.get(key)
            padding = ~mask.reshape(mask.shape + (1,) * (cut.ndim - 2))
            sequences.set(key, cut.masked_fill(padding, False))
        for key in states:
            at_start = tensordict.get(key).flatten(0, dim)[first]
            sequences.set(key, at_start.unsqueeze(1).expand(-1, len(steps), *at_start.shape[1:]))
        sequences.set(self.mask_key, mask)
        sequences.set(self.index_key, index)
        shape = torch.tensor(tensordict.batch_size, device=index.device)
        sequences.set(self.shape_key, shape.expand(*index.shape, -1))
        sequences.names = [None, "time"]
        return sequences

    def unbatch(self, sequences: TensorDictBase) -> TensorDictBase:
        """Put every frame back where it was: the inverse of calling the batcher.

        Sequences may come in any order, and may have gained entries. Frames that were masked out of
        the batch come back as zeros. A recurrent state inside a sequence comes from the
        ``("next", state)`` of the step before; without that entry it is the state of the
        sequence's first step.

        Raises:
            KeyError: the sequences lack an entry that the batcher writes.
        """
        fix = "unbatch takes what the batcher returned, with all of its sequences."
        mask = get_tensor(sequences, self.mask_key, fix=fix)
        index = get_tensor(sequences, self.index_key, fix=fix)[mask]
        shape = get_tensor(sequences, self.shape_key, fix=fix)[0, 0].tolist()
        restored = self._restore_states(sequences)
        frames = restored.exclude(self.mask_key, self.index_key, self.shape_key)[mask]
        whole = frames.new_zeros(torch.Size(shape).numel())
        whole[index] = frames
        whole = whole.reshape(shape)
        whole.names = [None] * (len(shape) - 1) + ["time"]
        if len(index) < whole.numel():
            valid = torch.zeros(whole.numel(), dtype=torch.bool, device=index.device)
            whole.set(self.mask_key, valid.index_fill(0, index, True).reshape(shape))
        return whole

    def minibatches(
        self,
        sequences: TensorDictBase,
        n: int,
        *,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> Iterator[TensorDictBase]:
        """Yield the sequences in ``n`` parts of nearly equal size, each sequence once.

        Args:
            sequences: what the batcher returned.
            n: number of minibatches.
            shuffle: draw a new order of sequences.
            generator: the source of that order; None means torch's global one.

        Raises:
            ValueError: there are fewer sequences than minibatches.
        """
        total = sequences.shape[0]
        if not 1 <= n <= total:
            raise ValueError(f"n must lie between 1 and the {total} sequences there are, got {n}.")
        order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
        parts = (part.to(sequences.device or "cpu") for part in order.tensor_split(n))
        return (cast(TensorDictBase, sequences[part]) for part in parts)

    def _starts(self, tensordict: TensorDictBase, dim: int) -> tuple[Tensor, Tensor]:
        """Where an unbroken run of frames starts, and which frames are valid; both ``[*B, T]``."""
        fix = "Collectors write it; another name is given with done_key=."
        done = get_tensor(tensordict, self.done_key, fix=fix)
        check_bool(repr(self.done_key), done)
        done = per_frame(done, tensordict.ndim)
        starts = torch.cat([torch.ones_like(done[..., :1]), done[..., :-1]], -1)
        for key in self.cut_keys:
            fix = "Append torchrl's InitTracker() to the environment, or pass cut_keys=()."
            cut = get_tensor(tensordict, key, fix=fix)
            check_bool(repr(key), cut)
            starts = starts | per_frame(cut, tensordict.ndim)
        valid = valid_mask(tensordict, self.mask_key)
        check_trajectories(tensordict, done, dim, mask=valid, key=self.traj_key)
        if valid is None:
            return starts, torch.ones_like(starts)
        if not valid.any():
            raise ValueError(f"{self.mask_key!r} masks every frame: there is nothing to cut.")
        # A frame after a gap starts a run, too.
        gap = torch.cat([torch.ones_like(valid[..., :1]), ~valid[..., :-1]], -1)
        return starts | gap, valid

    def _states(self, tensordict: TensorDictBase) -> list[NestedKey]:
        if self.state_keys is None:
            leaves = tensordict.keys(True, True)
            name = lambda key: key if isinstance(key, str) else key[-1]  # noqa: E731
            return [k for k in leaves if name(k) in _TORCHRL_STATES and k[0] != "next"]
        for key in self.state_keys:
            state = get_tensor(
                tensordict,
                key,
                fix="The policy must store its recurrent state at every step: append "
                "lstm.make_tensordict_primer() to the environment.",
            )
            frames = state.new_empty(state.shape[: tensordict.ndim])
            check_same_shape(
                {"the batch": state.new_empty(tensordict.batch_size), repr(key): frames}
            )
        return self.state_keys

    def _restore_states(self, sequences: TensorDictBase) -> TensorDictBase:
        restored = sequences.copy()
        for key in self._states(sequences):
            following = sequences.get(("next", *((key,) if isinstance(key, str) else key)), None)
            if following is not None:
                state = sequences.get(key)
                restored.set(key, torch.cat([state[:, :1], following[:, :-1]], 1))
        return restored


def _cut(starts: Tensor, valid: Tensor, seq_len: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cut runs of frames into sequences.

    Returns, of the valid frames in order, the position in the flattened batch and the offset in
    their sequence; and the length of every sequence.
    """
    position = valid.flatten().nonzero().squeeze(-1)
    starts = starts.flatten()[position]
    order = torch.arange(len(position), device=position.device)
    run_start = torch.where(starts, order, 0).cummax(0).values
    offset = order - run_start
    if seq_len is not None:
        offset = offset % seq_len
    sequence_start = (offset == 0).nonzero().squeeze(-1)
    length = torch.diff(sequence_start, append=order.new_tensor([len(order)]))
    return position, offset, length
