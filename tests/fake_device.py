"""Tensors that stand for those of a device: transfers to the host are counted."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_READS = (
    "item tolist __bool__ __int__ __float__ __index__ __contains__ numpy cpu nonzero argwhere "
    "unique unique_consecutive masked_select bincount equal allclose is_nonzero __array__ "
    "repeat_interleave"
)
READS = {getattr(Tensor, name) for name in _READS.split() if hasattr(Tensor, name)}
READS |= {getattr(torch, name) for name in _READS.split() if hasattr(torch, name)}
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


class OnDevice(Tensor):
    """A tensor of the CPU that is treated as one of a device."""

    transfers: list[str] = []  # noqa: RUF012  # where the host has waited

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        by_flags = func in INDEXING and any(
            isinstance(x, OnDevice) and x.dtype is torch.bool
            for x in (args[1] if isinstance(args[1], tuple) else [args[1]])
        )
        if func in READS or by_flags:
            stack = traceback.extract_stack()
            own = [
                f"{x.filename.split('/')[-1]}:{x.lineno}" for x in stack if "ppokit" in x.filename
            ]
            cls.transfers.append(f"{func.__name__} at {' '.join(own[-3:])}")
        return result.as_subclass(Tensor) if func is Tensor.cpu else result


def to_device(x: Any) -> Any:
    """Return a TensorDict, module or tensor whose tensors are on the fake device."""
    if isinstance(x, nn.Module):
        moved: dict[Any, Any] = {}
        for module in x.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    new = moved.setdefault(p, nn.Parameter(p.data.as_subclass(OnDevice)))
                    module._parameters[name] = new
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.as_subclass(OnDevice)
        return x
    if isinstance(x, Tensor):
        return x.as_subclass(OnDevice)
    return x.apply(lambda t: t.as_subclass(OnDevice))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield the list of transfers to the host within this context."""
    before, OnDevice.transfers = OnDevice.transfers, []
    try:
        yield OnDevice.transfers
    finally:
        OnDevice.transfers = before
