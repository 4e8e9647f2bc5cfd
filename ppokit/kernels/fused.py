"""The scans as one kernel each, in C or in Triton: which tensors they take, and their results.

The kernel in C checks its tensors itself. This module checks those of the kernel in Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ppokit.kernels import EXCHANGE, fused_kernel, native

_DTYPES = (torch.float32, torch.float64)
_STRIDED = torch.strided
_TORCH = (Tensor, EXCHANGE, Tensor.is_neg, "requires_grad", Tensor.contiguous, torch.empty_like)


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
    if (kernel := fused_kernel(reward)) is None:
        return None
    if kernel is native:
        first = gamma if type(gamma) is float else _number(gamma, reward)
        second = lmbda if type(lmbda) is float else _number(lmbda, reward)
        records, inputs = torch.is_grad_enabled(), (reward, value, next_value, done, terminated)
        return kernel.gae(_TORCH, records, dim, first, second, *inputs)
    if (sizes := _sizes(reward, dim)) is None:
        return None
    discounts = [_discount(x, reward) for x in (gamma, lmbda)]
    floats = _plain((reward, value, next_value), reward)
    flags = _plain((done, terminated), reward, torch.bool)
    if floats is None or flags is None or any(x is None for x in discounts):
        return None
    outputs = torch.empty_like(floats[0]), torch.empty_like(floats[0])
    kernel.gae(*sizes, *floats, *flags, *outputs, *discounts)
    return outputs


def linear_scan(
    x: Tensor, decay: Tensor, initial: Tensor | None, reverse: bool, dim: int
) -> Tensor | None:
    """Return the scan, or None for arguments that the torch kernel handles."""
    if (kernel := fused_kernel(x)) is None:
        return None
    start = None if initial is None else initial.to(x.dtype)
    if kernel is native:
        records = torch.is_grad_enabled()
        return kernel.scan(_TORCH, records, dim, float(reverse), 0.0, x, decay, start)
    if (sizes := _sizes(x, dim)) is None or (inputs := _plain((x, decay), x)) is None:
        return None
    if start is not None:
        if (starts := _plain((start,), x, x.dtype, x.select(dim, 0).shape)) is None:
            return None
        start = starts[0]
    y = torch.empty_like(inputs[0])
    kernel.scan(*sizes, *inputs, start, y, reverse)
    return y


def _sizes(x: Tensor, dim: int) -> tuple[int, int, int] | None:
    """Return the outer size, the steps and the inner size."""
    if type(x) is not Tensor or x.dtype not in _DTYPES or type(dim) is not int:
        return None
    shape, count = x.shape, x.numel()
    if not count or not -len(shape) <= dim < len(shape):
        return None
    steps, inner = shape[dim], math.prod(shape[dim % len(shape) + 1 :])
    return count // (steps * inner), steps, inner


def _plain(
    tensors: Sequence[Tensor],
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


def _number(discount: float | Tensor, like: Tensor) -> float | None:
    """Return a discount as a number, or None where it is not one, or has a gradient."""
    if not isinstance(discount, Tensor):
        return discount
    return discount.item() if _is_number(discount, like) else None


def _discount(discount: float | Tensor, like: Tensor) -> Tensor | None:
    """Return a discount as a float64 tensor, whose value is not read, or None."""
    if isinstance(discount, Tensor):
        return discount.detach().double() if _is_number(discount, like) else None
    return like.new_full((), discount, dtype=torch.float64) if 0 <= discount <= 1 else None


def _is_number(discount: Tensor, like: Tensor) -> bool:
    plain = _plain((discount,), like, discount.dtype, discount.shape)
    return plain is not None and discount.numel() == 1
