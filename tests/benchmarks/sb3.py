"""Stable-Baselines3's PPO. This module imports it on the first call."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any


def make_ppo(
    env_id: str,
    num_envs: int,
    *,
    seed: int,
    hidden: Sequence[int],
    processes: bool = False,
    normalize: bool = False,
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a ``PPO``; ``normalize`` adds ``VecNormalize``, ``policy`` arguments of its policy."""
    vector: Any = import_module("stable_baselines3.common.vec_env")
    kind = vector.SubprocVecEnv if processes else vector.DummyVecEnv
    # By default its environments render, which makes LunarLander 5 times slower.
    plain: Any = {"env_kwargs": {"render_mode": None}, "vec_env_cls": kind, "seed": seed}
    env = import_module("stable_baselines3.common.env_util").make_vec_env(env_id, num_envs, **plain)
    if normalize:
        env = vector.VecNormalize(env, gamma=options["gamma"])
    layers = {"net_arch": list(hidden)} | (policy or {})
    ppo = import_module("stable_baselines3").PPO
    return ppo("MlpPolicy", env, policy_kwargs=layers, seed=seed, device="cpu", **options)
