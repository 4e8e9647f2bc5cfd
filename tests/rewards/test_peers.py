"""Stable-Baselines3's VecNormalize on the same rewards gives the same statistics and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from ppokit import RewardNormalizer
from tests.rewards.streams import (
    REWARD,
    Rows,
    as_batch,
    left_open,
    moments,
    recorded,
    time_pieces,
)

vec_env = pytest.importorskip(
    "stable_baselines3.common.vec_env", reason="needs stable-baselines3: ppokit[bench]"
)
pytestmark = pytest.mark.bench

STEPS, GAMMA = 60, 0.99
ENVS = ["CartPole-v1", "Pendulum-v1", "InvertedDoublePendulum-v5"]


class Playback(vec_env.VecEnv):
    """Plays rows back, one step after the other."""

    def __init__(self, rows: Rows) -> None:
        space = gymnasium.spaces.Box(-1, 1, (1,))
        super().__init__(len(rows), space, space)
        reward, terminated, truncated = (np.stack(x, -1) for x in zip(*rows, strict=True))
        self.steps: Iterator[Any] = iter(list(zip(reward, terminated | truncated, strict=True)))

    def step_wait(self) -> tuple[Any, ...]:
        reward, done = next(self.steps)
        return self.reset(), reward, done, [{} for _ in range(self.num_envs)]

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def reset(self) -> np.ndarray:
        return np.zeros((self.num_envs, 1), np.float32)

    def _unused(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("VecNormalize calls nothing else")

    step_async = close = set_attr = env_method = env_is_wrapped = _unused


def vec_normalize(rows: Rows, *, prior: bool = False, **arguments: Any) -> Any:
    wrapped = vec_env.VecNormalize(Playback(rows), norm_obs=False, gamma=GAMMA, **arguments)
    if not prior:
        wrapped.ret_rms.count = 0.0
    return wrapped


def moments_of(wrapped: Any) -> torch.Tensor:
    rms = wrapped.ret_rms
    return torch.tensor([rms.count, rms.mean, rms.var * rms.count], dtype=torch.float64)


# -- where the rules agree


@pytest.mark.parametrize("envs", [1, 3, 8])
@pytest.mark.parametrize("env_id", ENVS)
def test_statistics_accumulators_and_rewards_are_equal_after_every_step(env_id, envs):
    rows = recorded(env_id, envs, STEPS)
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    for piece in time_pieces(as_batch(rows), [1] * STEPS):
        _, reward, _, _ = wrapped.step_wait()
        out = normalizer(piece)
        torch.testing.assert_close(moments(normalizer), moments_of(wrapped), rtol=1e-9, atol=1e-12)
        held = sorted(returns for (returns,) in left_open(normalizer).values())
        assert held == pytest.approx(sorted(r for r in wrapped.returns if r), rel=1e-12)
        if normalizer.m2 > 0:  # for constant returns VecNormalize divides by 1e-4, ppokit by 1
            torch.testing.assert_close(out[REWARD].flatten(), torch.from_numpy(reward))


# -- differences: docs/howto/reward_normalization.md
