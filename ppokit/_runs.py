"""A run: what was written down after each update, in memory or in torchrl's logs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

Rows: TypeAlias = Sequence[Mapping[str, float]]
Run: TypeAlias = "Rows | str | os.PathLike[str]"

FRAMES = "total_frames"  #: frames since the beginning of the run, in a row


def read_run(run: Run) -> list[dict[str, float]]:
    """Return the rows of a run, each with the frames so far at ``"total_frames"``.

    Args:
        run: what :class:`~ppokit.PPOUpdate` returned, update by update (a row without
            ``"total_frames"`` adds its ``"frames"`` to those before it); or the folder of a log of
            torchrl's ``CSVLogger`` or ``TensorboardLogger``, whose steps are taken for frames.

    Raises:
        ValueError: there are no rows, or it is unknown how many frames they are of.
        TypeError: it is neither rows nor a path.
        FileNotFoundError: there is no log in the folder.

    Example:
        >>> rows = [{"frames": 100.0, "kl": 0.01}, {"frames": 100.0, "kl": 0.02}]
        >>> [row["total_frames"] for row in read_run(rows)]
        [100.0, 200.0]
    """
    if isinstance(run, str | os.PathLike):
        return _read_log(Path(run))
    if isinstance(run, Mapping) or not all(isinstance(row, Mapping) for row in run):
        raise TypeError(
            "A run is a sequence of the dictionaries that PPOUpdate returned, or the folder of a "
            f"log; got {type(run).__name__}."
        )
    if not run:
        raise ValueError("The run has no rows: append what each update returns.")
    rows, frames = [], 0.0
    for number, row in enumerate(run):
        if FRAMES not in row and "frames" not in row:
            raise ValueError(
                f"Row {number} has neither {FRAMES!r} nor 'frames', but {', '.join(row)}: pass "
                f"what PPOUpdate returned, or add the frames so far as {FRAMES!r}."
            )
        frames = float(row[FRAMES]) if FRAMES in row else frames + float(row["frames"])
        rows.append({**row, FRAMES: frames})
    return rows


def _read_log(folder: Path) -> list[dict[str, float]]:
    """Return a row for each step of a log."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder of a log.")
    scalars = sorted(folder.rglob("scalars"))
    events = sorted(folder.rglob("events.out.tfevents.*"))
    if len(scalars) > 1:
        runs = ", ".join(str(path.parent.relative_to(folder)) for path in scalars)
        raise ValueError(f"{folder} holds several runs ({runs}): pass the folder of one.")
    if scalars:
        points = _csv_points(scalars[0])
    elif events:
        points = _tensorboard_points(events[0].parent)
    else:
        raise FileNotFoundError(
            f"{folder} has neither the files of torchrl's CSVLogger (scalars/*.csv) nor those of "
            "its TensorboardLogger (events.out.tfevents.*)."
        )
    rows: dict[float, dict[str, float]] = {}
    for name, step, value in points:
        rows.setdefault(step, {})[name] = value
    if not rows:
        raise ValueError(f"The log in {folder} has no numbers yet.")
    return [{**rows[step], FRAMES: step} for step in sorted(rows)]


def _csv_points(scalars: Path) -> list[tuple[str, float, float]]:
    points = []
    for file in sorted(scalars.rglob("*.csv")):
        name = file.relative_to(scalars).with_suffix("").as_posix()
        for line in file.read_text().splitlines():
            step, _, value = line.partition(",")
            points.append((name, float(step), float(value)))
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
