"""The frames or sequences of a batch, shuffled into minibatches in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from ppokit._batch import (
    BURN_IN_KEY,
    as_key,
    check_not_cut,
    check_stored,
    is_functional,
    key_parts,
    mask_key_of,
    memories_in,
    network_of,
    state_keys,
    stored_keys,
    valid_mask,
)
from ppokit._checks import choice
from ppokit._state import check_names
from ppokit.sequences.batcher import BUCKETS, SequenceBatcher
from ppokit.sequences.cutting import Lengths
from ppokit.update.keys import count_frames

AT_ONCE = 2**23  # bytes of minibatches that are gathered together, at most


class ShuffledMinibatches:
    """The random order of minibatches, and its state."""

    shuffle = choice(False, True)
    #: steps of the minibatches so far that are padding, and all steps, where there is any
    padded: tuple[float, float] | None = None

    def __init__(self, loss: nn.Module, *, shuffle: bool, generator: torch.Generator) -> None:
        self.loss, self.shuffle, self.generator = loss, shuffle, generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the random numbers of the order."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        check_names(state, ("generator",), "the order of a PPOUpdate")
        self.generator.set_state(state["generator"].cpu())


class FrameMinibatches(ShuffledMinibatches):
    """Puts each frame of a batch into one minibatch an epoch.

    Several small minibatches are gathered together, and are views of that; a large one alone.
    """

    batcher = None  #: of sequences

    def count(self, batch: TensorDictBase) -> int:
        """Return how many frames are valid."""
        return count_frames(batch, mask_key_of(self.loss))

    def elements(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
        """Return the valid frames of a batch ``[*B]`` as ``[N]``, with these entries alone."""
        key, frames = mask_key_of(self.loss), batch.select(*keys)
        mask = valid_mask(batch, key)
        if mask is None:
            return frames.reshape(-1)
        return frames.exclude(key)[mask.nonzero(as_tuple=True)]  # one search for all entries

    def epoch(
        self, elements: TensorDictBase, sizes: list[int]
    ) -> Iterator[tuple[TensorDictBase, float]]:
        """Yield minibatches of these sizes, and how many frames are in each."""
        is_shuffled = self.shuffle and len(sizes) > 1  # a minibatch of all frames has no order
        order = self._order(elements) if is_shuffled else None
        tensors = (x for x in elements.values(True, True) if isinstance(x, torch.Tensor))
        held = sum(x.numel() * x.element_size() for x in tensors)
        start, several = 0, max(1, AT_ONCE * len(elements) // (held * sizes[0] or 1))
        for first in range(0, len(sizes), several):
            some = sizes[first : first + several]
            at = slice(start, start + sum(some))
            # Without an order a copy, too: a network may work in place.
            copy: Any = elements[at].clone() if order is None else elements[order[at]]
            yield from zip(copy.split(some), map(float, some), strict=True)
            start = at.stop

    def _order(self, elements: TensorDictBase) -> torch.Tensor:
        """Return a random order. On a device it is drawn there, from a seed drawn here."""
        count, tensors = len(elements), elements.values(True, True)  # may name no device itself
        of_tensors = (x.device for x in tensors if isinstance(x, torch.Tensor))
        device = next(of_tensors, torch.device("cpu"))
        if device.type in ("cpu", "meta"):
            return torch.randperm(count, generator=self.generator).to(device)
        seed = torch.randint(2**62, (), generator=self.generator)
        generator = torch.Generator(device).manual_seed(int(seed))
        return torch.randperm(count, generator=generator, device=device)


class SequenceMinibatches(ShuffledMinibatches):
    """Puts each sequence of a batch into one minibatch an epoch, with states burnt in.

    Minibatches hold sequences of similar length; but of any length where the loss normalizes the
    advantage per minibatch, which would otherwise compare short episodes with short ones alone.
    """

    def __init__(
        self,
        batcher: SequenceBatcher,
        loss: nn.Module,
        *,
        shuffle: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__(loss, shuffle=shuffle, generator=generator)
        self.batcher = batcher

    def count(self, batch: TensorDictBase) -> int:
        """Return how many sequences a batch has."""
        check_stored(batch, stored_keys(*self._recurrent_networks()))
        check_not_cut(batch, who="PPOUpdate")
        return len(self.batcher.places(batch.select(*self._keys_of_batcher, strict=False)))

    def elements(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
        """Return the sequences of a batch ``[N, L]``, with these entries."""
        remembered = [as_key(key_parts(key)[1:]) for key in memories_in(batch)]
        read = (*keys, *remembered, *self._keys_of_batcher)
        sequences = self.batcher(batch.select(*read, strict=False))
        return sequences.select(*keys, *self.batcher.out_keys, BURN_IN_KEY, strict=False)

    @property
    def _keys_of_batcher(self) -> list[NestedKey]:
        return [self.batcher.mask_key, self.batcher.traj_key, *self.batcher.in_keys]

    def epoch(
        self, elements: TensorDictBase, sizes: list[int]
    ) -> Iterator[tuple[TensorDictBase, float]]:
        """Yield as many minibatches as there are sizes, and how many valid frames are in each."""
        minibatches = self.batcher.minibatches_with_lengths(
            elements,
            len(sizes),
            buckets=1 if getattr(self.loss, "normalize_advantage", False) else BUCKETS,
            shuffle=self.shuffle,
            generator=self.generator,
        )
        cells = valid = 0.0
        for minibatch, lengths in minibatches:
            ready = self._with_burn_in(minibatch, lengths)
            frames = float(lengths.frames.sum())
            cells, valid = cells + ready.numel(), valid + frames
            self.padded = cells - valid, cells
            yield ready, frames

    def _with_burn_in(self, minibatch: TensorDictBase, lengths: Lengths) -> TensorDictBase:
        if not self.batcher.burn_in:
            return minibatch
        networks = self._recurrent_networks()
        if not networks:
            raise TypeError(
                f"burn_in needs networks with a recurrent state, and {type(self.loss).__name__} "
                "has none at actor_network or critic_network."
            )
        if is_functional(self.loss):
            raise ValueError("burn_in runs the networks: build the loss with functional=False.")
        return self.batcher.refresh(minibatch, *networks, lengths=lengths)

    def _recurrent_networks(self) -> list[Any]:
        networks = [network_of(self.loss, x) for x in ("actor_network", "critic_network")]
        return [x for x in networks if x is not None and state_keys(x)]
