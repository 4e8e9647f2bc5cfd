"""Attributes with a range, which is checked wherever they are set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch


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

    def __set__(self, instance: object, value: object) -> None:
        instance.__dict__[self._name] = self.check(value)

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> Any: ...

    def check(self, value: object, name: str = "") -> Any:
        """Return the value to store, or raise a ValueError."""
        if isinstance(value, np.ndarray | np.generic) and value.size == 1:
            value = value.item()
        try:
            is_right = bool(self._accepts(value))
        except (IndexError, RuntimeError, TypeError, ValueError):  # it cannot be compared
            is_right = False
        if not is_right:
            given = repr(value) if len(repr(value)) < 200 else f"a {type(value).__name__}"
            raise ValueError(f"{name or self._name} must {self._expected}, got {given}.")
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


def choice(*allowed: object) -> Any:
    """Return an attribute that is one of these values."""
    *others, last = map(repr, allowed)
    return Checked(lambda x: x in allowed, f"be {', '.join(others)} or {last}")


#: a seed, for torch and for environments
SEED = Checked(
    lambda x: x % 1 == 0 and 0 <= x < 2**63, "be a whole number from 0 to 2**63 - 1", int
)


def check_device(device: torch.device | str | int | None) -> None:
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
