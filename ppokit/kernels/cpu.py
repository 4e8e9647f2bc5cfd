"""The scans in C: which tensors they take, and their results.

A C function takes is_double, outer size, steps, inner size, addresses of tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppokit.kernels import native_kernel

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
    if (kernel := native_kernel()) is None:
        return None
    sizes, discounts = _sizes(reward, dim), (_number(gamma), _number(lmbda))
    if sizes is None or None in discounts:
        return None
    floats = _plain((reward, value, next_value), reward.shape, reward.dtype)
    flags = _plain((done, terminated), reward.shape, torch.bool)
    if floats is None or flags is None:
        return None
    outputs = torch.empty_like(floats[0]), torch.empty_like(floats[0])
    kernel.gae(*sizes, *[x.data_ptr() for x in (*floats, *flags, *outputs)], *discounts)
    return outputs


def returns(
    reward: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    initial: Tensor | None,
    dim: int,
    *,
    writes: bool,
) -> tuple[Tensor | None, Tensor, float, float] | None:
    """Return discounted returns, their carry, mean and sum of squared deviations, or None.

    Carry and moments are float64. Without ``writes`` the returns are None.
    """
    if (kernel := native_kernel()) is None:
        return None
    sizes, discount = _sizes(reward, dim), _number(gamma)
    if sizes is None or not discount:  # 0 times an infinite return would be NaN
        return None
    floats = _plain((reward,), reward.shape, reward.dtype)
    flags = _plain((done,), reward.shape, torch.bool)
    start = _start(initial, reward, dim, torch.float64)
    if floats is None or flags is None or start is None:
        return None
    carry = torch.empty(_shape_without(reward, dim), dtype=torch.float64)
    result = torch.empty_like(floats[0]) if writes else None
    tensors = *floats, *flags, *start, carry, result
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    mean, m2 = kernel.returns(*sizes, *addresses, discount)
    return result, carry, mean, m2


def linear_scan(
    x: Tensor, decay: Tensor, initial: Tensor | None, reverse: bool, dim: int
) -> Tensor | None:
    """Return the scan, or None for arguments that the torch kernel handles."""
    if (kernel := native_kernel()) is None:
        return None
    if (sizes := _sizes(x, dim)) is None:
        return None
    inputs, start = _plain((x, decay), x.shape, x.dtype), _start(initial, x, dim, x.dtype)
    if inputs is None or start is None:
        return None
    y = torch.empty_like(inputs[0])
    addresses = [0 if x is None else x.data_ptr() for x in (*inputs, *start, y)]
    kernel.scan(*sizes, *addresses, float(reverse))
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
    tensors: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype
) -> list[Tensor] | None:
    """Return tensors of one kind as contiguous ones, or None where C cannot read their numbers."""
    found, records = [], torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or x.dtype is not dtype or x.shape != shape or not x.is_cpu:
            return None
        if x.layout is not _STRIDED or x.is_neg() or (records and x.requires_grad):
            return None
        x = x.contiguous()
        if not x.data_ptr():  # fake tensors, and the zeros of a derivative, have no memory
            return None
        found.append(x)
    return found


def _start(
    initial: Tensor | None, x: Tensor, dim: int, dtype: torch.dtype
) -> Sequence[Tensor | None] | None:
    """Return y before the first step, in a list, or None where C cannot read it."""
    if initial is None:
        return [None]
    return _plain((initial.to(dtype),), _shape_without(x, dim), dtype)


def _shape_without(x: Tensor, dim: int) -> torch.Size:
    return x.shape[: dim % x.ndim] + x.shape[dim % x.ndim + 1 :]


def _number(discount: float | Tensor) -> float | None:
    """Return a discount in [0, 1] as a number, or None."""
    if isinstance(discount, Tensor):
        if discount.numel() != 1 or _plain((discount,), discount.shape, discount.dtype) is None:
            return None
        discount = discount.item()
    return float(discount) if 0 <= discount <= 1 else None
