"""Checkpoints that are whole, whenever the process that writes them dies."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppokit._state import check_names, load_all

FOLDER = 0x10  # the bit of a zip entry's attributes


def save_checkpoint(path: str | os.PathLike[str], parts: Mapping[str, Any]) -> None:
    """Write the state of all parts to one file, at once.

    The file is written beside the old one, reaches the disk, and then takes its place: a process
    that is killed while it saves leaves the last good checkpoint, and one that is killed at any
    other moment leaves the new one. With several ranks, let one of them save.

    Args:
        path: of the checkpoint; its folder is made.
        parts: by name, what has a ``state_dict`` (blocks, modules, optimisers, collectors), and
            plain data: numbers, strings, tensors, and lists and dictionaries of them.

    Raises:
        TypeError: a part is neither, or its state holds what cannot be loaded again.
        OSError: it could not be written, as on a full disk. An older checkpoint stays as it is,
            whatever is raised.

    Example:
        >>> import tempfile
        >>> from ppokit import RewardNormalizer
        >>> normalizer = RewardNormalizer(0.99)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", {"normalizer": normalizer, "frames": 1_000})
        ...     load_checkpoint(f"{folder}/last.pt", {"normalizer": normalizer, "frames": None})
        {'frames': 1000}
    """
    states: dict[str, Any] = {}
    for name, part in parts.items():
        if _has_state(part):
            states[name] = part.state_dict()
        else:
            _check_plain(name, part)
            states[name] = part
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        try:
            with unfinished.open("wb") as file:
                torch.save(states, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch's writer raises a RuntimeError
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None  # torch's writer could not be closed after it
            raise OSError(
                f"{path} could not be written, and is as it was. Is the disk full, or a quota used "
                f"up? {error}"
            ) from error
        try:
            torch.load(unfinished, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise TypeError(
                f"A state of {', '.join(parts)} holds objects that cannot be loaded without "
                f"pickle; {path} is as it was. {error}"
            ) from error
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, Any],
    *,
    map_location: torch.device | str | None = None,
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` wrote into the same parts: all of it, or nothing.

    The file is read with ``weights_only=True``, so it can run no code, and compared with its
    checksums.

    Args:
        path: of the checkpoint.
        parts: as they were saved; of plain data only the name counts.
        map_location: where tensors go first, as in ``torch.load``.

    Returns:
        The plain data, by name.

    Raises:
        FileNotFoundError: there is no checkpoint.
        KeyError: it has other parts; the message names them.
        ValueError: it is no checkpoint, was cut off or is damaged, or needs pickle; or a part
            refuses its state, because it has another shape or version.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", {"policy": nn.Linear(4, 2), "seed": 0})
        ...     load_checkpoint(f"{folder}/last.pt", {"policy": nn.Linear(4, 2), "seed": None})
        {'seed': 0}
    """
    states = _read(Path(path), map_location)
    check_names(states, parts, "what it is loaded into")
    stateful = {name: part for name, part in parts.items() if _has_state(part)}
    load_all(stateful, states)
    return {name: value for name, value in states.items() if name not in stateful}


def _read(path: Path, map_location: Any) -> dict[str, Any]:
    with path.open("rb") as file:  # what it raises says what is wrong with the path
        try:
            archive = zipfile.ZipFile(file)
            folders = [x.filename for x in archive.infolist() if x.external_attr & FOLDER]
            # torch.load looks at no checksum, and does not read what is marked as a folder
            damaged = archive.testzip() or next(iter(folders), None)
        except Exception as error:  # of many kinds, by where the damage is
            raise ValueError(
                f"{path} is no checkpoint, a damaged one, or only the beginning of one: {error}. "
                "save_checkpoint replaces a file at once, so look for a copy that was cut off."
            ) from error
    if damaged is not None:
        raise ValueError(
            f"{path} is damaged: the checksum or the kind of {damaged!r} is not that of what was "
            "written. Load another copy."
        )
    try:
        states = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # what unpickling an archive that others wrote may come upon
        raise ValueError(
            f"{path} is no checkpoint of save_checkpoint: it holds no states, or objects that only "
            f"pickle loads, which can run any code. {type(error).__name__}: {error}"
        ) from error
    if not isinstance(states, dict):
        raise ValueError(
            f"{path} is no checkpoint of save_checkpoint: it holds a {type(states).__name__}."
        )
    return states


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _check_plain(name: str, part: Any) -> None:
    if isinstance(part, dict):
        for key, value in part.items():
            _check_plain(f"a key of {name}", key)
            _check_plain(f"{name}[{key!r}]", value)
    elif isinstance(part, list | tuple):
        for index, value in enumerate(part):
            _check_plain(f"{name}[{index}]", value)
    # By the very type: numpy's float64 is a float, and needs pickle.
    elif type(part) not in (bool, int, float, str, type(None)) and not isinstance(part, Tensor):
        raise TypeError(
            f"{name} is of type {type(part).__name__}, which has no state_dict and cannot be "
            "loaded without pickle. Save numbers, strings, tensors, lists and dictionaries."
        )
