"""A run: what was written down after each update, in memory or in torchrl's logs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
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
            torchrl's ``CSVLogger`` or ``TensorboardLogger``, whose steps are taken for frames. A
            row whose frames lie before those of the last, as in a resumed run, takes the place of
            what came after. Entries that are no numbers are left out.

    Example:
        >>> rows = [{"frames": 100.0, "kl": 0.01}, {"frames": 100.0, "kl": 0.02}]
        >>> [row["total_frames"] for row in read_run(rows)]
        [100.0, 200.0]
    """
    if isinstance(run, str | os.PathLike):
        return _read_log(Path(run))
    given = list(run) if isinstance(run, Iterable) else [run]
    if isinstance(run, Mapping) or not all(isinstance(row, Mapping) for row in given):
        raise TypeError(
            "A run is a sequence of the dictionaries that PPOUpdate returned, or the folder of a "
            f"log; got {type(run).__name__}."
        )
    if not given:
        raise ValueError("The run has no rows: append what each update returns.")
    rows, frames = [], 0.0
    for number, entries in enumerate(given):
        row = _numbers(entries)
        if FRAMES not in row and "frames" not in row:
            raise ValueError(
                f"Row {number} has neither {FRAMES!r} nor 'frames', but {', '.join(entries)}: pass "
                f"what PPOUpdate returned, or add the frames so far as {FRAMES!r}."
            )
        frames = row[FRAMES] if FRAMES in row else frames + row["frames"]
        if not math.isfinite(frames):
            raise ValueError(f"Row {number} is of {frames} frames.")
        if rows and frames < rows[-1][FRAMES]:
            rows = [earlier for earlier in rows if earlier[FRAMES] < frames]
        rows.append({**row, FRAMES: frames})
    return rows


def _numbers(row: Mapping[Any, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in row.items():
        if value is not None and not isinstance(value, str):
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):  # a list, a tensor of several numbers
                continue
    return numbers


def _read_log(folder: Path) -> list[dict[str, float]]:
    """Return a row for each step of a log."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder of a log.")
    scalars = [
        path
        for path in folder.rglob("scalars")
        if "scalars" not in path.relative_to(folder).parts[:-1]
    ]
    events = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    if scalars:
        logs = {path.parent: _csv_points(path) for path in scalars}
    elif events:
        logs = {path: _tensorboard_points(path) for path in events}
    else:
        raise FileNotFoundError(
            f"{folder} has neither the files of torchrl's CSVLogger (scalars/*.csv) nor those of "
            "its TensorboardLogger (events.out.tfevents.*)."
        )
    logs = {path: points for path, points in logs.items() if points}
    if len(logs) > 1:
        runs = ", ".join(sorted(str(path.relative_to(folder)) for path in logs))
        raise ValueError(f"{folder} holds several runs ({runs}): pass the folder of one.")
    if not logs:
        raise ValueError(f"The log in {folder} has no numbers yet.")
    rows: dict[float, dict[str, float]] = {}
    for name, step, value in next(iter(logs.values())):
        rows.setdefault(step, {})[name] = value
    return [{**rows[step], FRAMES: step} for step in sorted(rows)]


def _csv_points(scalars: Path) -> list[tuple[str, float, float]]:
    points = []
    for file in sorted(scalars.rglob("*.csv")):
        name = file.relative_to(scalars).with_suffix("").as_posix()
        first = len(points)
        for line in file.read_text().splitlines(keepends=True):
            step, _, value = line.partition(",")
            try:
                point = name, float(step), float(value)
            except ValueError:
                if line.endswith("\n"):  # otherwise it is still being written
                    raise ValueError(
                        f"{file} has a line that is no step and value: {line!r}"
                    ) from None
                continue
            while len(points) > first and points[-1][1] >= point[1]:
                points.pop()  # came after the checkpoint from which the run was resumed
            points.append(point)
    return points


def _tensorboard_points(folder: Path) -> list[tuple[str, float, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError(
            f"{folder} is a log of TensorBoard, which is not installed: pip install tensorboard"
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return [(name, float(x.step), float(x.value)) for name in names for x in events.Scalars(name)]
