"""Making, stepping and closing the environments of a collector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from torchrl.envs import GymEnv, GymWrapper

from ppokit.collectors.batch import Record
from ppokit.collectors.spaces import (
    MASK,
    Leaf,
    OnlySpaces,
    Shape,
    check_reward,
    gym_env,
    observation_leaves,
    with_mask,
    wrap,
)

MakeEnv: TypeAlias = str | Callable[[], Any]
Self = TypeVar("Self", bound="OwnsEnvironments")

VECTORIZATIONS = ("serial", "sync", "async", "vector_entry_point")


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


class VectorEnvs:
    """A gymnasium vector environment that resets its members in the step that ends an episode.

    Raises:
        ValueError: it resets them in another step.
    """

    def __init__(self, env: VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            env.close()
            raise ValueError(
                f"{type(env).__name__} has autoreset mode {mode}. With NEXT_STEP, a step is spent "
                "on each reset, and its frame belongs to no episode. Make the environment with "
                "autoreset_mode=AutoresetMode.SAME_STEP, or use vectorization='serial' or 'async'."
            )
        self._env: Any = env

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them; a native one may take the first seed only."""
        try:
            self._env.reset(seed=list(seeds))
        except TypeError:
            self._env.reset(seed=seeds[0])

    def reset(self) -> list[tuple[Any, dict[str, Any]]]:
        """Reset all; return observation and info of each."""
        return self._each(*self._env.reset())

    def step(self, actions: Sequence[Any], record: Record, time: int) -> None:
        """Step all, and store the ends of episodes."""
        env, space = self._env, self._env.single_action_space
        if isinstance(space, spaces.Box) and space.shape == ():  # torchrl has arrays of one
            actions = list(np.concatenate(actions))
        joined = concatenate(space, actions, create_empty_array(space, env.num_envs))
        observations, reward, terminated, truncated, infos = env.step(joined)
        record.rewards[time] = check_reward(reward, record.rewards[time].shape, None)
        done = terminated | truncated
        if done.any():
            final_infos = self._infos(infos.get("final_info", {}))
            for i in np.flatnonzero(done).tolist():
                flags = terminated[i], truncated[i]
                record.end(time, i, *flags, infos["final_obs"][i], final_infos[i])
        if record.single_array is not None:
            (leaf,) = record.leaves
            accepted = tuple((env.num_envs, *shape) for shape in leaf.accepted)
            rows = leaf._replace(accepted=accepted).check(observations, None)
            record.single_array[time + 1] = rows.reshape(record.single_array[time + 1].shape)
            return
        for i, (observation, info) in enumerate(self._each(observations, infos)):
            record.write(time + 1, i, observation, info)

    def close(self) -> None:
        """Close all."""
        self._env.close()

    def _each(self, observations: Any, infos: Any) -> list[tuple[Any, dict[str, Any]]]:
        space, num_envs = self._env.observation_space, self._env.num_envs
        return list(zip(_split(space, observations, num_envs), self._infos(infos), strict=True))

    def _infos(self, infos: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the entries of ``infos`` that are stored, for each environment."""
        if MASK not in infos:
            return [{} for _ in range(self._env.num_envs)]
        return [{MASK: mask} for mask in infos[MASK]]


def _split(space: spaces.Space, observations: Any, num_envs: int) -> list[Any]:
    """Return each environment's observation; gymnasium's ``iterate`` takes no empty Dict."""
    if not isinstance(space, spaces.Dict):
        return list(iterate(space, observations))
    parts = {name: _split(part, observations[name], num_envs) for name, part in space.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(num_envs)]


Envs: TypeAlias = SerialEnvs | VectorEnvs


class CheckedEnv(gym.Wrapper):
    """An environment of a vector environment, which stores observations by broadcasting them.

    Raises:
        ValueError: in a step or a reset, an observation has another shape than its space declares.
    """

    def __init__(self, env: Any, leaves: Sequence[Leaf], reward: Shape, number: int) -> None:
        super().__init__(gym_env(env) if isinstance(env, GymWrapper) else env)
        self._wrapper = env  # kept as in SerialEnvs
        self._leaves, self._reward, self._number = list(leaves), reward, number

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and check the observation."""
        observation, info = self.env.reset(**kwargs)
        self._leaves = with_mask(self._leaves, info)
        self._check(observation, info)
        return observation, info

    def step(self, action: Any) -> Any:
        """Step the environment, and check observation and reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._check(observation, info)
        reward = np.squeeze(check_reward(reward, self._reward, self._number))
        return observation, reward, terminated, truncated, info

    def _check(self, observation: Any, info: dict[str, Any]) -> None:
        for leaf in self._leaves:
            leaf.read(observation, info, self._number)


def make_envs(
    make_env: MakeEnv, num_envs: int, vectorization: str, categorical_action_encoding: bool
) -> tuple[Envs, GymWrapper]:
    """Return the environments, and torchrl's wrapper of one of them.

    Raises:
        ValueError: ``vectorization`` is unknown, or its environments reset at the wrong time
            or give rewards of several numbers.
        TypeError: ``make_env`` gives no environment, or one with a space that has no encoding.
    """
    if vectorization not in VECTORIZATIONS:
        raise ValueError(f"vectorization must be one of {VECTORIZATIONS}, got {vectorization!r}.")
    if not (isinstance(make_env, str) or callable(make_env)):
        raise TypeError(
            f"make_env must be the id of an environment or a function that makes one, got "
            f"{type(make_env).__name__}: each of the {num_envs} environment(s) is made anew."
        )
    if vectorization == "vector_entry_point":
        return _native(make_env, num_envs, categorical_action_encoding)
    if vectorization == "serial":
        wrappers: list[GymWrapper] = []
        try:
            wrappers += (_single(make_env, categorical_action_encoding) for _ in range(num_envs))
        except BaseException:
            SerialEnvs(wrappers).close()
            raise
        return SerialEnvs(wrappers), wrappers[0]
    wrapper = _single(make_env, categorical_action_encoding)
    gym_env(wrapper).close()
    leaves = [leaf._replace(encode=None) for leaf in observation_leaves(wrapper, {})]
    reward = tuple(wrapper.reward_spec.shape)
    if math.prod(reward) != 1:
        raise ValueError(
            f"The environments declare rewards of shape {list(reward)}; gymnasium's vector "
            "environments hold one number for each environment. Use vectorization='serial'."
        )
    makers = [partial(_make_checked, make_env, leaves, reward, i) for i in range(num_envs)]
    kind = SyncVectorEnv if vectorization == "sync" else AsyncVectorEnv
    # no copy: the collector copies observations when it stores them
    vector = kind(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    return VectorEnvs(vector), wrapper


def _single(make_env: MakeEnv, categorical_action_encoding: bool) -> GymWrapper:
    return wrap(_make(make_env, categorical_action_encoding), categorical_action_encoding)


def _make(make_env: MakeEnv, categorical_action_encoding: bool) -> Any:
    if isinstance(make_env, str):
        return GymEnv(make_env, categorical_action_encoding=categorical_action_encoding)
    return make_env()


def _make_checked(make_env: MakeEnv, *arguments: Any) -> gym.Env:
    return CheckedEnv(_make(make_env, False), *arguments)


def _native(
    make_env: MakeEnv, num_envs: int, categorical_action_encoding: bool
) -> tuple[Envs, GymWrapper]:
    if isinstance(make_env, str):
        env: Any = gym.make_vec(make_env, num_envs, vectorization_mode="vector_entry_point")
    else:
        env = make_env()
    if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
        raise TypeError(
            f"make_env returned {env!r}; with vectorization='vector_entry_point' it must return a "
            f"gymnasium VectorEnv of num_envs={num_envs} environments."
        )
    single = OnlySpaces(env.single_observation_space, env.single_action_space)
    return VectorEnvs(env), wrap(single, categorical_action_encoding)


class OwnsEnvironments:
    """A base class that closes its environments once, also where an exception ends the work."""

    closed: bool = True
    _envs: Any

    def shutdown(self) -> None:
        """Close the environments; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self._envs.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with suppress(Exception):
            self.shutdown()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.shutdown()
            raise
