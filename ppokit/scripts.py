"""What a training script needs around its loop: a folder of its own, Ctrl-C, checked options."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

__all__ = ["begin_run", "catch_interrupt", "count", "from_zero"]


def begin_run(folder: str | os.PathLike[str], script: str, *, resume: bool = False) -> None:
    """Make the folder of a run, and lose nothing that is in it.

    An earlier run of the same script that is there is renamed (to the first of ``folder.1``,
    ``folder.2``, ... that is free), and a line says so. What else is there is refused. A file
    ``run.json`` tells them apart. Call it last before training: then a run that ends with an error
    before has moved nothing.

    Args:
        folder: of the run.
        script: the name that marks the folder as this script's.
        resume: go on in the folder as it is.

    Raises:
        FileExistsError: it holds files, and no earlier run of this script.
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
    path = Path(folder).resolve()
    marker = path / "run.json"
    if not resume and path.exists() and any(path.iterdir()):
        if _script_of(marker) != script:
            raise FileExistsError(
                f"{folder} is not empty, and holds no earlier run of this script."
            )
        if Path.cwd().is_relative_to(path):
            raise OSError(f"the current folder {path} cannot be renamed")
        free = (Path(f"{path}.{number}") for number in itertools.count(1))
        kept = next(candidate for candidate in free if not candidate.exists())
        path.rename(kept)
        print(f"{folder} held an earlier run; it is now {kept}.")
    path.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"script": script}))


def _script_of(marker: Path) -> Any:
    try:
        return json.loads(marker.read_text())["script"]
    except (FileNotFoundError, LookupError, TypeError, ValueError):
        return None


@contextmanager
def catch_interrupt(
    message: str | None = "Interrupted: ending after this batch.",
) -> Iterator[Event]:
    """Let a loop end where it is whole: the first Ctrl-C sets an event, a second one interrupts.

    Args:
        message: what the first one prints; None for nothing.

    Yields:
        The event, to be asked at the end of a batch.

    Raises:
        ValueError: this is not the main thread, which alone receives signals.

    Example:
        >>> with catch_interrupt() as interrupted:
        ...     for batch in range(1_000_000):
        ...         signal.raise_signal(signal.SIGINT)  # somebody presses Ctrl-C
        ...         if interrupted.is_set():
        ...             break  # and a checkpoint is saved
        <BLANKLINE>
        Interrupted: ending after this batch.
        >>> batch
        0
    """
    interrupted = Event()

    def interrupt(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if message is not None:
            print(f"\n{message}")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
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
