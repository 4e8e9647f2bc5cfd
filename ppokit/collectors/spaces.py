"""What an environment hands out and takes in, as torchrl's ``GymWrapper`` names and encodes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import GymWrapper

from ppokit._keys import as_key, key_parts

MASK = "action_mask"


class Leaf(NamedTuple):
    """An entry of the observation, and how to read it off what ``step`` or ``reset`` returned."""

    key: NestedKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Any, Mapping[str, Any]], Any]  # (observation, info) to an array or a number


class OnlySpaces(gym.Env):
    """One of the environments of a native vector environment, as far as its spaces go."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


def wrap(env: Any, categorical_action_encoding: bool) -> GymWrapper:
    """Return torchrl's wrapper of an environment, which knows how to encode its spaces.

    Raises:
        TypeError: this is no environment, or torchrl has no encoding for one of its spaces.
    """
    if isinstance(env, GymWrapper):
        if env.batch_size or env.wrapper_frame_skip != 1:
            raise TypeError(
                f"make_env returned {env!r}, which is batched or skips frames. Return a single "
                "gymnasium environment, and skip frames with a gymnasium wrapper."
            )
        return env
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"make_env returned {type(env).__name__}; it must return a gymnasium.Env or an "
            "undecorated torchrl GymEnv. Of a TransformedEnv, pass what the transforms do as "
            "observation_transform or as gymnasium wrappers."
        )
    try:
        return GymWrapper(env, categorical_action_encoding=categorical_action_encoding)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"torchrl has no encoding for observation space {env.observation_space} with action "
            f"space {env.action_space}: {error} Wrap the environment, for instance in "
            "gymnasium.wrappers.FlattenObservation."
        ) from error


def observation_leaves(wrapper: GymWrapper, info: Mapping[str, Any]) -> list[Leaf]:
    """Return the entries of an observation; an action mask in ``info`` is one of them, too."""
    space = wrapper._env.observation_space
    leaves = [
        _leaf(as_key(key), spec, space) for key, spec in wrapper.observation_spec.items(True, True)
    ]
    if MASK in info and MASK not in [leaf.key for leaf in leaves]:
        shape = np.shape(info[MASK])
        leaves.append(Leaf(MASK, shape, torch.bool, lambda _, info: info[MASK]))
    return leaves


def _leaf(key: NestedKey, spec: Any, space: Any) -> Leaf:
    path: list[str] = []
    if isinstance(space, spaces.Dict):
        for name in key_parts(key):
            # torchrl calls a "state" by the name of "observation" where there is no such entry
            renamed = name not in space.spaces and name == "observation"
            path.append("state" if renamed else name)
            space = space[path[-1]]
    if not isinstance(spec.dtype, torch.dtype):
        raise TypeError(f"Observation {key!r} is no array: {space}. Remove it with a wrapper.")

    def plain(observation: Any, info: Mapping[str, Any]) -> Any:
        return reduce(getitem, path, observation)

    def encoded(observation: Any, info: Mapping[str, Any]) -> Any:
        value = reduce(getitem, path, observation)
        value = np.stack(value) if isinstance(value, tuple) else value
        return spec.encode(value, ignore_device=True).numpy()

    read = plain if isinstance(space, spaces.Box) else encoded
    return Leaf(key, tuple(spec.shape), spec.dtype, read)


def is_bare(leaves: Sequence[Leaf], space: spaces.Space) -> bool:
    """Return whether the observation is one array that can be stored as it is."""
    return len(leaves) == 1 and isinstance(space, spaces.Box)


class Actions:
    """What the policy's actions are to the environments."""

    def __init__(self, wrapper: GymWrapper) -> None:
        self._wrapper = wrapper
        self._space = wrapper._env.action_space
        self.shape = tuple(wrapper.action_spec.shape)
        self.is_choice = isinstance(self._space, spaces.Discrete)
        self.is_one_hot = self.is_choice and bool(self.shape)

    def check(self, action: Tensor, num_envs: int) -> None:
        """Raise unless the actions have the shape that the environments expect."""
        if action.shape != (num_envs, *self.shape):
            raise ValueError(
                f"The policy's 'action' has shape {list(action.shape)}; for {num_envs} "
                f"environment(s) with {self._space} it must be {[num_envs, *self.shape]}. "
                "One-hot and index encodings are chosen with categorical_action_encoding."
            )

    def read(self, action: Tensor) -> Sequence[Any]:
        """Return what each of the environments is to be given, from actions ``[n, ...]``."""
        if isinstance(self._space, spaces.Box):
            return list(action.cpu().numpy())
        if self.is_choice:
            return (action.long().argmax(-1) if self.is_one_hot else action).tolist()
        return [self._wrapper.read_action(one) for one in action]
