"""What a training script needs around its loop: a folder of its own, Ctrl-C, checked options."""

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
    """Make the folder of a run, and lose nothing that is in it.

    An earlier run of the same script that is there is renamed (to the first of ``folder.1``,
    ``folder.2``, ... that is free), and a line says so. What else is there is refused. A file
    ``run.json`` tells them apart. Call it last before training: then a run that ends with an error
    before has moved nothing. It does not know whether an earlier run still goes on: give runs that
    go on at the same time a folder each.

    Args:
        folder: of the run.
        script: the name that marks the folder as this script's.
        resume: go on in the folder as it is.

    Raises:
        FileExistsError: it holds files that are no run of this script, or another run has begun
            there at this moment.
        OSError: it cannot be made or renamed, or is the current folder or around it.

    Example:
        >>> import tempfile
        >>> temporary = tempfile.TemporaryDirectory()
        >>> out = Path(temporary.name) / "run"
        >>> begin_run(out, "my_ppo")
        >>> _ = (out / "history.json").write_text("[]")
        >>> begin_run(out, "my_ppo")  # doctest: +ELLIPSIS
        /...run held an earlier run; it is now /...run.1.
        >>> begin_run(out.parent, "my_ppo")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileExistsError: /... is not empty, and holds no earlier run of this script.
        >>> temporary.cleanup()
    """
    folder, path = Path(folder), Path(os.path.realpath(folder))
    marker, kept = path / MARKER, None
    has_files = path.exists() and any(path.iterdir())
    if has_files and (os.path.lexists(marker) or not resume):
        if not _is_of(marker, script):
            raise FileExistsError(
                f"{folder} is not empty, and holds no earlier run of this script."
            )
        if resume:
            return
        if Path.cwd().is_relative_to(path):
            raise OSError(f"the current folder {path} cannot be renamed")
        names = (f"{path}.{number}" for number in itertools.count(1))
        kept = next(name for name in names if not os.path.lexists(name))
        path.rename(kept)
    path.mkdir(parents=True, exist_ok=True)
    try:
        with marker.open("x") as file:
            json.dump({"script": script}, file)
    except FileExistsError:
        raise
    except OSError:
        marker.unlink(missing_ok=True)
        raise
    if kept is not None:
        print(f"{folder} held an earlier run; it is now {kept}.")


def _is_of(marker: Path, script: str) -> bool:
    if not marker.is_file():
        return False
    try:
        return json.loads(marker.read_text())["script"] == script
    except (LookupError, TypeError, ValueError, RecursionError):
        return False


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def catch_interrupt(
    message: str | None = "Interrupted: ending after this batch.",
) -> Iterator[Interrupt]:
    """Let a loop end where it is whole: the first Ctrl-C is noted, and a second one interrupts.

    Args:
        message: what the first one prints; None for nothing.

    Yields:
        An object whose ``pressed`` is to be asked at the end of a batch.

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
            with suppress(OSError, RuntimeError, ValueError):  # nobody reads, or print is under way
                print(f"\n{message}")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)  # None: not set by Python


def count(text: str) -> int:
    """Return an option's whole number of 1 or more, for the ``type`` of an argument.

    Raises:
        argparse.ArgumentTypeError: it is less.
    """
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def from_zero(text: str) -> int:
    """Return an option's whole number from 0 to 2**32 - 1, such as a seed.

    Raises:
        argparse.ArgumentTypeError: it is out of this range.
    """
    if not 0 <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 2**32 - 1")
    return int(text)
