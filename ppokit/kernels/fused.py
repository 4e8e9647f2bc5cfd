"""The scans as one kernel each, in C or in Triton: which tensors they take, and their results.

A kernel takes is_double, outer size, steps, inner size, tensors (in C their addresses) and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppokit.kernels import fused_kernel, is_native

_DTYPES = (torch.float32, torch.float64)
_STRIDED = torch.strided


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    dim: int,
) -> tuple[Tensor, Tensor] | None:
    """Return advantage and value target, or None for arguments that the torch kernel handles."""
    if (kernel := fused_kernel(reward)) is None or (sizes := _sizes(reward, dim)) is None:
        return None
    discounts = [_discount(x, reward, kernel) for x in (gamma, lmbda)]
    if any(x is None for x in discounts):
        return None
    floats = _plain((reward, value, next_value), reward)
    flags = _plain((done, terminated), reward, torch.bool)
    if floats is None or flags is None:
        return None
    outputs = torch.empty_like(floats[0]), torch.empty_like(floats[0])
    kernel.gae(*sizes, *_given(kernel, *floats, *flags, *outputs), *discounts)
    return outputs


def linear_scan(
    x: Tensor, decay: Tensor, initial: Tensor | None, reverse: bool, dim: int
) -> Tensor | None:
    """Return the scan, or None for arguments that the torch kernel handles."""
    if (kernel := fused_kernel(x)) is None or (sizes := _sizes(x, dim)) is None:
        return None
    inputs, start = _plain((x, decay), x), _start(initial, x, dim)
    if inputs is None or start is None:
        return None
    y = torch.empty_like(inputs[0])
    kernel.scan(*sizes, *_given(kernel, *inputs, *start, y), float(reverse))
    return y


def _sizes(x: Tensor, dim: int) -> tuple[bool, int, int, int] | None:
    """Return whether x is float64, and the outer size, the steps and the inner size."""
    if type(x) is not Tensor or x.dtype not in _DTYPES or type(dim) is not int:
        return None
    shape, count = x.shape, x.numel()
    if not count or not -len(shape) <= dim < len(shape):
        return None
    steps, inner = shape[dim], 1
    for size in shape[dim % len(shape) + 1 :]:
        inner *= size
    return x.dtype is torch.float64, count // (steps * inner), steps, inner


def _plain(
    tensors: tuple[Tensor, ...],
    like: Tensor,
    dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
) -> list[Tensor] | None:
    """Return tensors of one kind as contiguous ones, or None where no kernel can read them."""
    dtype, shape = dtype or like.dtype, like.shape if shape is None else shape
    found, records = [], torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or x.dtype is not dtype or x.shape != shape:
            return None
        if x.device != like.device or x.layout is not _STRIDED or x.is_neg():
            return None
        if records and x.requires_grad:
            return None
        x = x.contiguous()
        if not x.data_ptr():  # fake tensors, and the zeros of a derivative, have no memory
            return None
        found.append(x)
    return found


def _start(initial: Tensor | None, x: Tensor, dim: int) -> Sequence[Tensor | None] | None:
    """Return y before the first step, in a list, or None where no kernel can read it."""
    if initial is None:
        return [None]
    without_time = x.shape[: dim % x.ndim] + x.shape[dim % x.ndim + 1 :]
    return _plain((initial.to(x.dtype),), x, x.dtype, without_time)


def _discount(discount: float | Tensor, like: Tensor, kernel: Any) -> float | Tensor | None:
    """Return a discount as the kernel takes it, or None.

    In C it is a number in [0, 1]. In Triton it is a float64 tensor, whose value is not read.
    """
    if isinstance(discount, Tensor):
        if discount.numel() != 1:
            return None
        if _plain((discount,), like, discount.dtype, discount.shape) is None:
            return None
        if not is_native(kernel):
            return discount.detach().double()
        discount = discount.item()
    if not 0 <= discount <= 1:
        return None
    return (
        float(discount) if is_native(kernel) else like.new_full((), discount, dtype=torch.float64)
    )


def _given(kernel: Any, *tensors: Tensor | None) -> Sequence[Any]:
    """Return tensors as the kernel takes them, in C their addresses."""
    if not is_native(kernel):
        return tensors
    return [0 if x is None else x.data_ptr() for x in tensors]
