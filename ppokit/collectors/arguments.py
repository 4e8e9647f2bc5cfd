"""Checks of a collector's arguments before anything is collected."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import nn

from ppokit._keys import as_key, key_parts
from ppokit._recurrent import check_own_states, state_keys
from ppokit.collectors.batch import FLAGS, IS_INIT
from ppokit.collectors.policies import recurrent_states
from ppokit.collectors.spaces import Leaf


def check_options(
    num_envs: int,
    frames_per_batch: int,
    total_frames: int,
    observation_dtype: torch.dtype | None,
    trajs_per_batch: int | None,
    replay_buffer: Any,
) -> None:
    """Raise a ValueError if an option is out of range."""
    for name, value in (("num_envs", num_envs), ("frames_per_batch", frames_per_batch)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}.")
    if total_frames == 0 or total_frames < -1:
        raise ValueError(f"total_frames must be positive, or -1 for no end, got {total_frames}.")
    if observation_dtype not in (None, torch.float16, torch.float32, torch.float64):
        raise ValueError(
            "observation_dtype must be None, torch.float16, torch.float32 or torch.float64, "
            f"got {observation_dtype!r}."
        )
    if trajs_per_batch is not None and (type(trajs_per_batch) is not int or trajs_per_batch < 1):
        raise ValueError(f"trajs_per_batch must be 1 or more episodes, got {trajs_per_batch!r}.")
    if replay_buffer is not None and trajs_per_batch is not None:
        raise ValueError("Pass replay_buffer (None is yielded) or trajs_per_batch, not both.")


def rounded_frames(frames_per_batch: int, num_envs: int, total_frames: int) -> int:
    """Return the frames of a batch, a multiple of ``num_envs``; warn where more are collected."""
    frames = -(-frames_per_batch // num_envs) * num_envs
    if frames != frames_per_batch:
        warnings.warn(
            f"frames_per_batch={frames_per_batch} is no multiple of num_envs={num_envs}: batches "
            f"will have {frames} frames.",
            stacklevel=3,
        )
    if total_frames > 0 and total_frames % frames:
        warnings.warn(
            f"total_frames={total_frames} is no multiple of the {frames} frames of a batch: "
            f"{-(-total_frames // frames) * frames} will be collected.",
            stacklevel=3,
        )
    return frames


def check_device(name: str, module: Any, device: torch.device | None) -> None:
    """Raise where a module's parameters are not on the collector's device."""
    expected = torch.device("cpu") if device is None else torch.empty(0, device=device).device
    if not isinstance(module, nn.Module):
        return
    for parameter, value in chain(module.named_parameters(), module.named_buffers()):
        if value.device != expected:
            raise ValueError(
                f"{parameter} of the {name} is on {value.device}, but the collector's "
                f"device is {device}. Pass device={str(value.device)!r}, or move the {name}."
            )


def check_shared_statistics(transform: Any) -> None:
    """Raise a ValueError if each of several workers would have statistics of its own."""
    if hasattr(transform, "update") and not getattr(transform, "frozen", False):
        raise ValueError(
            f"Each worker would have its own copy of the {type(transform).__name__}, whose "
            "statistics would leave out the frames of the others. Put it into policy and critic, "
            "whose weights carry it: TensorDictSequential(ObservationNormalizer(shape, "
            "out_key='normalized'), network), and call normalizer.update(batch) where you train. "
            "Or freeze() it."
        )


def check_keys(
    policy: Any, transform: Any, observed: Collection[NestedKey], counts: Iterable[str]
) -> None:
    """Raise where transform or policy read a key that nothing writes, or two write one key."""
    present, states, made = set(observed), recurrent_states(policy), []
    if transform is not None:
        _check_reads("observation_transform", transform, present, made)
        made = [as_key(key) for key in transform.out_keys]
        present |= {*made}
    _check_free("collector", (*_RESERVED, *counts), present)
    _check_free("policy", [*states, *getattr(policy, "out_keys", ())], present)
    check_own_states(policy)
    _check_reads("policy", policy, present | {*FLAGS, IS_INIT, *states}, made)


_RESERVED = (*FLAGS, IS_INIT, "action", "reward", "collector", "next")


def _check_free(writer: str, written: Iterable[NestedKey], observed: Iterable[NestedKey]) -> None:
    """Raise a ValueError where the writer would replace an observation."""
    names = {key: key_parts(key) for key in observed}
    for key in written:
        parts = key_parts(key)
        for observation, other in names.items():
            if parts[: len(other)] == other[: len(parts)]:
                raise ValueError(
                    f"The {writer} writes {key!r}, which would replace the observation "
                    f"{observation!r} in the batch. Rename the observation with a gymnasium "
                    "wrapper, or the policy's entry by its out_keys; a module that changes "
                    "observations for the policy belongs in observation_transform."
                )


def _check_reads(
    name: str, module: Any, present: Collection[NestedKey], made: Iterable[NestedKey]
) -> None:
    """Raise unless each key is present, or a module makes or has what is in it, or what it is in.

    A module that reads the whole of what others write in parts, as the distribution of a composite
    actor reads ``"params"``, has it among the policy's ``in_keys``.
    """
    if not callable(module):
        raise TypeError(f"{name} must be a TensorDictModule, got {type(module).__name__}.")
    own = getattr(module, "out_keys", ())
    wholes = {part for key in present for part in _nesting(key)}
    wholes |= {part for key in own for part in _nesting(key)[:-1]}
    made = {key_parts(key) for key in (*made, *own)}
    missing = [
        key
        for key in getattr(module, "in_keys", ())
        if key_parts(key) not in wholes and made.isdisjoint(_nesting(key)[:-1])
    ]
    if missing:
        states = [key for key in state_keys(module) if key in missing]
        fix = (
            f" {states} would be recurrent states: give the module that has them a method "
            "make_tensordict_primer(), as torchrl's LSTMModule has it."
        )
        raise KeyError(
            f"The {name} reads {missing}, which neither the environments nor an "
            f"observation_transform write. There is: {', '.join(sorted(map(str, present)))}."
            + (fix if states else "")
        )


def _nesting(key: NestedKey) -> list[tuple[str, ...]]:
    """Return the keys of the entries that hold an entry, the outermost first, and its own."""
    parts = key_parts(key)
    return [parts[: size + 1] for size in range(len(parts))]


@contextmanager
def dtypes_explained(leaves: Collection[Leaf]) -> Iterator[None]:
    """Explain torch's errors where observations have another dtype than the network."""
    try:
        yield
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        dtypes = ", ".join(f"{leaf.key!r} is {leaf.dtype}" for leaf in leaves)
        fix = (
            "an action mask must be bool. Declare it as Box(0, 1, shape, np.bool_), or have a "
            "module before the distribution write mask.bool()."
            if "boolean mask" in str(error)
            else "pass observation_dtype=, which is that of floating-point observations; bring "
            "others to it with observation_transform=ObservationNormalizer(shape) or gymnasium's "
            "DtypeObservation; or have a policy of that dtype."
        )
        raise RuntimeError(
            f"The policy raised: {error}. The environments' {dtypes}: {fix}"
        ) from error
