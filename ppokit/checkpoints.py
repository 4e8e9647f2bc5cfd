"""Checkpoints that are written atomically and read without pickle."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ppokit._batch import Parts, StateDict
from ppokit._state import check_names, load_all, state_dict_of, state_of
from ppokit.collectors.policy import heads_of


def save_checkpoint(path: str | os.PathLike[str], parts: Parts) -> None:
    """Write the state of all parts to one file, atomically.

    The file is written beside the old one, reaches the disk, and then replaces it: a process that
    is killed while it saves leaves the last good checkpoint. With several ranks, only one saves.

    Args:
        path: of the checkpoint; its folder is made.
        parts: by name, objects with a ``state_dict`` (blocks, modules, optimizers, collectors), and
            plain data: numbers, strings, tensors, and lists and dictionaries of them.

    Raises:
        TypeError: ``parts`` is no mapping; a part, or its state, holds objects that cannot be
            loaded without pickle.
        OSError: the file cannot be written, as on a full disk. An older checkpoint stays as it is
            after any error.

    Example:
        >>> import tempfile
        >>> from ppokit import RewardNormalizer, load_checkpoint, save_checkpoint
        >>> normalizer = RewardNormalizer(0.99)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", {"normalizer": normalizer, "frames": 1_000})
        ...     load_checkpoint(f"{folder}/last.pt", {"normalizer": normalizer, "frames": None})
        {'frames': 1000}
    """
    _check_parts(parts)
    states = {name: state_dict_of(x) if _has_state(x) else x for name, x in parts.items()}
    states[_DISTRIBUTIONS] = {name: _distributions(part) for name, part in parts.items()}
    path = Path(os.path.realpath(path))  # of a link the file
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        try:
            torch.save(states, unfinished)
        except RuntimeError as error:  # of torch's writer
            raise OSError(f"{unfinished} cannot be written. Is the disk full? {error}") from error
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        try:
            torch.load(unfinished, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise TypeError(
                f"{', '.join(parts)}: there are objects that cannot be loaded without pickle. Save "
                f"states, numbers, strings, tensors, lists and dictionaries. {error}"
            ) from error
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    parts: Parts,
    *,
    map_location: torch.device | str | None = None,
) -> StateDict:
    """Load a file of :func:`save_checkpoint` into the same parts: completely, or not at all.

    The file is read with ``weights_only=True``, so it can run no code, and its checksums are
    compared.

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
            rejects its state, because it has another shape or version.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from ppokit import load_checkpoint, save_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", {"policy": nn.Linear(4, 2), "seed": 0})
        ...     load_checkpoint(f"{folder}/last.pt", {"policy": nn.Linear(4, 2), "seed": None})
        {'seed': 0}
    """
    _check_parts(parts)
    states = _read(Path(path), map_location)
    saved = states.pop(_DISTRIBUTIONS, {})
    check_names(states, parts, "what it is loaded into")
    for name, part in parts.items():
        _check_distributions(name, saved.get(name), part)
    stateful = {name: part for name, part in parts.items() if _has_state(part)}
    load_all(stateful, states)
    return {name: value for name, value in states.items() if name not in stateful}


def load_policy(
    path: str | os.PathLike[str],
    policy: nn.Module,
    observation_transform: nn.Module | None = None,
    *,
    map_location: torch.device | str | None = None,
) -> None:
    """Load a policy alone from a file of :func:`save_checkpoint`, to evaluate it or to use it.

    The weights come from the part ``"policy"``, or from the policy of a part that is a
    :class:`~ppokit.GymCollector`; likewise with ``"observation_transform"``. All are loaded, or
    none.

    Args:
        path: of the checkpoint.
        policy: built as the one that was saved.
        observation_transform: that of training, such as an
            :class:`~ppokit.ObservationNormalizer`; required if the checkpoint has its state.
        map_location: where tensors go first, as in ``torch.load``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        KeyError: it has no policy, or no transform; or a transform that is not asked for.
        ValueError: it is no checkpoint or damaged, a module rejects its state, or it has several
            collectors and no part ``"policy"``.

    Example:
        >>> from torch import nn
        >>> import tempfile
        >>> from ppokit import load_policy, save_checkpoint
        >>> trained, policy = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", {"policy": trained, "frames": 1_000})
        ...     load_policy(f"{folder}/last.pt", policy)
        >>> bool((policy.weight == trained.weight).all())
        True
    """
    states = _read(Path(path), map_location)
    saved = states.pop(_DISTRIBUTIONS, {})
    names = {"policy": "policy_state_dict", "observation_transform": "env_state_dict"}
    modules = {"policy": policy, "observation_transform": observation_transform}
    found: StateDict = {}
    for name, in_collector in names.items():
        places = {name: states.get(name)} | {
            part: x[in_collector]
            for part, x in states.items()
            if isinstance(x, dict) and in_collector in x
        }
        places = {part: x for part, x in places.items() if x}
        if len(places) > 1 and name not in places:
            raise ValueError(
                f"{path} has several collectors, {sorted(places)}: save the one to load under "
                f"{name!r}, too."
            )
        place, state = next(iter(places.items()), (None, None))
        if (state is None) != (not state_of(modules[name])):
            there = "has no" if state is None else "has the state of an"
            fix = "Save one under this name" if state is None else f"Give load_policy its {name}"
            raise KeyError(f"{path} {there} {name!r}; its parts are {sorted(states)}. {fix}.")
        found[name] = state
        _check_distributions(name, saved.get(place), modules[name])
    load_all({name: modules[name] for name, state in found.items() if state}, found)


_DISTRIBUTIONS = "__policy_distributions__"  # of each part, beside the states


def _check_parts(parts: object) -> None:
    if not isinstance(parts, Mapping) or _DISTRIBUTIONS in parts:
        raise TypeError(
            f"parts must be a mapping of names such as {{'policy': policy}}, without "
            f"{_DISTRIBUTIONS!r}, got {type(parts).__name__}."
        )


def _distributions(part: Any) -> list[object]:
    """Return class and arguments of the distributions of a policy, a collector or an update."""
    module = getattr(getattr(part, "step", None), "loss", getattr(part, "policy", part))
    return [_plain([x.distribution_class, x.distribution_kwargs]) for x in heads_of(module)]


def _plain(x: Any) -> object:
    """Return text and float32 numbers, in lists and dictionaries; of other objects the name."""
    if isinstance(x, partial):
        return _plain([x.func, *x.args, x.keywords])
    if hasattr(x, "tolist"):  # a tensor, an array or a number of numpy
        x = x.tolist()
    if isinstance(x, Mapping):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [*map(_plain, x)] if len(x) != 1 else _plain(x[0])
    if isinstance(x, int | float):
        return float(np.float32(x))
    return x if isinstance(x, str | None) else getattr(x, "__name__", type(x).__name__)


def _check_distributions(name: str, saved: list[object] | None, part: object) -> None:
    """Raise a ValueError where the policy of a part draws from another distribution."""
    own = _distributions(part)
    if saved and own and [*map(_plain, saved)] != own:
        raise ValueError(
            f"{name!r} has another distribution than the policy that was saved: {own} here, and "
            f"{saved} in the checkpoint. Build it with the same options, such as squash=True."
        )


def _read(path: Path, map_location: torch.device | str | None) -> StateDict:
    with path.open("rb") as file:
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch.load compares no checksum
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged!r} is wrong")
            file.seek(0)
            states = torch.load(file, map_location=map_location, weights_only=True)
            if not isinstance(states, dict):
                raise TypeError(f"it holds a {type(states).__name__}")
        except Exception as error:  # of many kinds, by where the damage is
            raise ValueError(
                f"{path} is not a checkpoint of save_checkpoint, is damaged or cut off, or holds "
                f"objects that only pickle loads, which can run any code: {error}"
            ) from error
    return states


def _has_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
