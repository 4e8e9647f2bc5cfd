"""The frames or sequences of a batch, shuffled into minibatches once an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey

from ppokit._keys import MASK_KEY, get_if_any


class Drawn:
    """A random order of elements, and its state."""

    padded: float | None = None  #: share of padding in the minibatches so far, where there is any

    def __init__(self, *, shuffle: bool, generator: torch.Generator) -> None:
        self.shuffle, self.generator = shuffle, generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return where the random numbers of the order are."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ValueError: it is no state of a generator on the CPU.
        """
        own, given = self.generator.get_state(), state["generator"]
        if given.shape != own.shape or given.dtype != own.dtype:
            raise ValueError(
                f"the random state has shape {list(given.shape)} and dtype {given.dtype}; that of "
                f"a torch.Generator has {list(own.shape)} and {own.dtype}."
            )
        self.generator.set_state(given.cpu())


class Minibatches(Drawn):
    """Draws each frame of a batch once an epoch.

    What is needed of a batch is gathered in a new order into storage of its own, once an epoch, and
    the minibatches are views of that: they hold until the next epoch begins.
    """

    _storage: TensorDict | None = None

    def elements(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
        """Return the valid frames of a batch ``[*B]`` as ``[N]``, with these entries alone."""
        mask = get_if_any(batch, MASK_KEY)
        frames = batch.select(*keys).exclude(MASK_KEY).reshape(-1)
        return frames if mask is None else frames[mask.reshape(-1)]

    def size(self, elements: TensorDictBase, frames: int) -> int:
        """Return how many elements a minibatch of so many frames has."""
        return min(frames, len(elements))

    def first(self, elements: TensorDictBase, size: int) -> TensorDictBase:
        """Return the first elements as a minibatch, with no random number drawn."""
        return elements[:size]  # pyright: ignore[reportReturnType]

    def epoch(
        self, elements: TensorDictBase, sizes: list[int]
    ) -> Iterator[tuple[TensorDictBase, float]]:
        """Yield the minibatches and how many frames are in each.

        Args:
            elements: frames ``[N]``.
            sizes: frames in each minibatch, N together.
        """
        storage, order = self._storage_for(elements), None
        if self.shuffle:
            count = len(elements)
            order = torch.randperm(count, generator=self.generator).to(elements.device or "cpu")
        for key, source in elements.items(True, True):
            target = storage.get(key)
            if order is None:
                target.copy_(source)
            else:
                torch.index_select(source, 0, order, out=target)
        # Split anew in each epoch: a loss may have written to its minibatch.
        for part, size in zip(storage.split(sizes), sizes, strict=True):
            yield part, float(size)

    def _storage_for(self, elements: TensorDictBase) -> TensorDict:
        storage = self._storage
        if storage is None or not _are_alike(storage, elements):
            storage = self._storage = TensorDict(
                {key: torch.empty_like(x.contiguous()) for key, x in elements.items(True, True)},
                elements.batch_size,
                device=elements.device,
                names=elements.names if elements._has_names() else None,
            )
        return storage


def _are_alike(a: TensorDictBase, b: TensorDictBase) -> bool:
    keys = list(a.keys(True, True))
    return (
        a.batch_size == b.batch_size
        and set(keys) == set(b.keys(True, True))
        and all(
            (x := a.get(key)).shape == (y := b.get(key)).shape
            and x.dtype == y.dtype
            and x.device == y.device
            for key in keys
        )
    )
