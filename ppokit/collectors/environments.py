"""Making and stepping the environments of a collector."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torchrl.envs.libs.utils as torchrl_gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torchrl.envs import GymEnv, GymWrapper

from ppokit.collectors.batch import Record
from ppokit.collectors.processes import ProcessVectorEnv
from ppokit.collectors.spaces import (
    OnlySpaces,
    gym_env,
    observation_leaves,
    wrap,
)
from ppokit.collectors.vector_environments import (
    CheckedEnv,
    VectorEnvs,
    check_reward,
    parts_of_reset,
    parts_of_step,
)

# torchrl keeps the error of a missing gym, whose traceback keeps alive what the caller had.
if torchrl_gym.IMPORT_ERROR is not None:
    torchrl_gym.IMPORT_ERROR.__traceback__ = None

MakeEnv: TypeAlias = str | Callable[[], Any]

VECTORIZATIONS = ("serial", "sync", "async", "vector_entry_point")


class SerialEnvs:
    """Environments in this process, stepped one after the other in a plain loop."""

    def __init__(self, wrappers: Sequence[GymWrapper]) -> None:
        self._wrappers = wrappers  # torchrl closes the environment of a wrapper that is collected
        self._envs: list[gym.Env] = [gym_env(wrapper) for wrapper in wrappers]

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them."""
        for i, seed in enumerate(seeds):
            parts_of_reset(self._envs[i].reset(seed=seed), i)

    def reset(self) -> list[tuple[Any, dict[str, Any]]]:
        """Reset all; return observation and info of each."""
        return [parts_of_reset(env.reset(), i) for i, env in enumerate(self._envs)]

    def step(self, actions: Sequence[Any], record: Record, time: int) -> None:
        """Step all, and reset those whose episode is over."""
        rewards, reward_shape, row = record.rewards[time], record.reward_shape, time + 1
        array, leaf = record.single_array, record.leaves[0]
        shape, dtype = leaf.accepted[0], None if array is None else array.dtype
        for i, env in enumerate(self._envs):
            parts = parts_of_step(env.step(actions[i]), i)
            observation, reward, terminated, truncated, info = parts
            rewards[i] = reward if type(reward) is float else check_reward(reward, reward_shape, i)
            if terminated or truncated:
                record.end(time, i, terminated, truncated, observation, info)
                observation, info = parts_of_reset(env.reset(), i)
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


def count_envs(make_env: Any, num_envs: int) -> int:
    """Return how many environments there will be; a list and a vector environment tell it."""
    if isinstance(make_env, VectorEnv):
        count = make_env.num_envs
    elif _is_list(make_env):
        count = len(make_env)
    else:
        return num_envs
    if num_envs not in (1, count):
        raise ValueError(
            f"make_env holds {count} environments, and num_envs is {num_envs}: leave num_envs out."
        )
    return count


def _is_list(make_env: Any) -> bool:
    return isinstance(make_env, list | tuple) and not callable(make_env)


def make_envs(
    make_env: Any,
    num_envs: int,
    vectorization: Any,
    categorical_action_encoding: bool,
    step_timeout: float | None,
) -> tuple[Envs, GymWrapper]:
    """Return the environments, and torchrl's wrapper of the first."""
    encoding = categorical_action_encoding
    vectorization = getattr(vectorization, "value", vectorization)  # of a gymnasium.VectorizeMode
    if step_timeout is not None:
        _check_timeout(step_timeout, None if isinstance(make_env, VectorEnv) else vectorization)
    if isinstance(make_env, VectorEnv):
        return _native(make_env, num_envs, encoding)
    makers = list(make_env) if _is_list(make_env) else [make_env] * num_envs
    for maker in makers:
        if not (isinstance(maker, str) or callable(maker)):
            raise TypeError(
                "make_env must be the id of an environment, a function that makes one, a list of "
                "these, or a gymnasium VectorEnv, which holds several; got "
                f"{type(maker).__name__}: each of the {num_envs} environment(s) is made anew."
            )
    if vectorization not in VECTORIZATIONS:
        raise ValueError(f"vectorization must be one of {VECTORIZATIONS}, got {vectorization!r}.")
    if vectorization == "vector_entry_point":
        if _is_list(make_env):
            raise ValueError(
                "A native vector environment holds all members: with vectorization="
                "'vector_entry_point' make_env is one id or function, not a list."
            )
        env: Any = makers[0]
        if isinstance(env, str):
            env = gym.make_vec(env, num_envs, vectorization_mode="vector_entry_point")
        return _native(env if isinstance(env, VectorEnv) else env(), num_envs, encoding)
    if vectorization == "serial":
        wrappers: list[GymWrapper] = []
        try:
            for maker in makers:
                wrappers.append(_single(maker, encoding))
            _check_spaces(wrappers)
        except BaseException:
            SerialEnvs(wrappers).close()
            raise
        return SerialEnvs(wrappers), wrappers[0]
    wrapper = _single(makers[0], encoding)
    gym_env(wrapper).close()
    leaves = [leaf._replace(encode=None) for leaf in observation_leaves(wrapper, {})]
    reward = tuple(wrapper.reward_spec.shape)
    if math.prod(reward) != 1:
        raise ValueError(
            f"The environments declare rewards of shape {list(reward)}; gymnasium's vector "
            "environments hold one number for each environment. Use vectorization='serial'."
        )
    checked = [partial(_make_checked, x, leaves, reward, i) for i, x in enumerate(makers)]
    kind = SyncVectorEnv
    if vectorization == "async":
        kind = partial(ProcessVectorEnv, timeout=step_timeout)
    # no copy: the collector copies observations when it stores them
    vector = kind(checked, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    return VectorEnvs(vector), wrapper


def _check_timeout(step_timeout: float, vectorization: Any) -> None:
    if vectorization != "async":
        raise ValueError(
            f"step_timeout={step_timeout} needs vectorization='async': an environment in this "
            "process cannot be interrupted."
        )
    if not 0 < step_timeout < math.inf:
        raise ValueError(f"step_timeout must be positive seconds, or None, got {step_timeout}.")


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


def _single(make_env: MakeEnv, categorical_action_encoding: bool) -> GymWrapper:
    return wrap(_make(make_env, categorical_action_encoding), categorical_action_encoding)


def _make(make_env: MakeEnv, categorical_action_encoding: bool) -> Any:
    if isinstance(make_env, str):
        return GymEnv(make_env, categorical_action_encoding=categorical_action_encoding)
    return make_env()


def _make_checked(make_env: MakeEnv, *arguments: Any) -> gym.Env:
    return CheckedEnv(_make(make_env, False), *arguments)


def _native(env: Any, num_envs: int, categorical_action_encoding: bool) -> tuple[Envs, GymWrapper]:
    if not isinstance(env, VectorEnv) or env.num_envs != num_envs:
        raise TypeError(
            f"make_env returned {env!r}; with vectorization='vector_entry_point' it must return a "
            f"gymnasium VectorEnv of num_envs={num_envs} environments."
        )
    single = OnlySpaces(env.single_observation_space, env.single_action_space)
    return VectorEnvs(env), wrap(single, categorical_action_encoding)


def seeds_from(seed: int, count: int, static: bool) -> list[int]:
    """Return the seeds that ``SerialEnv.set_seed`` gives: each is drawn from the one before it."""
    if seed < 0:
        raise ValueError(f"A seed must be a whole number of at least 0, got {seed}.")
    seeds = [seed]
    while len(seeds) < count:
        drawn = np.random.default_rng(seeds[-1]).bytes(8)
        seeds.append(seed if static else int.from_bytes(drawn, "big") % (2**32 - 1))
    return seeds
