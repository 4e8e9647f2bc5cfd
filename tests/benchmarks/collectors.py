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
    """Return Stable-Baselines3's ``collect_rollouts`` over one or several processes.

    Raises:
        ImportError: it is not installed.
    """
    utils = import_module("stable_baselines3.common.env_util")
    vector = import_module("stable_baselines3.common.vec_env")
    kind = vector.SubprocVecEnv if processes else vector.DummyVecEnv
    # without env_kwargs it makes environments that render
    plain: Any = {"env_kwargs": {"render_mode": None}, "vec_env_cls": kind, "seed": 0}
    env, layers = utils.make_vec_env(env_id, count, **plain), {"net_arch": list(HIDDEN)}
    ppo = import_module("stable_baselines3").PPO
    model = ppo("MlpPolicy", env, n_steps=steps, policy_kwargs=layers, device="cpu")
    _, callback = model._setup_learn(10**9)
    return lambda: model.collect_rollouts(model.env, callback, model.rollout_buffer, steps)


def env_pool(env_id: str, count: int, threads: int) -> Any:
    """Return EnvPool's environments.

    Raises:
        ImportError: it is not installed.
    """
    options: Any = {"env_type": "gymnasium", "num_envs": count, "num_threads": threads}
    return import_module("envpool").make(env_id, **options)
