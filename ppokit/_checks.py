"""Attributes with a range, which is checked wherever they are set."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ppokit.functional._checks import check_range

Check: TypeAlias = Callable[[str, Any], Any]  # of a name and a value; returns the value to store


class Checked:
    """An attribute of a class, whose values pass ``check`` before they are stored.

    The value is an entry of the instance's dictionary, so it is read as any other attribute.
    """

    def __init__(self, check: Check, *, optional: bool = False) -> None:
        self._check, self._optional = check, optional

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = self.check(value)

    def check(self, value: Any) -> Any:
        """Return the value to store; raise a ValueError or TypeError where it is out of range."""
        return None if value is None and self._optional else self._check(self._name, value)


def above(low: float, *, finite: bool = False) -> Check:
    """Return the check of a number above ``low``; infinity is one unless it must be finite."""
    expected = f"{'positive' if low == 0 else f'above {low:g}'}{' and finite' if finite else ''}"

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, Real | Tensor):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        if not value > low or (finite and math.isinf(value)):
            raise ValueError(f"{name} must be {expected}, got {value}.")
        return value

    return check


def between(low: float, high: float) -> Check:
    """Return the check of a number between two others, which are excluded."""

    def check(name: str, value: Any) -> Any:
        if not low < value < high:
            raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}.")
        return value

    return check


def in_range(low: float, high: float, *, consequence: str) -> Check:
    """Return the check of a number from ``low`` to ``high``; an error names the consequence."""

    def check(name: str, value: Any) -> Any:
        check_range(name, value, low, high, consequence=consequence)
        return value

    return check


def whole(least: int = 1) -> Check:
    """Return the check of a whole number of at least ``least``; 4.0 is stored as 4."""

    def check(name: str, value: Any) -> int:
        is_whole = isinstance(value, Real) and type(value) is not bool and value % 1 == 0
        if not is_whole or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        return int(value)

    return check


def choice(*allowed: Any) -> Check:
    """Return the check of a value that is one of those allowed."""
    *others, last = map(repr, allowed)
    expected = f"{', '.join(others)} or {last}"

    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{name} must be {expected}, got {value!r}.")
        return value

    return check


def check_device(device: Any) -> None:
    """Raise a ValueError for a CUDA device that is not there; None is no device."""
    found = None if device is None else torch.device(device)
    count = torch.cuda.device_count()
    if found is not None and found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(
            f"device={str(found)!r}, and torch finds {count} CUDA devices. Install a torch with "
            "CUDA, or pass 'cpu'."
        )
