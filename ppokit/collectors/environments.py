"""Making and stepping the environments of a collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torchrl.envs.libs.utils as torchrl_gym
from gymnasium.vector import VectorEnv
from torchrl.envs import GymEnv, GymWrapper

from ppokit.collectors.batch import Record
from ppokit.collectors.spaces import OnlySpaces, gym_env, wrap
from ppokit.collectors.vector_environments import VectorEnvs, check_reward

# torchrl keeps the error of a missing gym, whose traceback keeps alive what the caller had.
if torchrl_gym.IMPORT_ERROR is not None:
    torchrl_gym.IMPORT_ERROR.__traceback__ = None

MakeEnv: TypeAlias = str | Callable[[], Any]


class SerialEnvs:
    """Environments in this process, stepped one after the other in a plain loop."""

    def __init__(self, wrappers: Sequence[GymWrapper]) -> None:
        self._wrappers = wrappers  # torchrl closes the environment of a wrapper that is collected
        self._envs: list[gym.Env] = [gym_env(wrapper) for wrapper in wrappers]

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them."""
        for env, seed in zip(self._envs, seeds, strict=True):
            env.reset(seed=seed)

    def reset(self) -> list[tuple[Any, dict[str, Any]]]:
        """Reset all; return observation and info of each."""
        return [env.reset() for env in self._envs]

    def step(self, actions: Sequence[Any], record: Record, time: int) -> None:
        """Step all, and reset those whose episode is over."""
        rewards, reward_shape, row = record.rewards[time], record.reward_shape, time + 1
        array, leaf = record.single_array, record.leaves[0]
        shape, dtype = leaf.accepted[0], None if array is None else array.dtype
        for i, env in enumerate(self._envs):
            observation, reward, terminated, truncated, info = env.step(actions[i])
            rewards[i] = reward if type(reward) is float else check_reward(reward, reward_shape, i)
            if terminated or truncated:
                record.end(time, i, terminated, truncated, observation, info)
                observation, info = env.reset()
            if array is None:
                record.write(row, i, observation, info)
            elif (
                type(observation) is np.ndarray
                and observation.dtype is dtype
                and observation.shape == shape
            ):
                array[row, i] = observation
            else:
                array[row, i] = leaf.check(observation, i)

    def close(self) -> None:
        """Close all, also if one of them fails to."""
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)


Envs: TypeAlias = SerialEnvs | VectorEnvs


def make_envs(
    make_env: Any, num_envs: int, categorical_action_encoding: bool
) -> tuple[Envs, GymWrapper, int]:
    """Return the environments, torchrl's wrapper of the first, and how many there are."""
    encoding = categorical_action_encoding
    is_list = isinstance(make_env, list | tuple) and not callable(make_env)
    makers: list[Any] = [*make_env] if is_list else [make_env]
    if not makers:
        raise ValueError("make_env is an empty list: give one id or function per environment.")
    for maker in makers:
        if not (isinstance(maker, str | VectorEnv) or callable(maker)):
            raise TypeError(
                "make_env must be the id of an environment, a function that makes one, a list of "
                "these, or a gymnasium VectorEnv, which holds several; got "
                f"{type(maker).__name__}."
            )
    first = makers[0] if isinstance(makers[0], VectorEnv) else _make(makers[0], encoding)
    if isinstance(first, VectorEnv):
        count = first.num_envs
        _check_count(num_envs, count)
        single = OnlySpaces(first.single_observation_space, first.single_action_space)
        return VectorEnvs(first), wrap(single, encoding), count
    wrappers: list[GymWrapper] = []
    try:
        wrappers.append(wrap(first, encoding))
        if is_list:
            _check_count(num_envs, len(makers))
        others = makers[1:] if is_list else makers * (num_envs - 1)
        for maker in others:
            wrappers.append(wrap(_make(maker, encoding), encoding))
        _check_spaces(wrappers)
    except BaseException:
        SerialEnvs(wrappers).close()
        raise
    return SerialEnvs(wrappers), wrappers[0], len(wrappers)


def _check_count(num_envs: int, count: int) -> None:
    if num_envs not in (1, count):
        raise ValueError(
            f"make_env holds {count} environments, and num_envs is {num_envs}: leave num_envs out."
        )


def _check_spaces(wrappers: Sequence[GymWrapper]) -> None:
    first, *others = [gym_env(wrapper) for wrapper in wrappers]
    for i, env in enumerate(others, 1):
        for name in ("observation_space", "action_space"):
            space, expected = getattr(env, name), getattr(first, name)
            if space != expected:
                raise ValueError(
                    f"Environment {i} has {name} {space}, and environment 0 has {expected}. The "
                    "environments of a collector have the same spaces: wrap them."
                )


def _make(make_env: MakeEnv, categorical_action_encoding: bool) -> Any:
    if isinstance(make_env, str):
        return GymEnv(make_env, categorical_action_encoding=categorical_action_encoding)
    return make_env()


def seeds_from(seed: int, count: int, static: bool) -> list[int]:
    """Return the seeds that ``SerialEnv.set_seed`` gives: each is drawn from the one before it."""
    if seed < 0:
        raise ValueError(f"A seed must be a whole number of at least 0, got {seed}.")
    seeds = [seed]
    while len(seeds) < count:
        drawn = np.random.default_rng(seeds[-1]).bytes(8)
        seeds.append(seed if static else int.from_bytes(drawn, "big") % (2**32 - 1))
    return seeds
