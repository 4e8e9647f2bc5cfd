"""One kind of writer for each value, among blocks that do not know each other.

A coefficient that two blocks drive ends up where the later one put it, and the earlier one has no
effect. So a block that moves a value of another object claims it here when it is built. Another
block of the same kind may follow it, as one is rebuilt; one of another kind may not. Claims are
weak: they end with the writer, and with the object. A copy of a writer has claimed nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, MutableMapping
from weakref import WeakSet

from torch.utils.weak import WeakIdKeyDictionary

Place = tuple[object, Hashable]
"""An object, and what is driven in it: the name of an attribute, or what stands for one."""

# object -> {what is driven in it: its writers}
_claims: MutableMapping[object, dict[Hashable, WeakSet[object]]] = WeakIdKeyDictionary()


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


def claim(writer: object, places: Iterable[Place]) -> None:
    """Note ``writer`` as one that drives these places."""
    for target, name in places:
        # Without weak references a claim would outlive its object and fall to another of that id.
        if type(target).__weakrefoffset__:
            _claims.setdefault(target, {}).setdefault(name, WeakSet()).add(writer)


def _other_kinds(writer: object, target: object, name: Hashable) -> set[str]:
    # Names only: the traceback of the error would keep the other writer alive, `del` or not.
    if not type(target).__weakrefoffset__:
        return set()
    writers = _claims.get(target, {}).get(name, ())
    return {type(other).__name__ for other in writers if type(other) is not type(writer)}
