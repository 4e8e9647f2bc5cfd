"""The statistics of a run, update by update, in memory or in torchrl's logs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Rows: TypeAlias = Sequence[Mapping[str, float]]
Run: TypeAlias = "Rows | str | os.PathLike[str]"

FRAMES = "total_frames"  #: frames since the beginning of the run, in a row


def read_run(run: Run) -> list[dict[str, float]]:
    """Return the rows of a run, each with the frames so far at ``"total_frames"``.

    Args:
        run: what :class:`~ppokit.PPOUpdate` returned, update by update (a row without
            ``"total_frames"`` adds its ``"frames"`` to those before it); or the folder of a log of
            torchrl's ``CSVLogger``, whose steps are taken for frames. A row whose frames lie before
            those of the last, as in a resumed run, replaces the rows from there on; one with the
            frames of the last adds to it, or replaces its entries. Entries that are not numbers are
            left out.

    Raises:
        ValueError: there are no rows, a row has no frames, or a folder has several runs.
        TypeError: the run is neither a sequence of dictionaries nor a path.
        FileNotFoundError: the folder has no log.

    Example:
        >>> from ppokit.plotting import read_run
        >>> rows = [{"frames": 100.0, "kl": 0.01}, {"frames": 100.0, "kl": 0.02}]
        >>> [row["total_frames"] for row in read_run(rows)]
        [100.0, 200.0]
    """
    if isinstance(run, str | os.PathLike):
        return _read_log(Path(run))
    given = [*run] if isinstance(run, Iterable) else [run]
    if not all(isinstance(row, Mapping) for row in given):
        raise TypeError(
            "A run is a sequence of the dictionaries that PPOUpdate returned, or the folder of a "
            f"log; got {type(run).__name__}."
        )
    if not given:
        raise ValueError("The run has no rows: append what each update returns.")
    rows, frames = [], 0.0
    for number, row in enumerate(map(_numbers, given)):
        if FRAMES not in row and "frames" not in row:
            raise ValueError(
                f"Row {number} has neither {FRAMES!r} nor 'frames', but {', '.join(row)}: pass "
                f"what PPOUpdate returned, or add the frames so far as {FRAMES!r}."
            )
        frames = row[FRAMES] if FRAMES in row else frames + row["frames"]
        if rows and frames < rows[-1][FRAMES]:
            rows = [earlier for earlier in rows if earlier[FRAMES] < frames]
        known = rows.pop() if rows and frames == rows[-1][FRAMES] else {}
        rows.append({**known, **row, FRAMES: frames})
    return rows


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in row.items():
        if not isinstance(value, str):
            with suppress(TypeError, ValueError, RuntimeError):  # None, a list, a long tensor
                numbers[name] = float(value)
    return numbers


def _read_log(folder: Path) -> list[dict[str, float]]:
    """Return a row for each step of a log."""
    logs = {path.parent: _csv_points(path) for path in folder.rglob("scalars")}
    logs = {path: points for path, points in logs.items() if points}
    if not logs:
        raise FileNotFoundError(
            f"{folder} has no numbers in files of torchrl's CSVLogger (scalars/*.csv)."
        )
    if len(logs) > 1:
        runs = ", ".join(sorted(str(path.relative_to(folder)) for path in logs))
        raise ValueError(f"{folder} holds several runs ({runs}): pass the folder of one.")
    points, rows = next(iter(logs.values())), dict[float, dict[str, float]]()
    of_resumed = [step for _, step, _, is_resumed in points if is_resumed]
    last = max(of_resumed, default=math.inf)  # what a name has beyond was dropped by a resume
    for name, step, value, _ in points:
        if step <= last:
            rows.setdefault(step, {})[name] = value
    return [{**rows[step], FRAMES: step} for step in sorted(rows)]


def _csv_points(scalars: Path) -> list[tuple[str, float, float, bool]]:
    """Return name, step, value, and whether the name has points before a resume as well."""
    points = []
    for file in sorted(scalars.rglob("*.csv")):
        name, is_resumed = file.relative_to(scalars).with_suffix("").as_posix(), False
        for line in file.read_text().splitlines():
            step, _, value = line.partition(",")
            with suppress(ValueError):  # a line that is still being written
                x, y = float(step), float(value)
                while points and points[-1][0] == name and points[-1][1] >= x:
                    points.pop()  # of a run that was resumed before it
                    is_resumed = True
                points.append((name, x, y, is_resumed))
    return points
