"""Stable-Baselines3's VecNormalize on the same rewards gives the same statistics and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import RandomPolicy

from ppokit import RewardNormalizer
from ppokit.functional import merge_moments
from tests.rewards.streams import (
    REWARD,
    Rows,
    as_batch,
    left_open,
    moments,
    play_serial,
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


@pytest.mark.parametrize("env_id", ENVS)
def test_rewards_in_an_environment_are_equal(env_id):
    rows = recorded(env_id, 3, STEPS)
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    env = TransformedEnv(play_serial(rows), normalizer)
    rollout = env.rollout(STEPS, RandomPolicy(env.full_action_spec), break_when_any_done=False)
    rewards = np.stack([wrapped.step_wait()[1] for _ in range(STEPS)], 1)
    ours = rollout[REWARD].squeeze(-1)
    if env_id == "CartPole-v1":  # the first rewards are all alike
        ours, rewards = ours[:, 1:], rewards[:, 1:]
    torch.testing.assert_close(ours, torch.from_numpy(rewards))
    torch.testing.assert_close(moments(normalizer), moments_of(wrapped), rtol=1e-9, atol=1e-12)
    assert normalizer.env_returns.flatten().tolist() == pytest.approx(wrapped.returns.tolist())


def test_frozen_both_scale_by_the_same_number():
    rows = recorded("Pendulum-v1", 3, 2 * STEPS)
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    first, second = time_pieces(as_batch(rows), [STEPS, STEPS])
    normalizer(first)
    for _ in range(STEPS):
        wrapped.step_wait()
    wrapped.training = False
    normalizer.freeze()
    rewards = np.stack([wrapped.step_wait()[1] for _ in range(STEPS)], 1)
    torch.testing.assert_close(normalizer(second)[REWARD].squeeze(-1), torch.from_numpy(rewards))


# -- differences: docs/howto/reward_normalization.md


def test_vec_normalize_starts_with_a_prior():
    rows = recorded("Pendulum-v1", 3, STEPS)
    wrapped, normalizer = vec_normalize(rows, prior=True), RewardNormalizer(GAMMA)
    normalizer(as_batch(rows))
    for _ in range(STEPS):
        wrapped.step_wait()
    prior = torch.tensor([1e-4, 0.0, 1e-4], dtype=torch.float64)  # count, mean and m2
    expected = torch.stack(merge_moments(*moments(normalizer), *prior))
    torch.testing.assert_close(moments_of(wrapped), expected, rtol=1e-9, atol=1e-12)
