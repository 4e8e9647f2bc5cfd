"""One kind of writer for each value, among blocks that do not know each other.

A coefficient that two blocks drive ends up where the later one put it, and the earlier one has no
effect. So a block that moves a value of another object claims it here when it is built. Another
block of the same kind may follow it, as one is rebuilt, and from then on the earlier one may not
write; one of another kind may not follow. Claims are weak: they end with the writer, and with the
object. A copy of a writer has claimed nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, MutableMapping
from weakref import WeakKeyDictionary

from torch.utils.weak import WeakIdKeyDictionary

Place = tuple[object, Hashable]
"""An object, and what is driven in it: the name of an attribute, or what stands for one."""

_Writers = WeakKeyDictionary[object, None]  # in the order of their claims

# object -> {what is driven in it: its writers}
_claims: MutableMapping[object, dict[Hashable, _Writers]] = WeakIdKeyDictionary()


def check_unclaimed(writer: object, places: Iterable[Place]) -> None:
    """Raise a ValueError where a writer of another kind, still alive, has claimed a place."""
    for target, name in places:
        if _other_kinds(writer, target, name):
            # A dropped one may live on in a reference cycle, such as a trainer and its hooks.
            gc.collect()
        for kind in _other_kinds(writer, target, name):
            raise ValueError(
                f"A {kind} drives {name!r} of this {type(target).__name__}, and a "
                f"{type(writer).__name__} would overwrite what it writes. Keep one of them: `del` "
                f"what refers to the {kind}."
            )


def check_not_followed(writer: object, places: Iterable[Place]) -> None:
    """Raise a ValueError where a later writer of the same kind, still alive, has claimed a place.

    A writer that has claimed nothing there, such as a copy, passes.
    """
    for target, name in places:
        if _is_followed(writer, target, name):
            gc.collect()
        if _is_followed(writer, target, name):
            kind = type(writer).__name__
            raise ValueError(
                f"Another {kind}, made later, drives {name!r} of this {type(target).__name__}; the "
                "two would overwrite each other. Go on with one of them: `del` what refers to "
                "the other."
            )


def claim(writer: object, places: Iterable[Place]) -> None:
    """Note ``writer`` as one that drives these places."""
    for target, name in places:
        # Without weak references a claim would outlive its object and fall to another of that id.
        if type(target).__weakrefoffset__:
            writers = _claims.setdefault(target, {}).setdefault(name, WeakKeyDictionary())
            writers.pop(writer, None)
            writers[writer] = None


def _other_kinds(writer: object, target: object, name: Hashable) -> set[str]:
    # Names only: the traceback of the error would keep the other writer alive, `del` or not.
    writers = _writers(target, name)
    return {type(other).__name__ for other in writers if type(other) is not type(writer)}


def _is_followed(writer: object, target: object, name: Hashable) -> bool:
    same = [other for other in _writers(target, name) if type(other) is type(writer)]
    return any(other is writer for other in same[:-1])


def _writers(target: object, name: Hashable) -> Iterable[object]:
    return _claims.get(target, {}).get(name, ()) if type(target).__weakrefoffset__ else ()
