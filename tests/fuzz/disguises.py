"""The same batch in other layouts, and batches with one damaged entry."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

# -- other layouts ------------------------------------------------------


def _leaves(change: Callable[[Tensor], Tensor]) -> Callable[[TensorDictBase], TensorDictBase]:
    def changed(batch: TensorDictBase) -> TensorDictBase:
        result = batch.apply(lambda x: change(x) if x.ndim else x)
        assert result is not None  # it is None for a filter alone
        return result

    return changed


def _last_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def _every_other(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def _backed_by_one(x: Tensor) -> Tensor:
    """A view into the middle of something larger."""
    return torch.cat([x[:1], x, x[:1]])[1:-1] if len(x) else x


def _lazy(dim: int) -> Callable[[TensorDictBase], TensorDictBase]:
    def stacked(batch: TensorDictBase) -> TensorDictBase:
        if batch.ndim <= dim or not batch.shape[dim]:
            return batch
        lazy = LazyStackedTensorDict.lazy_stack([x.clone() for x in batch.unbind(dim)], dim)
        if any(batch.names):
            lazy.names = batch.names
        return lazy

    return stacked


def _memory_mapped(batch: TensorDictBase) -> TensorDictBase:
    """Unlocked, as a storage's samples are."""
    if isinstance(batch, LazyStackedTensorDict) or not batch.numel():
        return batch
    with tempfile.TemporaryDirectory() as folder:  # the mappings outlive it
        return batch.memmap(folder).clone(recurse=False)


def _with_more(batch: TensorDictBase) -> TensorDictBase:
    batch = batch.clone(False)
    batch["remark"] = "not a tensor"
    batch["beside", "pixels"] = torch.zeros(*batch.shape, 2, 3, dtype=torch.uint8)
    return batch


DISGUISES: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "last dimension first": _leaves(_last_first),
    "every other element": _leaves(_every_other),
    "part of a larger tensor": _leaves(_backed_by_one),
    "lazy stack of rows": _lazy(0),
    "lazy stack of steps": _lazy(1),
    "memory-mapped": _memory_mapped,
    "other entries": _with_more,
}


def disguises() -> st.SearchStrategy[list[str]]:
    """Names of :data:`DISGUISES`, to be applied in this order."""
    return st.lists(st.sampled_from(list(DISGUISES)), max_size=3, unique=True)


def disguised(batch: TensorDictBase, names: list[str]) -> TensorDictBase:
    """Return a copy in these layouts."""
    batch = batch.clone()
    for name in names:
        batch = DISGUISES[name](batch)
    return batch


# -- one damaged entry -------------------------------------------------------------------------


def _spoiled(x: Tensor, number: float) -> Tensor:
    x = x.clone()
    if x.is_floating_point() and x.numel():
        x.view(-1)[x.numel() // 2] = number
    return x


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda x: _spoiled(x, float("nan")),
    "infinite": lambda x: _spoiled(x, float("inf")),
    "integers": lambda x: x.long(),
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "complex": lambda x: x.to(torch.complex64),
    "flags": lambda x: x.bool(),
    "without the last dimension": lambda x: x[..., 0] if x.ndim else x,
    "one more dimension": lambda x: x.unsqueeze(-1),
    "twice as wide": lambda x: torch.cat([x, x], -1) if x.ndim else x,
    "no width": lambda x: x[..., :0] if x.ndim else x,
}


#: damages that change the dtype alone
CONVERSIONS = ("integers", "half", "double", "complex", "flags")


def damage(batch: TensorDict, key: object, kind: str) -> TensorDict:
    """Return a copy whose entry is damaged, or missing; the shape of the batch holds."""
    batch = batch.clone()
    spoiled = None if kind == "missing" else DAMAGES[kind](batch.get(key))  # pyright: ignore
    del batch[key]  # pyright: ignore
    if spoiled is not None and spoiled.shape[: batch.ndim] == batch.shape:
        batch[key] = spoiled  # pyright: ignore
    return batch
