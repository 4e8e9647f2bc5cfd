"""Entries of gymnasium's ``info`` that a collector stores with the steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ppokit.collectors.batch import Record
from ppokit.spaces import Shape, name_of


def info_names(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the names of entries of ``info``; raise a TypeError for anything else."""
    is_many = isinstance(keys, Iterable) and not isinstance(keys, str)
    names = tuple(keys) if is_many else ()
    if not is_many or not all(isinstance(name, str) for name in names):
        raise TypeError(f"info_keys must be names such as ['lives'], got {keys!r}.")
    return names


class Infos:
    """The entries of ``info`` under some keys, each in the shape and dtype of the first one."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self._last: dict[str, Sequence[object]] = {}  # beside the observations that come next
        self._kinds: dict[str, tuple[Shape, np.dtype]] = {}

    def begin(self, record: Record) -> None:
        """Take the entries beside the first observations, of a record of no steps."""
        self._last = {key: rows[0] for key, rows in record.infos.items()}

    def take(self, record: Record) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the entries before and after each step of a batch, ``[n, T, ...]``.

        Before the first step of an episode they are those of the reset, 0 where it has none.

        Raises:
            ValueError: a step has none, or one of another shape or dtype than the first.
        """
        found = {}
        for i, (key, rows) in enumerate(record.infos.items()):
            before, after = [self._last[key], *rows[1:-1]], [[*row] for row in rows[1:]]
            for final in record.finals:
                after[final.time][final.env] = final.infos[i]
            for time, row in enumerate(after):
                for env, value in enumerate(row):
                    is_reset = record.is_reset is not None and record.is_reset[time, env]
                    if value is None and not is_reset:
                        raise ValueError(
                            f"{name_of(env)}: step returned no {key!r} in its info. Return it in "
                            "every step, or leave it out of info_keys."
                        )
            found[key] = self._stacked(key, before, after), self._stacked(key, after, after)
            self._last[key] = rows[-1]
        return found

    def _stacked(
        self, key: str, rows: Sequence[Sequence[object]], declared: Sequence[Sequence[object]]
    ) -> Tensor:
        """Return ``[n, T, ...]`` of rows ``[T][n]``; ``declared`` are those of the first batch."""
        if key not in self._kinds:
            first = next(x for row in declared for x in row if x is not None)
            if not isinstance(first, np.ndarray) or first.dtype.kind not in "fiub":
                raise ValueError(
                    f"info has {key!r} as {first!r}. Entries of info_keys are numbers, flags or "
                    "arrays of them: convert it in an environment wrapper, or leave it out."
                )
            dtype = np.dtype(np.float64) if first.dtype.itemsize > 8 else first.dtype
            self._kinds[key] = first.shape or (1,), dtype.newbyteorder("=")
        shape, dtype = self._kinds[key]
        stacked = np.zeros((len(rows[0]), len(rows), *shape), dtype)
        for time, row in enumerate(rows):
            for env, value in enumerate(row):
                if value is None:
                    continue
                if (stored := _stored(value, shape, dtype)) is None:
                    raise ValueError(
                        f"{name_of(env)} returned {key!r} in info, in a reset or a step, as "
                        f"{value!r}; the first one that a step returned is {dtype} of shape "
                        f"{list(shape)}, a number counting as [1]. Return one shape and dtype."
                    )
                stacked[env, time] = stored
        return torch.from_numpy(stacked)


def _stored(value: object, shape: Shape, dtype: np.dtype) -> np.ndarray | None:
    """Return a value as it is stored, or None where it does not fit; floats may be rounded."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return None
    if (value.shape or (1,)) != shape:
        return None
    if value.dtype == dtype:
        return value
    with np.errstate(all="ignore"):
        stored = value.astype(dtype)
    is_float = dtype.kind == "f"
    fits = np.isfinite(stored) == np.isfinite(value) if is_float else stored == value
    return stored if fits.all() else None
