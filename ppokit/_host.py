"""Copies of tensors on the host, taken from a device in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ppokit.functional import _checks

# By the id of a tensor: the tensor, its version, and its copy.
_kept: ContextVar[dict[int, tuple[Tensor, int, Tensor]] | None] = ContextVar("_kept", default=None)


def keep_copies(*tensors: Tensor | None) -> AbstractContextManager[None]:
    """Within this context, in this thread, a tensor is transferred to the host only once.

    Those given are transferred at once. In a graph, and where none is on a device, it does nothing.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    on_device = [x for x in tensors if x is not None and not x.is_meta]
    is_free = all(_checks.reads_are_free(x.device) for x in on_device)
    return nullcontext() if is_free else _keep(on_device)


@contextmanager
def _keep(tensors: Sequence[Tensor]) -> Iterator[None]:
    kept = _kept.get()
    token = _kept.set({} if kept is None else kept)
    try:
        on_host(*tensors)
        yield
    finally:
        _kept.reset(token)


def on_host(*tensors: Tensor | None) -> list[Any]:
    """Return tensors on the CPU, None for None; all that are on a device come in one transfer."""
    found = [x if x is None or _checks.reads_are_free(x.device) else _copy_of(x) for x in tensors]
    missing = [x for x, copy in zip(tensors, found, strict=True) if x is not None and copy is None]
    if not missing:
        return found
    # The widest numbers first: each copy is a view, which has to begin at a multiple of its width.
    missing.sort(key=lambda x: -x.element_size())
    flat = [x.detach().contiguous().view(-1).view(torch.uint8) for x in missing]
    parts = torch.cat(flat).cpu().split([len(x) for x in flat])
    copies = {
        id(x): remember(x, part.view(x.dtype).view(x.shape))
        for x, part in zip(missing, parts, strict=True)
    }
    return [copies.get(id(x), copy) for x, copy in zip(tensors, found, strict=True)]


def to_device_of(like: Tensor, copy: Tensor) -> Tensor:
    """Return a tensor of the host on the device of another, where its copy is kept."""
    if _checks.reads_are_free(like.device):
        return copy
    x = like.new_empty(copy.shape, dtype=copy.dtype)
    remember(x.copy_(copy, non_blocking=True), copy)
    return x


def remember(x: Tensor, copy: Tensor) -> Tensor:
    """Keep the copy of a tensor within :func:`keep_copies`, and return it."""
    if (kept := _kept.get()) is not None:
        kept[id(x)] = x, write_count(x), copy
    return copy


def write_count(x: Tensor) -> int:
    """Return how often a tensor was written in place; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


def _copy_of(x: Tensor) -> Tensor | None:
    found = (_kept.get() or {}).get(id(x))
    return found[2] if found is not None and found[1] == write_count(x) else None


def true_positions(flags: Tensor) -> tuple[Tensor, ...]:
    """Return an index of the places of True, on the device of the flags, found on the host."""
    # A graph does not know their number: the flags are the index.
    if flags.is_meta or torch.compiler.is_compiling():
        return (flags,)
    (copy,) = on_host(flags)
    return tuple(to_device_of(flags, index) for index in copy.nonzero(as_tuple=True))
