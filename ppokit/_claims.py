"""Detects two objects that drive one value."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable
from typing import Any
from weakref import ref

from torch.utils.weak import WeakIdKeyDictionary

_drivers: Any = (
    WeakIdKeyDictionary()
)  # object -> {name of a value in it: weak reference to its driver}


def claim(driver: object, places: Iterable[tuple[object, Hashable]]) -> None:
    """Record what drives these values, or raise a ValueError if another object drives one."""
    places = [place for place in places if type(place[0]).__weakrefoffset__]
    if _conflicts(places):
        gc.collect()  # a deleted driver may live on in a reference cycle
    for message in _conflicts(places):
        raise ValueError(f"{message} Keep one of the two: delete the other with `del`.")
    for target, name in places:
        _drivers.setdefault(target, {})[name] = ref(driver)


def _conflicts(places: Iterable[tuple[object, Hashable]]) -> list[str]:
    # Messages alone: the traceback of the error would keep the other driver alive.
    drivers = [(target, name, _drivers.get(target, {}).get(name)) for target, name in places]
    return [
        f"A {type(other()).__name__} drives {name!r} of this {type(target).__name__} already."
        for target, name, other in drivers
        if other is not None and other() is not None
    ]
