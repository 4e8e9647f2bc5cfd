"""Helpers of training scripts: the folder of a run, Ctrl-C, numbers as options."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Interrupt", "begin_run", "catch_interrupt", "count", "from_zero"]

MARKER = "run.json"  # of the folder of a run


def begin_run(folder: str | os.PathLike[str], script: str, *, resume: bool = False) -> None:
    """Make the folder of a run, and keep an earlier run of the same script.

    The earlier run is renamed to the first of ``folder.1``, ``folder.2``, ... that is free, and a
    line names it. The file ``run.json`` marks a folder as this script's. Call it last before
    training: then a run that ends with an error before has renamed nothing. Give runs that go on at
    the same time a folder each.

    Args:
        folder: of the run.
        script: the name that marks the folder as this script's.
        resume: use a folder that has files as it is.

    Raises:
        FileExistsError: the folder has files that are no run of this script.
        OSError: the folder cannot be made or renamed.

    Example:
        >>> import tempfile
        >>> temporary = tempfile.TemporaryDirectory()
        >>> out = Path(temporary.name) / "run"
        >>> begin_run(out, "my_ppo")
        >>> _ = (out / "history.json").write_text("[]")
        >>> begin_run(out, "my_ppo")  # doctest: +ELLIPSIS
        /...run held an earlier run; it is now /...run.1.
        >>> temporary.cleanup()
    """
    path = Path(folder).resolve()
    marker, content = path / MARKER, json.dumps({"script": script})
    if path.exists() and any(path.iterdir()):
        if resume:
            return
        if not marker.is_file() or marker.read_text(errors="replace") != content:
            raise FileExistsError(
                f"{folder} is not empty, and holds no earlier run of this script."
            )
        names = (f"{path}.{number}" for number in itertools.count(1))
        kept = next(name for name in names if not os.path.lexists(name))
        path.rename(kept)
        print(f"{folder} held an earlier run; it is now {kept}.")
    path.mkdir(parents=True, exist_ok=True)
    marker.write_text(content)


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def catch_interrupt(
    message: str | None = "Interrupted: ending after this batch.",
) -> Iterator[Interrupt]:
    """Note the first Ctrl-C, so that a loop can end after a batch; a second one interrupts.

    Args:
        message: printed at the first one; None prints nothing.

    Yields:
        An object whose ``pressed`` is read at the end of a batch.

    Raises:
        ValueError: this is not the main thread, which alone receives signals.

    Example:
        >>> with catch_interrupt() as interrupt:
        ...     for batch in range(1_000_000):
        ...         signal.raise_signal(signal.SIGINT)  # somebody presses Ctrl-C
        ...         if interrupt.pressed:
        ...             break  # and a checkpoint is saved
        <BLANKLINE>
        Interrupted: ending after this batch.
        >>> batch
        0
    """
    interrupt = Interrupt()

    def note(*_: Any) -> None:  # takes no lock, which the main thread might hold
        interrupt.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if message is not None:
            with suppress(OSError, RuntimeError):  # a closed pipe, or within another print
                print(f"\n{message}")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def count(text: str) -> int:
    """Return an option's whole number of 1 or more, for the ``type`` of an argument."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def from_zero(text: str) -> int:
    """Return an option's whole number from 0 to 2**32 - 1, such as a seed."""
    if not 0 <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 2**32 - 1")
    return int(text)
