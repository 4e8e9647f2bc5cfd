"""SequenceBatcher: a batch as sequences, as minibatches of sequences, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor, nn

from ppokit._batch import (
    BURN_IN_KEY,
    INDEX_KEY,
    MASK_KEY,
    STATE_FIX,
    TRAJ_KEY,
    as_key,
    check_flags,
    check_not_cut,
    check_tensordict,
    check_time_is_last,
    check_trajectories,
    get_if_any,
    get_tensor,
    is_memory,
    is_of_transformer,
    memories_in,
    memory_at,
    per_frame,
    steps_key,
    time_dim,
    valid_mask,
)
from ppokit._checks import whole
from ppokit.sequences import cutting
from ppokit.sequences.burn_in import burned_in_states, without_burn_in
from ppokit.sequences.cutting import SHAPE_KEY, Lengths, lengths_of

BUCKETS = 8  # minibatches in a pool, by default
_FIX = "Pass the result of the batcher, with the entries that it wrote."


class SequenceBatcher(TensorDictModuleBase):
    """Cut a collected batch ``[*B, T]`` into sequences ``[N, L]`` for recurrent training.

    A sequence starts at every row's start, after every done, at every True of a cut key (episode
    starts), and every ``seq_len`` steps from there. No sequence crosses the end of a trajectory,
    and each valid frame is in the loss exactly once.

    - The recurrent state that was stored at a sequence's first step comes with it, expanded over
      the sequence without a copy. So does the memory of a transformer, which is made of the inputs
      of the earlier frames of the row, and of the memory before the row.
    - With ``burn_in``, up to so many preceding frames of the same episode come first, and L is
      ``burn_in + seq_len``. They are False in the mask, and True at ``("sequence", "burn_in")``.
      :meth:`refresh` computes the states after them, without gradient. Give its result to the loss,
      which takes frames of burn-in for padding.
    - Short sequences are padded at the end, by copies of the sequence's last frame with False in
      the cut keys. The mask of the frames in the loss is at ``("collector", "mask")``, ``[N, L]``,
      which torchrl's losses read.
    - The output has the names ``[None, "time"]``. In a :class:`~torchrl.data.ReplayBuffer` the
      elements are sequences.

    A stored state is exact until the first step of the optimizer. Then it is stale, because other
    parameters computed it. With burn-in the present networks compute it again, from a stale state
    ``burn_in`` steps before. No gradient crosses the start of the frames in the loss.
    (Truncated back-propagation through time: Williams and Peng, 1990, Neural Computation 2(4).
    Stale states and burn-in: Kapturowski et al., 2019, R2D2, section 3.)

    Args:
        seq_len: longest sequence, in steps; None for whole trajectories.
        burn_in: largest number of preceding frames; none precede with ``seq_len=None``.
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
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ppokit import SequenceBatcher
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

    seq_len = whole(optional=True)
    burn_in = whole(0)

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
        self.seq_len, self.burn_in = seq_len, burn_in
        cut_keys = [cut_keys] if isinstance(cut_keys, str) else cut_keys
        state_keys = [state_keys] if isinstance(state_keys, str) else state_keys
        self.state_keys = None if state_keys is None else [as_key(key) for key in state_keys]
        self.cut_keys = [as_key(key) for key in cut_keys]
        self.done_key, self.mask_key = as_key(done_key), as_key(mask_key)
        self.traj_key = as_key(traj_key)
        self.in_keys: list[NestedKey] = [self.done_key, *self.cut_keys, *(self.state_keys or [])]
        self.out_keys: list[NestedKey] = [self.mask_key, INDEX_KEY, SHAPE_KEY]
        if burn_in:
            self.out_keys.append(BURN_IN_KEY)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the sequences of a batch, ``[N, L]``.

        ``("sequence", "index")`` holds the position of each frame in the flattened batch, and
        ``("sequence", "batch_size")`` the batch's shape, for :meth:`unbatch`.
        """
        return self._gather(self.places(tensordict), tensordict)

    def places(self, batch: TensorDictBase) -> TensorDict:
        """Return the positions of the sequences in a batch, without its entries, ``[N, L]``.

        With them, :meth:`minibatches` gathers each minibatch from the batch, without a copy of it.
        """
        check_tensordict(batch, who="SequenceBatcher")
        time_dim(batch, who="SequenceBatcher")
        check_time_is_last(batch, who="SequenceBatcher")
        # Without a primer torchrl's modules write states and never read one, without a warning.
        keys = self.state_keys
        for key in cutting.find_states(batch, written=True) if keys is None else keys:
            get_tensor(batch, key, fix=STATE_FIX)
            check_not_cut(batch, who="SequenceBatcher")
        burn_in, counted, index = cutting.cut(*self._starts(batch), self.seq_len, self.burn_in)
        names = [None, "time"]
        positions = TensorDict({}, index.shape, device=batch.device, names=names)
        shape = torch.stack([index.new_full((), size) for size in batch.batch_size])
        positions.set(self.mask_key, counted)
        positions.set(INDEX_KEY, index)
        positions.set(SHAPE_KEY, shape.expand(*index.shape, -1))
        if self.burn_in:
            positions.set(BURN_IN_KEY, burn_in)
        return positions

    def unbatch(self, sequences: TensorDictBase | Iterable[TensorDictBase]) -> TensorDictBase:
        """Return the batch of some sequences: the inverse of calling the batcher.

        Sequences may come in any order, in several parts (all minibatches, trimmed or not), and may
        have further entries. Masked frames of the batch are zeros; frames of burn-in are left out.
        A recurrent state inside a sequence is the ``("next", state)`` of the step before; without
        that entry it is the state of the sequence's first step. The memory of a transformer, which
        is that of a row, is left out.

        Raises:
            KeyError: the sequences lack an entry that the batcher writes.
        """
        frames, index, shape = [], [], []
        for part in [sequences] if isinstance(sequences, TensorDictBase) else sequences:
            check_tensordict(part, who="SequenceBatcher")
            mask = get_tensor(part, self.mask_key, fix=_FIX)
            index.append(get_tensor(part, INDEX_KEY, fix=_FIX)[mask])
            shape = get_tensor(part, SHAPE_KEY, fix=_FIX)[0, 0].tolist()
            restored = part.exclude(*filter(is_of_transformer, part.keys()))
            for key in self._states(restored):  # before a step it is that after the one before
                after = get_if_any(part, cutting.next_key(key))
                if after is not None:
                    restored.set(key, torch.cat([part.get(key)[:, :1], after[:, :-1]], 1))
            frames.append(restored.exclude(self.mask_key, "sequence").filter_empty_()[mask])
        if not frames:
            raise ValueError("unbatch() got no sequences: pass those that the batcher returned.")
        together: Any = frames[0] if len(frames) == 1 else torch.cat(frames)
        places = torch.cat(index)
        whole: Any = together.new_zeros(torch.Size([math.prod(shape)]))
        whole[places] = together
        whole = whole.reshape(shape)
        whole.names = [None] * (len(shape) - 1) + ["time"]
        if len(places) < whole.numel():
            valid = torch.zeros(whole.numel(), dtype=torch.bool, device=places.device)
            whole.set(self.mask_key, valid.index_fill(0, places, True).reshape(shape))
        return whole

    def minibatches(
        self,
        sequences: TensorDictBase,
        n: int,
        *,
        batch: TensorDictBase | None = None,
        buckets: int = BUCKETS,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> Iterator[TensorDictBase]:
        """Yield the sequences in ``n`` parts with nearly equal numbers of valid frames, each once.

        Sequences of similar length share a minibatch, which is as wide as its longest. The shuffled
        sequences are divided into pools of ``buckets`` minibatches; each pool is sorted by length,
        and the minibatches come in random order.

        Args:
            sequences: the result of the batcher, or of :meth:`places` with ``batch``.
            n: number of minibatches.
            batch: the batch that was cut, to take the entries from.
            buckets: minibatches in a pool. 1 sorts nothing: each minibatch is a random sample of
                the sequences. More of them leave less padding; but then an advantage that is
                normalized per minibatch is compared with that of sequences of similar length only.
            shuffle: draw a new order of sequences; False keeps the order, and sorts nothing.
            generator: the source of that order; None means torch's global one.

        Raises:
            ValueError: there are fewer sequences than minibatches, or the batch is not the one that
                was cut.
            KeyError: the sequences lack the mask.
        """
        parts = self.minibatches_with_lengths(
            sequences, n, batch=batch, buckets=buckets, shuffle=shuffle, generator=generator
        )
        return (part for part, _ in parts)

    def minibatches_with_lengths(
        self,
        sequences: TensorDictBase,
        n: int,
        *,
        batch: TensorDictBase | None = None,
        buckets: int = BUCKETS,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[TensorDictBase, Lengths]]:
        """Yield the minibatches of :meth:`minibatches`, each with its lengths on the host.

        The lengths of all sequences are read from a device once. :meth:`refresh` takes them.
        """
        shape = get_tensor(sequences, SHAPE_KEY, fix=_FIX)
        if batch is not None and (of_cut := shape[0, 0].tolist()) != list(batch.batch_size):
            raise ValueError(
                f"The batch has shape {list(batch.batch_size)}, but the sequences were cut from "
                f"one of shape {of_cut}. Pass the batch that was given to places()."
            )
        lengths = lengths_of(*self._masks(sequences))
        assignment = cutting.assign_to_minibatches(
            lengths, n, buckets=buckets, shuffle=shuffle, generator=generator
        )
        states = {key: sequences.get(key) for key in self._states(sequences)}
        others = sequences.exclude(*states).copy()
        others.names = None  # indices are found faster without

        def minibatch(rows: Tensor, chosen: Lengths) -> tuple[TensorDictBase, Lengths]:
            part = cutting.take(others, states, rows, max(1, int(chosen.width.max())))
            return part if batch is None else self._gather(part, batch), chosen

        return map(minibatch, assignment, lengths.split(assignment))

    def refresh(
        self, sequences: TensorDictBase, *networks: nn.Module, lengths: Lengths | None = None
    ) -> TensorDictBase:
        """Return the frames in the loss, with the states that the networks compute by burn-in.

        The networks run over the frames of burn-in, without gradient and as they are now, from the
        states stored before them. The states after burn-in come with the sequences returned,
        ``[n, seq_len]`` or less, which hold no burn-in. Only the modules that the states need run.
        Without burn-in the states are the stored ones.

        Args:
            sequences: the result of the batcher, or a minibatch of it.
            networks: with recurrent modules like torchrl's, which read a state and write
                ``("next", state)``: the actor, and the critic if it has states of its own.
            lengths: of the sequences, from :meth:`minibatches_with_lengths`; None reads them from
                the sequences, for which the host waits for a device.

        Raises:
            KeyError: the sequences lack an entry that is needed.
            ValueError: a network has no state, or a state has no network.
        """
        if not self.burn_in:
            return sequences
        counted, burn_in = self._masks(sequences)
        device = get_tensor(sequences, BURN_IN_KEY, fix=_FIX).device
        lengths = lengths_of(counted, burn_in) if lengths is None else lengths
        states = burned_in_states(sequences, lengths.burn_in, networks, device)
        for key in self._states(sequences):
            if key not in states:
                raise ValueError(
                    f"{key!r} is a state that none of the networks given to refresh writes: it "
                    "would be that of another step. Pass the network that has it, too."
                )
        frames = sequences.exclude(*states, BURN_IN_KEY)
        after, real = without_burn_in(frames, lengths, device)
        self._clear_starts(after, real)
        after.set(self.mask_key, after.get(self.mask_key) & real)
        for key, state in states.items():
            after.set(key, cutting.expand(state, real.shape[1]))
        return after

    def _starts(self, batch: TensorDictBase) -> tuple[Tensor, Tensor | None]:
        """Return where runs of frames start ``[*B, T]``, and the mask of valid frames or None."""
        ndim = batch.ndim
        done = get_tensor(batch, self.done_key, fix="Collectors write it; see done_key=.")
        check_flags(self.done_key, done)
        valid = valid_mask(batch, self.mask_key)
        done = per_frame(done, ndim)
        starts = torch.ones_like(done)
        starts[..., 1:] = done[..., :-1]
        for key in self.cut_keys:
            fix = "Append torchrl's InitTracker() to the environment, or pass cut_keys=()."
            cuts = get_tensor(batch, key, fix=fix)
            check_flags(key, cuts)
            starts |= per_frame(cuts, ndim)
        check_trajectories(batch, done, ndim - 1, mask=valid, key=self.traj_key)
        if valid is not None:
            if not valid.any():
                raise ValueError(f"{self.mask_key!r} masks every frame: there is nothing to cut.")
            starts[..., 1:] |= ~valid[..., :-1]  # a frame after a gap starts a run, too
        return starts, valid

    def _gather(self, positions: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
        """Return the sequences at these positions of the batch."""
        states, index = self._states(batch), positions.get(INDEX_KEY)
        sequences = cutting.gather(batch.exclude(self.mask_key, *states), index)
        counted, burn_in = self._masks(positions)
        self._clear_starts(sequences, counted if burn_in is None else counted | burn_in)
        first = torch.unravel_index(index[:, 0], batch.batch_size)
        for key in states:
            if not is_memory(key):
                state = batch.get(key)[first]
            elif self.burn_in:
                raise ValueError(
                    f"burn_in computes stale states again, and {key!r} holds inputs, which are "
                    "never stale. Leave burn_in out."
                )
            else:
                state = memory_at(batch, key, index[:, 0])[0]
                sequences.get(steps_key(key))[..., 1] = torch.arange(index.shape[1])
            sequences.set(key, cutting.expand(state, index.shape[1]))
        return sequences.update(positions)

    def _clear_starts(self, sequences: TensorDictBase, real: Tensor) -> None:
        """Set the cut keys to False in the padding."""
        for key in self.cut_keys:
            flag = get_if_any(sequences, key)
            if flag is not None:
                flag.masked_fill_(~expand_as_right(real, flag), False)

    def _masks(self, sequences: TensorDictBase) -> tuple[Tensor, Tensor | None]:
        """Return the frames in the loss, and those of burn-in if there are any, ``[N, L]``."""
        return get_tensor(sequences, self.mask_key, fix=_FIX), get_if_any(sequences, BURN_IN_KEY)

    def _states(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the stored states; entries may have been selected."""
        memories = memories_in(tensordict)
        if self.state_keys is None:
            return cutting.find_states(tensordict) + memories
        keys = dict.fromkeys([*self.state_keys, *memories])
        there = (key for key in keys if get_if_any(tensordict, key) is not None)
        return [key for key in there if is_memory(key) or not is_of_transformer(key)]
