"""SequenceBatcher: a batch as sequences, as minibatches of sequences, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._keys import MASK_KEY, TRAJ_KEY, as_key, get_if_any, get_tensor
from ppokit.sequences.assignment import assign_to_minibatches, gather_minibatches
from ppokit.sequences.burn_in import burned_in_states, without_burn_in
from ppokit.sequences.cutting import (
    check_states_are_stored,
    check_time,
    cut,
    expand,
    find_states,
    gather,
    gather_frames,
    last_true,
    lay_out,
    read_starts,
    scatter_frames,
    select_frames,
)


class SequenceBatcher(TensorDictModuleBase):
    """Cuts a collected batch ``[*B, T]`` into sequences ``[N, L]`` for recurrent training.

    A sequence starts at every row's start, after every done, at every True of a cut key (episode
    starts), and every ``seq_len`` steps from there. No sequence crosses the end of a trajectory,
    and each valid frame is in the loss exactly once: nothing is dropped, nothing counted twice.

    - The recurrent state that was stored at a sequence's first step comes with it, expanded over
      the sequence without being copied: the networks resume from where collection was.
    - With ``burn_in``, up to so many preceding frames of the same episode come first, and L is
      ``burn_in + seq_len``. They are under the mask, and True at ``("sequence", "burn_in")``.
      :meth:`refresh` turns them into the states that the loss starts from, without gradient. Give
      a loss what that returns: by itself it would take frames of burn-in for padding.
    - Short sequences are padded at the end. Padding repeats the sequence's last frame (so that
      every entry is one that the networks accept), with False in the cut keys; the mask of the
      frames that count is at ``("collector", "mask")``, ``[N, L]``, where torchrl's losses look.
    - The output has the names ``[None, "time"]`` and goes straight into a
      :class:`~torchrl.data.ReplayBuffer`, whose elements are then sequences.

    A stored state is exact until the first step of the optimiser. From then on it is stale: other
    parameters have written it. Burn-in lets the present networks find it again, from a stale state
    that lies ``burn_in`` steps back. No gradient crosses the start of the frames that count.
    (Truncated back-propagation through time: Williams and Peng, 1990, Neural Computation 2(4).
    Stale states and burn-in: Kapturowski et al., 2019, R2D2, section 3.)

    Args:
        seq_len: longest sequence, in steps; None for whole trajectories.
        burn_in: most frames to come first. With ``seq_len=None`` there are none that could.
        state_keys: recurrent states, stored by the policy at every step; None finds torchrl's own
            names, ``"recurrent_state_h"``, ``"recurrent_state_c"`` and ``"recurrent_state"``,
            nested ones too.
        cut_keys: bool entries that are True where an episode starts, or where the policy was given
            a reset state; ``()`` if there are none.
        done_key: the end of a trajectory.
        mask_key: where the mask is written, and read if the batch has one already.
        traj_key: trajectory ids; one that changes without a done raises ValueError.

    Raises:
        ValueError: ``seq_len < 1``, ``burn_in < 0``, the batch is empty, shapes differ, or the time
            order is unknown or lost.
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
        >>> SequenceBatcher(2, burn_in=1, cut_keys=())(batch)["x"]
        tensor([[0, 1, 1],
                [2, 3, 3],
                [3, 4, 4]])
    """

    def __init__(
        self,
        seq_len: int | None,
        *,
        burn_in: int = 0,
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
        if type(burn_in) is not int or burn_in < 0:
            raise ValueError(
                f"burn_in must be a whole number of steps, 0 for none; got {burn_in!r}."
            )
        self.seq_len, self.burn_in = seq_len, burn_in
        self.state_keys = None if state_keys is None else [as_key(key) for key in state_keys]
        self.cut_keys = [as_key(key) for key in cut_keys]
        self.done_key, self.mask_key, self.traj_key = (
            as_key(done_key),
            as_key(mask_key),
            as_key(traj_key),
        )
        self.index_key: NestedKey = ("sequence", "index")
        self.shape_key: NestedKey = ("sequence", "batch_size")
        self.burn_in_key: NestedKey = ("sequence", "burn_in")
        self.in_keys: list[NestedKey] = [self.done_key, *self.cut_keys, *(self.state_keys or [])]
        self.out_keys: list[NestedKey] = [self.mask_key, self.index_key, self.shape_key]
        if burn_in:
            self.out_keys.append(self.burn_in_key)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the sequences of a batch, ``[N, L]``.

        ``("sequence", "index")`` holds the position of each frame in the flattened batch, and
        ``("sequence", "batch_size")`` the batch's shape, for :meth:`unbatch`.
        """
        return self._gather(self.places(tensordict), tensordict)

    def places(self, batch: TensorDictBase) -> TensorDict:
        """Return the positions of the sequences in a batch, without its entries, ``[N, L]``.

        For :meth:`minibatches`, which then takes each minibatch straight from the batch, so that
        the sequences need no memory of their own.
        """
        check_time(batch)
        check_states_are_stored(batch, self.state_keys)
        starts, valid = read_starts(
            batch,
            done_key=self.done_key,
            cut_keys=self.cut_keys,
            mask_key=self.mask_key,
            traj_key=self.traj_key,
        )
        cuts = cut(starts, valid, self.seq_len, self.burn_in)
        # seq_len is the width even if all are shorter: a replay buffer's storage takes one width.
        width = int(cuts.length.max()) if self.seq_len is None else self.burn_in + self.seq_len
        burn_in, counted, index = lay_out(cuts, width)
        names: Any = [None, "time"]
        positions = TensorDict({}, index.shape, device=batch.device, names=names)
        positions.set(self.mask_key, counted)
        positions.set(self.index_key, index)
        shape = torch.tensor(batch.batch_size, device=index.device)
        positions.set(self.shape_key, shape.expand(*index.shape, -1))
        if self.burn_in:
            positions.set(self.burn_in_key, burn_in)
        return positions

    def unbatch(self, sequences: TensorDictBase | Iterable[TensorDictBase]) -> TensorDictBase:
        """Put every frame back where it was: the inverse of calling the batcher.

        Sequences may come in any order, in several parts (all minibatches, trimmed or not), and may
        have gained entries. Frames that were masked out of the batch come back as zeros; those of
        burn-in are left out. A recurrent state inside a sequence comes from the ``("next", state)``
        of the step before; without that entry it is the state of the sequence's first step.

        Raises:
            KeyError: the sequences lack an entry that the batcher writes.
        """
        fix = "unbatch takes what the batcher returned, with all of its sequences."
        leave_out = [self.mask_key, self.index_key, self.shape_key, self.burn_in_key]
        frames, index, shape = [], [], None
        for part in _parts(sequences):
            mask = get_tensor(part, self.mask_key, fix=fix)
            index.append(get_tensor(part, self.index_key, fix=fix)[mask])
            shape = get_tensor(part, self.shape_key, fix=fix)[0, 0].tolist()
            states = self._states(part)
            frames.append(select_frames(part, mask, states=states, leave_out=leave_out))
        if shape is None:
            raise ValueError("unbatch got no sequences.")
        together: Any = frames[0] if len(frames) == 1 else torch.cat(frames)
        return scatter_frames(together, torch.cat(index), shape, self.mask_key)

    def minibatches(
        self,
        sequences: TensorDictBase,
        n: int,
        *,
        batch: TensorDictBase | None = None,
        buckets: int = 8,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> Iterator[TensorDictBase]:
        """Yield the sequences in ``n`` parts with nearly equal numbers of valid frames, each once.

        Sequences of similar length share a minibatch, which is as wide as its longest, so that
        there is little padding. For that the shuffled sequences are divided into pools of
        ``buckets`` minibatches; each pool is sorted by length, and the minibatches come in random
        order.

        Args:
            sequences: what the batcher returned, or :meth:`places` with ``batch``.
            n: number of minibatches.
            batch: the batch that was cut, to take the entries from.
            buckets: minibatches in a pool. 1 sorts nothing: each minibatch is a random sample of
                the sequences. More of them leave less padding; but then an advantage that is
                normalised per minibatch is compared with that of sequences of similar length only.
            shuffle: draw a new order of sequences; False keeps the order, and sorts nothing.
            generator: the source of that order; None means torch's global one.

        Raises:
            ValueError: there are fewer sequences than minibatches, ``buckets < 1``, or the batch
                is not the one that was cut.
            KeyError: the sequences lack the mask.
        """
        if batch is not None:
            self._check_batch(batch, sequences)
        counted, real = self._masks(sequences, "minibatches")
        assignment = assign_to_minibatches(
            counted, real, n, buckets=buckets, shuffle=shuffle, generator=generator
        )
        parts = gather_minibatches(sequences, assignment)
        return parts if batch is None else (self._gather(part, batch) for part in parts)

    def refresh(self, sequences: TensorDictBase, *networks: nn.Module) -> TensorDictBase:
        """Return the frames in the loss, with the states that the networks compute by burn-in.

        The networks run over the frames of burn-in, without gradient and as they are now, from the
        states stored before them. The states after burn-in are those of the sequences returned,
        ``[n, seq_len]`` or less, which hold no burn-in. Of a network only those modules run that
        its states need. Where there is no burn-in the states are the stored ones.

        Args:
            sequences: what the batcher returned, or a minibatch of it.
            networks: with recurrent modules like torchrl's, which read a state and write
                ``("next", state)``: the actor, and the critic if it has states of its own.

        Raises:
            KeyError: the sequences lack an entry that is needed.
            ValueError: a network has no state, or a state has no network.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl.modules import GRUModule
            >>> gru = GRUModule(1, 2, in_key="x", out_key="y")
            >>> zeros, done = torch.zeros(1, 5, 1), torch.zeros(1, 5, 1, dtype=torch.bool)
            >>> batch = TensorDict({"x": zeros, "is_init": done, "next": {"done": done},
            ...                     "recurrent_state": torch.zeros(1, 5, 1, 2)}, [1, 5])
            >>> batcher = SequenceBatcher(2, burn_in=1)
            >>> minibatch = batcher.refresh(batcher(batch), gru)
            >>> minibatch.shape, minibatch["recurrent_state"][:, 0].any(-1).squeeze(-1)
            (torch.Size([3, 2]), tensor([False,  True,  True]))
        """
        if not self.burn_in:
            return sequences
        counted, _ = self._masks(sequences, "refresh")
        steps = get_tensor(sequences, self.burn_in_key, fix=_fix_of("refresh")).sum(1)
        states = burned_in_states(sequences, steps, networks)
        for key in self._states(sequences):
            if key not in states:
                raise ValueError(
                    f"{key!r} is a state that none of the networks given to refresh writes: it "
                    "would be that of another step. Pass the network that has it, too."
                )
        leave_out = {*states, self.burn_in_key}
        after, real = without_burn_in(sequences, steps, last_true(counted), leave_out=leave_out)
        self._clear_starts(after, real)
        after.set(self.mask_key, after.get(self.mask_key) & real)
        for key, state in states.items():
            after.set(key, expand(state, real.shape[1]))
        return after

    def padded_fraction(self, sequences: TensorDictBase | Iterable[TensorDictBase]) -> float:
        """Return how much of sequences is padding, in one TensorDict or in all minibatches.

        Frames of burn-in are not padding.

        Example:
            >>> from tensordict import TensorDict
            >>> done = torch.zeros(1, 5, 1, dtype=torch.bool)
            >>> batcher = SequenceBatcher(4, cut_keys=())
            >>> sequences = batcher(TensorDict({"next": {"done": done}}, [1, 5]))
            >>> batcher.padded_fraction(sequences)
            0.375
            >>> batcher.padded_fraction(batcher.minibatches(sequences, 2))
            0.0
        """
        masks = [self._masks(part, "padded_fraction")[1] for part in _parts(sequences)]
        total = sum(mask.numel() for mask in masks)
        return (total - sum(int(mask.sum()) for mask in masks)) / total

    def _gather(self, positions: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
        """Return the sequences at these positions of the batch."""
        states, index = self._states(batch), positions.get(self.index_key)
        sequences = gather(batch, index, leave_out={self.mask_key, *states})
        self._clear_starts(sequences, self._masks(positions, "minibatches")[1])
        for key in states:
            at_start = gather_frames(batch.get(key), index[:, 0], batch.batch_size)
            sequences.set(key, expand(at_start, index.shape[1]))
        return sequences.update(positions)

    def _clear_starts(self, sequences: TensorDictBase, real: Tensor) -> None:
        """Set the cut keys to False in the padding."""
        for key in self.cut_keys:
            flag = get_if_any(sequences, key)
            if flag is not None:
                padding = ~real.reshape(real.shape + (1,) * (flag.ndim - 2))
                flag.masked_fill_(padding, False)

    def _masks(self, sequences: TensorDictBase, who: str) -> tuple[Tensor, Tensor]:
        """Return the frames in the loss and the frames that are not padding, ``[N, L]``."""
        counted = get_tensor(sequences, self.mask_key, fix=_fix_of(who))
        burn_in = get_if_any(sequences, self.burn_in_key)
        return counted, counted if burn_in is None else counted | burn_in

    def _states(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the stored states; entries may have been selected."""
        if self.state_keys is None:
            return find_states(tensordict)
        return [key for key in self.state_keys if get_if_any(tensordict, key) is not None]

    def _check_batch(self, batch: TensorDictBase, positions: TensorDictBase) -> None:
        fix = _fix_of("minibatches")
        shape = get_tensor(positions, self.shape_key, fix=fix)[0, 0].tolist()
        get_tensor(positions, self.index_key, fix=fix)
        if shape != list(batch.batch_size):
            raise ValueError(
                f"The batch has shape {list(batch.batch_size)}, but the sequences were cut from "
                f"one of shape {shape}. Pass the batch that was given to places()."
            )


def _parts(sequences: TensorDictBase | Iterable[TensorDictBase]) -> Iterable[TensorDictBase]:
    return [sequences] if isinstance(sequences, TensorDictBase) else sequences


def _fix_of(who: str) -> str:
    return f"{who} takes what the batcher returned, with the entries that it wrote."
