"""Checks shared by the functions and the blocks: a message names what, the shapes and the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def check_same_shape(tensors: Mapping[object, Tensor], *, fix: str | None = None) -> None:
    """Raise unless all tensors have one shape: nothing here broadcasts silently."""
    items = list(tensors.items())
    reference_name, reference = items[0]
    for name, tensor in items[1:]:
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but {reference_name} has shape "
                f"{list(reference.shape)}; they must be the same. "
                f"{_shape_hint(tensor, reference) if fix is None else fix}"
            )


def _shape_hint(tensor: Tensor, reference: Tensor) -> str:
    if tensor.shape == reference.shape[:-1] and reference.shape[-1] == 1:
        return "Add the trailing dimension with .unsqueeze(-1)."
    if reference.shape == tensor.shape[:-1] and tensor.shape[-1] == 1:
        return "Drop the trailing dimension with .squeeze(-1), or add it to the others."
    return "The convention is [*B, T, 1]: batch first, time second to last, a trailing 1."


def check_float(name: object, tensor: Tensor) -> None:
    """Raise unless the tensor holds floating-point numbers."""
    _check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} has dtype {tensor.dtype} (shape {list(tensor.shape)}); it must be a float "
            "dtype. Convert it with .float(), or with DoubleToFloat / DTypeCastTransform in the "
            "environment."
        )


def check_bool(name: object, tensor: Tensor) -> None:
    """Raise unless the tensor is boolean."""
    _check_tensor(name, tensor)
    if tensor.dtype is not torch.bool:
        raise TypeError(
            f"{name} has dtype {tensor.dtype} (shape {list(tensor.shape)}); it must be torch.bool. "
            "Convert it with .bool()."
        )


def _check_tensor(name: object, value: object) -> None:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a tensor, got a {kind}. Use torch.as_tensor().")


def check_range(
    name: str, value: float | Tensor, low: float, high: float, *, consequence: str
) -> None:
    """Raise unless ``low <= value <= high``, saying what would have gone wrong."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or torch.compiler.is_compiling():
            return  # reading the value would synchronise the device, or break the graph
        inside = bool(((value >= low) & (value <= high)).all())
    else:
        inside = low <= value <= high
    if not inside:
        interval = f"[{low}, {high}]" if math.isfinite(high) else f"[{low}, inf)"
        raise ValueError(f"{name} must lie in {interval}, got {value}: {consequence}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half types are summed in float32; wider types stay as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
