"""Checks of a collector's arguments before anything is collected."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

import torch
from tensordict.utils import NestedKey
from torchrl.collectors import Collector

from ppokit._batch import IS_INIT, VERSION_KEY, as_key, key_parts
from ppokit._checks import check_device
from ppokit._recurrent import check_own_states, recurrent_states
from ppokit.collectors.batch import FLAGS
from ppokit.collectors.normalization import updated_parts

# Values that describe GymCollector; None, False, 0, -1 and {} turn an argument off.
_ACCEPTED = {
    **dict.fromkeys(("auto_register_policy_transforms", "extend_buffer"), (True,)),
    **dict.fromkeys(("reset_when_done", "track_traj_ids"), (True,)),
    **dict.fromkeys(("no_cuda_sync", "trust_policy", "use_buffers"), (True, False)),
    "return_same_td": (True, False),  # what GymCollector yields to torchrl's workers
    "replay_write_mode": ("rollout",),
    "traj_format": ("padded",),
}


def take_arguments_of_torchrl(
    arguments: dict[str, Any], policy: Any, device: Any
) -> tuple[Any, torch.device | None]:
    """Return policy and device; raise if another argument asks for what GymCollector lacks."""
    arguments.pop("traj_pool", None)  # ids are told apart by worker_idx
    factory = arguments.pop("policy_factory", None)
    if factory is not None:
        if policy is not None:
            raise ValueError("Pass a policy, or None beside a policy_factory; there are both.")
        policy = factory()
    names = ("storing_device", "policy_device", "env_device")
    devices = {name: arguments.pop(name, None) for name in names} | {"device": device}
    given = {name: torch.device(x) for name, x in devices.items() if x is not None}
    if given.get("env_device") == torch.device("cpu"):
        del given["env_device"]
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name}={str(value)!r}" for name, value in given.items())
        raise ValueError(
            f"GymCollector has one device, and got {said}. Environments are on the CPU."
        )
    known = inspect.signature(Collector.__init__).parameters
    for name, value in arguments.items():
        if name not in known and name not in _ACCEPTED:
            raise TypeError(f"GymCollector() got an unexpected keyword argument {name!r}.")
        if value not in _ACCEPTED.get(name, (0, -1)) and value not in (None, {}):
            raise ValueError(
                f"GymCollector does not support {name}={value!r} of torchrl's Collector. Leave it "
                "out; 'Arguments of Collector' in docs/howto/in_torchrl.md says what to use."
            )
    found = next(iter(given.values()), None)
    check_device(found)
    return policy, found


def check_options(
    observation_dtype: torch.dtype | None,
    *,
    has_buffer: bool,
    has_whole_episodes: bool,
    transform_of_worker: Any,
) -> None:
    """Raise a ValueError if an option is out of range, or workers would part statistics."""
    if observation_dtype not in (None, torch.float16, torch.float32, torch.float64):
        raise ValueError(
            "observation_dtype must be None, torch.float16, torch.float32 or torch.float64, "
            f"got {observation_dtype!r}."
        )
    if has_buffer and has_whole_episodes:
        raise ValueError("Pass replay_buffer (None is yielded) or trajs_per_batch, not both.")
    parts = updated_parts(transform_of_worker)
    if moving := [x for x in parts if not getattr(x, "frozen", False)]:
        raise ValueError(
            f"Each worker would have its own copy of the {type(moving[0]).__name__}. Put it into "
            "policy and critic, whose weights carry it: TensorDictSequential("
            "ObservationNormalizer(shape, out_key='normalized'), network), and call "
            "normalizer.update(batch) where you train. Or freeze() it."
        )


def check_keys(
    policy: Any, transform: Any, observed: Collection[NestedKey], counts: Iterable[str]
) -> None:
    """Raise where policy or transform read a name that nothing writes, or two write one entry."""
    for name, module, is_right in (
        ("observation_transform", transform, transform is None or hasattr(transform, "out_keys")),
        ("policy", policy, callable(policy)),
    ):
        if not is_right:
            raise TypeError(f"{name} must be a TensorDictModule, got {type(module).__name__}.")
    check_own_states(policy)
    states, made = recurrent_states(policy), getattr(transform, "out_keys", ())
    own = [as_key(key) for key in (*states, *getattr(policy, "out_keys", ()))]
    there = [*observed, *map(as_key, made)]
    names = *FLAGS, IS_INIT, VERSION_KEY, "action", "reward", "collector", "next", *counts
    reserved = dict.fromkeys(names, "collector")
    reserved |= {"raw_reward": "reward normalizer", "shifted_valid": "GAE of the update"}
    reserved["steps_to_next_obs"] = "MultiStepTransform of torchrl"  # which GAE reads
    if taken := [key for key in own if key_parts(key)[0] == "collector"]:
        raise ValueError(
            f"The policy writes {taken[0]!r}, over the collector's entries: rename it, or the part "
            "of a Dict action, with a gymnasium wrapper."
        )
    for key in there:
        who = reserved.get(key_parts(key)[0], "policy")
        if who != "policy" or key in own:
            raise ValueError(
                f"The {who} writes {key!r}, which would replace the observation of "
                "that name in the batch, or be taken for it. Rename the observation with a "
                "gymnasium wrapper, or the policy's entry by its out_keys; a module that changes "
                "observations for the policy belongs in observation_transform."
            )
    for name, module, keys in (
        ("observation_transform", transform, observed),
        ("policy", policy, [*there, *own, *FLAGS, IS_INIT]),
    ):
        names = {key_parts(key)[0] for key in (*keys, *getattr(module, "out_keys", ()))}
        reads = getattr(module, "in_keys", ())
        if missing := [key for key in reads if key_parts(key)[0] not in names]:
            raise KeyError(
                f"The {name} reads {missing}, which neither the environments nor an "
                f"observation_transform write. There is: {', '.join(sorted(map(str, there)))}. "
                "(A recurrent module declares its states by make_tensordict_primer().)"
            )
