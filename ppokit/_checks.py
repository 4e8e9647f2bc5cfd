"""Checks of tensors and numbers, and attributes whose range is checked wherever they are set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

_LAYOUT = (
    "The convention is [*B, T, 1]: batch first, time second to last, a trailing 1, which "
    ".unsqueeze(-1) adds."
)


class Checked:
    """An attribute of a class that accepts some values only, and raises a ValueError for others.

    The value is an entry of the instance's dictionary, so it is read as any other attribute.
    ``expected`` ends the sentence that begins with the attribute's name.
    """

    def __init__(
        self,
        accepts: Callable[[Any], Any],
        expected: str,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self._accepts, self._expected, self._convert = accepts, expected, convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = self.check(value)

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type) -> Any: ...

    def check(self, value: Any, name: str = "") -> Any:
        """Return the value to store, or raise a ValueError."""
        if isinstance(value, np.ndarray | np.generic) and value.size == 1:
            value = value.item()
        try:
            is_right = bool(self._accepts(value))
        except (IndexError, RuntimeError, TypeError, ValueError):  # it cannot be compared
            is_right = False
        if not is_right:
            raise ValueError(f"{name or self._name} must {self._expected}, got {value!r}.")
        return value if self._convert is None or value is None else self._convert(value)


def positive(*, optional: bool = False) -> Any:
    """Return an attribute that is a number above 0, or None if it is optional."""
    expected = "be positive or None" if optional else "be positive"
    return Checked(lambda x: (optional and x is None) or x > 0, expected)


def whole(least: int = 1, *, optional: bool = False) -> Any:
    """Return an attribute that is a whole number; 4.0 is stored as 4."""

    def accepts(x: Any) -> bool:
        return (optional and x is None) or (type(x) is not bool and x % 1 == 0 and x >= least)

    return Checked(accepts, f"be a whole number of at least {least}", int)


def choice(*allowed: Any) -> Any:
    """Return an attribute that is one of these values."""
    *others, last = map(repr, allowed)
    return Checked(lambda x: x in allowed, f"be {', '.join(others)} or {last}")


def check_device(device: Any) -> None:
    """Raise a ValueError for a CUDA device that is not there; None is no device."""
    count = torch.cuda.device_count()
    # torch takes a number for a device of the accelerator, and raises if there is none
    found = (
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")
    )
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(
            f"device={str(found)!r}, and torch finds {count} CUDA devices: install a torch with "
            "CUDA, or pass 'cpu'."
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
