"""Stable-Baselines3's VecNormalize on the same rewards: equal where the rules agree.

Where they do not, a test shows each difference; docs/howto/reward_normalization.md explains them.
"""

from __future__ import annotations

import copy
import math
import pickle
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
    RAW,
    REWARD,
    Rows,
    as_batch,
    left_open,
    make_batch,
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
PRIOR = (1e-4, 0.0, 1e-4)  # count, mean and m2 with which RunningMeanStd begins
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
        raise AssertionError("VecNormalize asks for nothing else")

    step_async = close = set_attr = env_method = env_is_wrapped = _unused


def vec_normalize(rows: Rows, *, prior: bool = False, **arguments: Any) -> Any:
    wrapped = vec_env.VecNormalize(Playback(rows), norm_obs=False, gamma=GAMMA, **arguments)
    if not prior:
        wrapped.ret_rms.count = 0.0
    return wrapped


def theirs(wrapped: Any) -> torch.Tensor:
    rms = wrapped.ret_rms
    return torch.tensor([rms.count, rms.mean, rms.var * rms.count], dtype=torch.float64)


def made_up(*rows: list[float]) -> Rows:
    never = np.zeros(len(rows[0]), bool)
    return [(np.array(row, np.float32), never, never) for row in rows]


# -- where the rules agree


@pytest.mark.parametrize("envs", [1, 3, 8])
@pytest.mark.parametrize("env_id", ENVS)
def test_statistics_accumulators_and_rewards_are_equal_after_every_step(env_id, envs):
    rows = recorded(env_id, envs, STEPS)
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    for piece in time_pieces(as_batch(rows), [1] * STEPS):
        _, reward, _, _ = wrapped.step_wait()
        out = normalizer(piece)
        torch.testing.assert_close(moments(normalizer), theirs(wrapped), rtol=1e-9, atol=1e-12)
        held = sorted(returns for (returns,) in left_open(normalizer).values())
        assert held == pytest.approx(sorted(r for r in wrapped.returns if r), rel=1e-12)
        if normalizer.m2 > 0:  # without any spread they divide by 1e-4, and ppokit by 1
            torch.testing.assert_close(out[REWARD].flatten(), torch.from_numpy(reward))


@pytest.mark.parametrize("env_id", ENVS)
def test_in_an_environment_they_are_equal_too(env_id):
    rows = recorded(env_id, 3, STEPS)
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    env = TransformedEnv(play_serial(rows), normalizer)
    rollout = env.rollout(STEPS, RandomPolicy(env.full_action_spec), break_when_any_done=False)
    rewards = np.stack([wrapped.step_wait()[1] for _ in range(STEPS)], 1)
    ours = rollout[REWARD].squeeze(-1)
    if env_id == "CartPole-v1":  # the first rewards are all alike
        ours, rewards = ours[:, 1:], rewards[:, 1:]
    torch.testing.assert_close(ours, torch.from_numpy(rewards))
    torch.testing.assert_close(moments(normalizer), theirs(wrapped), rtol=1e-9, atol=1e-12)
    assert normalizer.env_returns.flatten().tolist() == pytest.approx(wrapped.returns.tolist())


@pytest.mark.parametrize("cuts", [[60], [20, 40], [1, 58, 1]])
def test_whole_batches_lead_to_the_same_statistics(cuts):
    rows = recorded("Pendulum-v1", 3, STEPS)
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    *_, last = [normalizer(piece) for piece in time_pieces(as_batch(rows), cuts)]
    *_, reward = [wrapped.step_wait()[1] for _ in range(STEPS)]
    torch.testing.assert_close(moments(normalizer), theirs(wrapped), rtol=1e-9, atol=1e-12)
    # and the last step is scaled by the same number
    torch.testing.assert_close(last[REWARD][:, -1, 0], torch.from_numpy(reward))


def test_frozen_they_scale_alike():
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


# -- where they differ


def test_they_begin_with_a_prior():
    rows = recorded("Pendulum-v1", 3, STEPS)
    wrapped, normalizer = vec_normalize(rows, prior=True), RewardNormalizer(GAMMA)
    normalizer(as_batch(rows))
    for _ in range(STEPS):
        wrapped.step_wait()
    prior = torch.tensor(PRIOR, dtype=torch.float64)
    expected = torch.stack(merge_moments(*moments(normalizer), *prior))
    torch.testing.assert_close(theirs(wrapped), expected, rtol=1e-9, atol=1e-12)
    spread = math.sqrt(wrapped.ret_rms.var)
    assert spread == pytest.approx(normalizer.scale.item(), rel=1e-5)


def test_they_scale_each_step_by_what_came_before():
    rows = recorded("Pendulum-v1", 3, STEPS)
    wrapped, normalizer = vec_normalize(rows, clip_reward=math.inf), RewardNormalizer(clip=None)
    out = normalizer(as_batch(rows))
    rewards = np.stack([wrapped.step_wait()[1] for _ in range(STEPS)], 1)
    scales = out[RAW].squeeze(-1) / torch.from_numpy(rewards)
    assert (scales[:, 0] < 0.2 * normalizer.scale).all()  # so the first rewards come out large
    torch.testing.assert_close(scales[:, -1], normalizer.scale.float().expand(3))


def test_they_divide_constant_rewards_by_almost_nothing():
    rows = made_up([1.0] * 100)
    wrapped = vec_env.VecNormalize(Playback(rows), norm_obs=False, gamma=0.0)
    rewards = [wrapped.step_wait()[1].item() for _ in range(100)]
    assert rewards[-1] == 10.0  # at the clip
    out = RewardNormalizer(0.0)(make_batch([[1.0] * 100]))
    assert (out[REWARD] == 1).all()


def test_they_do_not_follow_returns_while_frozen():
    rows = made_up([1.0, 2.0, 4.0, 8.0])
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    first, second = time_pieces(as_batch(rows), [2, 2])
    normalizer(first)
    for _ in range(2):
        wrapped.step_wait()
    wrapped.training = False
    normalizer.freeze()(second)
    for _ in range(2):
        wrapped.step_wait()
    assert wrapped.returns.item() == pytest.approx(2 + GAMMA)
    ((followed,),) = left_open(normalizer).values()
    assert followed == pytest.approx(8 + GAMMA * (4 + GAMMA * (2 + GAMMA)))


def test_they_save_no_accumulators():
    rows = made_up([1.0, 2.0])
    wrapped, normalizer = vec_normalize(rows), RewardNormalizer(GAMMA)
    normalizer(as_batch(rows))
    wrapped.step_wait()
    assert "returns" not in pickle.loads(pickle.dumps(wrapped)).__dict__
    assert left_open(copy.deepcopy(normalizer)) == left_open(normalizer)


def test_a_reward_that_is_not_finite_stays_with_them():
    rows = made_up([1.0, math.nan, 1.0, 2.0])
    wrapped = vec_normalize(rows)
    rewards = [wrapped.step_wait()[1].item() for _ in range(4)]
    assert all(map(math.isnan, rewards[1:]))
    with pytest.raises(ValueError, match="not finite"):
        RewardNormalizer()(as_batch(rows))
