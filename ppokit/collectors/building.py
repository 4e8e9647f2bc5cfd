"""Making the environments that a collector steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torchrl.envs import GymEnv, GymWrapper

from ppokit.collectors.environments import SerialEnvs
from ppokit.collectors.spaces import OnlySpaces, wrap
from ppokit.collectors.vector import VectorEnvs

Envs: TypeAlias = SerialEnvs | VectorEnvs
MakeEnv: TypeAlias = str | Callable[[], Any]

VECTORIZATIONS = ("serial", "sync", "async", "vector_entry_point")


def build(
    make_env: MakeEnv, num_envs: int, vectorization: str, categorical_action_encoding: bool
) -> tuple[Envs, GymWrapper]:
    """Return the environments, and torchrl's wrapper of one of them.

    Raises:
        ValueError: ``vectorization`` is unknown, or its environments reset at the wrong time.
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
            SerialEnvs([wrapper._env for wrapper in wrappers]).close()
            raise
        return SerialEnvs([wrapper._env for wrapper in wrappers]), wrappers[0]
    wrapper = _single(make_env, categorical_action_encoding)
    wrapper._env.close()
    kind = SyncVectorEnv if vectorization == "sync" else AsyncVectorEnv
    makers = [partial(_make, make_env)] * num_envs
    # observations are copied as they are stored
    vector = kind(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    return VectorEnvs(vector), wrapper


def _single(make_env: MakeEnv, categorical_action_encoding: bool) -> GymWrapper:
    return wrap(_make_wrapped(make_env, categorical_action_encoding), categorical_action_encoding)


def _make_wrapped(make_env: MakeEnv, categorical_action_encoding: bool) -> Any:
    if isinstance(make_env, str):
        return GymEnv(make_env, categorical_action_encoding=categorical_action_encoding)
    return make_env()


def _make(make_env: MakeEnv) -> gym.Env:
    env: Any = _make_wrapped(make_env, False)
    return env._env if isinstance(env, GymWrapper) else env


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
    spaces = OnlySpaces(env.single_observation_space, env.single_action_space)
    return VectorEnvs(env), wrap(spaces, categorical_action_encoding)
