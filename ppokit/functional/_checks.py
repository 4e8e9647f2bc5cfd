"""Checks shared by the functions and the blocks: a message names the tensor, shapes and the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_LAYOUT = (
    "The convention is [*B, T, 1]: batch first, time second to last, a trailing 1, which "
    ".unsqueeze(-1) adds."
)


def reads_are_free(device: torch.device) -> bool:
    """Return whether reading a tensor neither waits for a device nor breaks a graph."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def check_same_shape(tensors: Mapping[object, Tensor], *, fix: str | None = None) -> None:
    """Raise unless all tensors have one shape: nothing here broadcasts silently."""
    (reference_name, reference), *items = tensors.items()
    for name, tensor in items:
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but {reference_name} has shape "
                f"{list(reference.shape)}; they must be the same. {fix or _LAYOUT}"
            )


def check_float(name: object, tensor: Tensor) -> None:
    """Raise unless the tensor holds floating-point numbers."""
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} has dtype {tensor.dtype} (shape {list(tensor.shape)}); it must be a float "
            "dtype. Convert it with .float(), or with DoubleToFloat / DTypeCastTransform in the "
            "environment."
        )


def check_bool(name: object, tensor: Tensor) -> None:
    """Raise unless the tensor is boolean."""
    if tensor.dtype is not torch.bool:
        raise TypeError(
            f"{name} has dtype {tensor.dtype} (shape {list(tensor.shape)}); it must be torch.bool. "
            "Convert it with .bool()."
        )


def check_range(
    name: str, value: float | Tensor, low: float, high: float, *, consequence: str
) -> None:
    """Raise unless ``low <= value <= high``; the message names the consequence."""
    if isinstance(value, Tensor) and not reads_are_free(value.device):
        return
    numbers = value.flatten().tolist() if isinstance(value, Tensor) else [value]
    are_numbers = all(isinstance(x, int | float | np.number) for x in numbers)
    if not are_numbers or not all(low <= number <= high for number in numbers):
        interval = f"[{low:g}, {high:g}]" if math.isfinite(high) else f"[{low:g}, inf)"
        raise ValueError(f"{name} must lie in {interval}, got {value}: {consequence}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half types as float32, and wider types as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
