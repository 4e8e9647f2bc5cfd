"""The sequences of a batch, in minibatches of similar length, with states burnt in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Generator

from ppokit._recurrent import check_stored, state_keys, stored_keys
from ppokit.sequences import SequenceBatcher
from ppokit.update.minibatches import Drawn


class SequenceMinibatches(Drawn):
    """Draws each sequence of a batch once an epoch.

    An advantage that the loss normalises per minibatch is compared with that of all kinds of
    sequences: then they are not put together by length.

    Args:
        batcher: cuts the batch.
        loss: whose networks find the states anew after burn-in.
        shuffle: draw a new order in each epoch.
        generator: of the order.
    """

    def __init__(
        self, batcher: SequenceBatcher, loss: Any, *, shuffle: bool, generator: Generator
    ) -> None:
        super().__init__(shuffle=shuffle, generator=generator)
        self.batcher, self.loss = batcher, loss
        alike = not getattr(loss, "normalize_advantage", False)
        self._options: dict[str, Any] = {} if alike else {"buckets": 1}

    def elements(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
        """Return the sequences of a batch ``[N, L]``, with these entries."""
        batcher = self.batcher
        check_stored(batch, stored_keys(*self._recurrent_networks().values()))
        of_batcher = [batcher.mask_key, batcher.traj_key, *batcher.in_keys]
        sequences = batcher(batch.select(*keys, *of_batcher, strict=False))
        return sequences.select(*keys, *batcher.out_keys)

    def size(self, elements: TensorDictBase, frames: int) -> int:
        """Return how many sequences a minibatch of so many frames has."""
        return min(max(1, frames // (self.batcher.seq_len or elements.shape[1])), len(elements))

    def first(self, elements: TensorDictBase, size: int) -> TensorDictBase:
        """Return the first elements as a minibatch, with no random number drawn."""
        minibatch: Any = elements[:size]
        return self._burnt_in(minibatch)

    def epoch(
        self, elements: TensorDictBase, sizes: list[int]
    ) -> Iterator[tuple[TensorDictBase, float]]:
        """Yield as many minibatches as there are sizes, and how many valid frames are in each."""
        minibatches = self.batcher.minibatches(
            elements,
            len(sizes),
            shuffle=self.shuffle,
            generator=self.generator,
            **self._options,
        )
        cells = valid = 0.0
        for minibatch in minibatches:
            ready = self._burnt_in(minibatch)
            frames = float(ready.get(self.batcher.mask_key).sum())
            cells, valid = cells + ready.numel(), valid + frames
            self.padded = 1 - valid / cells
            yield ready, frames

    def _burnt_in(self, minibatch: TensorDictBase) -> TensorDictBase:
        if not self.batcher.burn_in:
            return minibatch
        networks = self._recurrent_networks()
        if not networks:
            raise TypeError(
                f"burn_in needs networks with a recurrent state, and {type(self.loss).__name__} "
                "has none at actor_network or critic_network."
            )
        with ExitStack() as stack:
            for name in networks:
                stack.enter_context(_with_parameters(self.loss, name))
            return self.batcher.refresh(minibatch, *networks.values())

    def _recurrent_networks(self) -> dict[str, Any]:
        named = {name: getattr(self.loss, name, None) for name in _NETWORKS}
        return {
            name: network
            for name, network in named.items()
            if network is not None and state_keys(network)
        }


_NETWORKS = ("actor_network", "critic_network")


@contextmanager
def _with_parameters(loss: Any, name: str) -> Iterator[None]:
    """Let a functional loss's network have its parameters for as long as the context lasts."""
    if not loss.functional:
        yield
        return
    parameters = getattr(loss, f"{name}_params")
    with parameters.to_module(getattr(loss, name), preserve_module_state=False):
        yield
