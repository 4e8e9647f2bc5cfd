"""Collectors over many environments: calls that collect one batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torchrl.collectors import Collector
from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, TransformedEnv

from ppokit import GymCollector
from tests.benchmarks.networks import HIDDEN, actor_and_critic
from tests.benchmarks.sb3 import make_ppo

Collect = Callable[[], object]
OPTIONS: dict[str, Any] = {"categorical_action_encoding": True}


def make_actor(env_id: str) -> Any:
    return actor_and_critic(env_id, seed=0)[0]


def one_env(env_id: str) -> GymEnv:
    return GymEnv(env_id, **OPTIONS)


def as_float(env: Any) -> Any:
    return TransformedEnv(env, DoubleToFloat())


def serial(env_id: str, count: int) -> Any:
    return as_float(SerialEnv(count, partial(one_env, env_id)))


def gym_collector(make_env: Any, env_id: str, frames: int, **options: Any) -> GymCollector:
    return GymCollector(make_env, make_actor(env_id), frames_per_batch=frames, **OPTIONS, **options)


def torchrl_collector(env: Any, env_id: str, frames: int) -> Collector:
    return Collector(
        env,
        make_actor(env_id),
        frames_per_batch=frames,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )


def stable_baselines3(env_id: str, count: int, steps: int, *, processes: bool = False) -> Collect:
    """Return Stable-Baselines3's ``collect_rollouts``; it raises ImportError without it."""
    model = make_ppo(env_id, count, seed=0, hidden=HIDDEN, processes=processes, n_steps=steps)
    _, callback = model._setup_learn(10**9)
    return lambda: model.collect_rollouts(model.env, callback, model.rollout_buffer, steps)


def env_pool(env_id: str, count: int, threads: int) -> Any:
    """Return EnvPool's environments; it raises ImportError without it."""
    options: Any = {"env_type": "gymnasium", "num_envs": count, "num_threads": threads}
    return import_module("envpool").make(env_id, **options)
