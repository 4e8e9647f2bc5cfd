"""One kind of writer for each value, among blocks that do not know each other.

A coefficient that two blocks drive ends up where the later one put it, and the earlier one has no
effect. So a block that moves a value of another object claims it here when it is built. Another
block of the same kind may follow it, as one is rebuilt, and from then on the earlier one may not
write; one of another kind may not follow. Claims are weak: they end with the writer, and with the
object.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from weakref import ref

from torch.utils.weak import WeakIdKeyDictionary

Place = tuple[object, Hashable]
"""An object, and what is driven in it: the name of an attribute, or what stands for one."""

# object -> {what is driven in it: its writers, in the order of their claims}
_claims: MutableMapping[object, dict[Hashable, list[ref[object]]]] = WeakIdKeyDictionary()


def check_unclaimed(writer: object, places: Iterable[Place]) -> None:
    """Raise a ValueError where a writer of another kind, still alive, has claimed a place."""
    for target, name in places:
        other = _last_writer(target, name, lambda last: type(last) is type(writer))
        if other is not None:
            raise ValueError(
                f"A {other} drives {name!r} of this {type(target).__name__}, and a "
                f"{type(writer).__name__} would overwrite what it writes. Keep one of them: `del` "
                f"what refers to the {other}."
            )


def check_not_followed(writer: object, places: Iterable[Place]) -> None:
    """Raise a ValueError where a later living writer of the same kind has claimed a place."""
    for target, name in places:
        if _last_writer(target, name, lambda last: last is writer) is not None:
            raise ValueError(
                f"Another {type(writer).__name__}, made later, drives {name!r} of this "
                f"{type(target).__name__}; the two would overwrite each other. Go on with one of "
                "them: `del` what refers to the other."
            )


def claim(writer: object, places: Iterable[Place]) -> None:
    """Note ``writer`` as one that drives these places."""
    for target, name in places:
        # Without weak references a claim would outlive its object and fall to another of that id.
        if type(target).__weakrefoffset__:
            _claims.setdefault(target, {}).setdefault(name, []).append(ref(writer))


def _last_writer(target: object, name: Hashable, accepts: Callable[[object], bool]) -> str | None:
    """Return the kind of the last living writer of a place, unless it is accepted."""
    if _last_kind(target, name, accepts) is None:
        return None
    gc.collect()  # a dropped one may live on in a reference cycle, such as a trainer and its hooks
    return _last_kind(target, name, accepts)


def _last_kind(target: object, name: Hashable, accepts: Callable[[object], bool]) -> str | None:
    # A name only: the traceback of the error would keep the writer alive, `del` or not.
    writers = _claims.get(target, {}).get(name, []) if type(target).__weakrefoffset__ else []
    living = [other for writer in writers if (other := writer()) is not None]
    return None if not living or accepts(living[-1]) else type(living[-1]).__name__
