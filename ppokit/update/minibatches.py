"""The frames or sequences of a batch, shuffled into minibatches once an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey

from ppokit._keys import MASK_KEY, get_if_any


class Minibatches:
    """Draws each element of a batch once an epoch.

    What is needed of a batch is gathered in a new order into storage of its own, once an epoch, and
    the minibatches are views of that: they hold until the next epoch begins.
    """

    def __init__(self, *, shuffle: bool, generator: torch.Generator) -> None:
        self.shuffle, self.generator = shuffle, generator
        self._storage: TensorDict | None = None
        self._views: list[TensorDictBase] = []
        self._size = 0

    def epoch(self, elements: TensorDictBase, size: int) -> Iterator[tuple[TensorDictBase, float]]:
        """Yield the minibatches and how many valid frames are in each; the last may be smaller.

        Args:
            elements: frames ``[N]`` or sequences ``[N, L]``.
            size: elements in a minibatch.
        """
        views = self._prepare(elements, size)
        storage, count = self._storage, len(elements)
        assert storage is not None
        order = None
        if self.shuffle:
            order = torch.randperm(count, generator=self.generator).to(elements.device or "cpu")
        for key, source in elements.items(True, True):
            target = storage.get(key)
            if order is None:
                target.copy_(source)
            else:
                torch.index_select(source, 0, order, out=target)
        yield from zip(views, _valid_frames(storage, views, size), strict=True)

    def _prepare(self, elements: TensorDictBase, size: int) -> list[TensorDictBase]:
        if self._storage is None or size != self._size or not _are_alike(self._storage, elements):
            self._storage = TensorDict(
                {key: torch.empty_like(x.contiguous()) for key, x in elements.items(True, True)},
                elements.batch_size,
                device=elements.device,
                names=elements.names if elements._has_names() else None,
            )
            self._views = list(self._storage.split(size))
            self._size = size
        return self._views


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


def _valid_frames(
    storage: TensorDictBase, views: Sequence[TensorDictBase], size: int
) -> list[float]:
    mask = get_if_any(storage, MASK_KEY)
    if mask is None:
        return [float(view.numel()) for view in views]
    by_element = mask.reshape(len(storage), -1).sum(-1)
    return torch.stack([part.sum() for part in by_element.split(size)]).tolist()


def frames_of(batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
    """Return the valid frames of a batch ``[*B]`` as ``[N]``, with these entries alone."""
    mask = get_if_any(batch, MASK_KEY)
    frames = batch.select(*keys).exclude(MASK_KEY).reshape(-1)
    return frames if mask is None else frames[mask.reshape(-1)]
