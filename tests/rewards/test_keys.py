"""Nested keys and several agents: statistics and done flags."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import Compose, EnvBase, TransformedEnv, check_env_specs

from ppokit import RewardNormalizer
from tests.rewards.streams import (
    DONE,
    IDS,
    MASK,
    REWARD,
    assert_unchanged,
    make_rollout,
    moments,
    saved,
)

TEAM, RIVALS = ("next", "team", "reward"), ("next", "rivals", "reward")
RAW_TEAM, RAW_RIVALS = ("next", "team", "raw_reward"), ("next", "rivals", "raw_reward")


def groups(seed: int, *, envs: int = 2, steps: int = 12, ends: float = 0.2) -> TensorDict:
    """Two groups, of 3 agents and of 1, whose ends are those of the environment."""
    batch = make_rollout(seed, envs, steps, ends)
    generator = torch.Generator().manual_seed(seed)
    for name, agents, scale in (("team", 3, 1.0), ("rivals", 1, 100.0)):
        reward = scale * torch.randn(envs, steps, agents, 1, generator=generator).double()
        batch["next", name] = TensorDict({"reward": reward}, [envs, steps, agents])
    return batch.exclude(REWARD)


# -- nested keys


def test_one_bad_reward_changes_nothing():
    normalizer = RewardNormalizer(reward_key=RIVALS)
    normalizer(groups(0))
    before = saved(normalizer)
    for spoil, error, match in (
        (lambda b: b.set(RIVALS, b[RIVALS] * math.nan), ValueError, "'rivals', 'reward'.*not fin"),
        (lambda b: b.exclude(RIVALS), KeyError, "'rivals', 'reward'.* is not in the batch"),
        (lambda b: b.exclude(DONE, ("next", "rivals", "done")), KeyError, "is not in the batch"),
        (lambda b: b.set(RAW_RIVALS, b[RIVALS]), ValueError, "'rivals', 'raw_reward'.*already"),
    ):
        batch = spoil(groups(1))
        kept = batch.clone()
        with pytest.raises(error, match=match):
            normalizer(batch)
        assert set(batch.keys(True, True)) == set(kept.keys(True, True))
        assert_unchanged(normalizer, before)


def test_several_objectives_in_one_reward_raise():
    batch = make_rollout(0, 2, 12, 0.2)
    with pytest.raises(ValueError, match=r"shape \[2, 12, 3\] .* each of several objectives"):
        RewardNormalizer()(batch.set(REWARD, torch.zeros(2, 12, 3)))


# -- done flags of agents


@pytest.mark.parametrize("masked", [False, True])
def test_an_agent_that_is_done_starts_from_zero_and_the_others_continue(masked):
    batch = TensorDict({"next": {"reward": torch.ones(1, 3, 2, 1)}}, [1, 3])
    batch[DONE] = torch.tensor([[0, 0], [0, 1], [0, 0]]).bool().reshape(1, 3, 2, 1)
    batch[IDS] = torch.zeros(1, 3, dtype=torch.int64)
    if masked:
        batch[MASK] = torch.tensor([[True, True, False]])
    batch = batch if masked else batch[:, :2]
    normalizer = RewardNormalizer(gamma=1.0)
    for first in (2.0, 4.0):
        normalizer(batch.clone())
        assert normalizer.open_returns.tolist() == [[first, 0.0]]


def test_a_done_key_that_is_missing_raises():
    normalizer = RewardNormalizer(reward_key=TEAM, done_key=("next", "team", "done"))
    with pytest.raises(KeyError, match=r"'team', 'done'.* is not in the batch"):
        normalizer(groups(0))


@pytest.mark.parametrize("shape", [(2, 12, 3), (2, 12, 2, 1), (2, 12, 3, 2)])
def test_done_flags_of_another_shape_raise(shape):
    batch = groups(0)
    batch["next", "end"] = torch.zeros(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"'end'\) has shape .*, but \('next', 'team', 'reward'\)"):
        RewardNormalizer(reward_key=TEAM, done_key=("next", "end"))(batch)


@pytest.mark.parametrize("has_own_ends", [False, True])
def test_agents_share_statistics_and_equal_a_loop(has_own_ends: bool):
    """Two batches; the second continues the trajectories of the first."""
    generator = torch.Generator().manual_seed(1)
    shape, returns, open_returns = (2, 12, 3, 1), [], torch.zeros(2, 3, dtype=torch.float64)
    normalizer = RewardNormalizer(0.9, reward_key=TEAM, clip=None)
    ended = torch.zeros(2, 1, dtype=torch.int64)
    for _ in range(2):
        reward = torch.randn(shape, generator=generator).double() + 3
        own = torch.rand(shape, generator=generator) < 0.2 * has_own_ends
        done = torch.rand(2, 12, 1, generator=generator) < 0.2
        team = {"reward": reward, "done": own} if has_own_ends else {"reward": reward}
        batch = TensorDict({"next": {"done": done, "team": TensorDict(team, [2, 12, 3])}}, [2, 12])
        so_far = ended + done.squeeze(-1).cumsum(-1)
        batch[IDS] = 100 * torch.arange(2).unsqueeze(-1) + so_far - done.squeeze(-1).long()
        ended = so_far[:, -1:]
        for row in range(2):
            for step in range(12):
                for agent in range(3):
                    total = 0.9 * open_returns[row, agent] + reward[row, step, agent, 0]
                    returns.append(total.item())
                    is_over = done[row, step, 0] or own[row, step, agent, 0]
                    open_returns[row, agent] = 0 if is_over else total
        values = torch.tensor(returns, dtype=torch.float64)
        scale = values.var(correction=0).add(1e-8).sqrt()
        torch.testing.assert_close(normalizer(batch)[TEAM], reward / scale)
        expected = torch.stack([torch.tensor(float(len(returns))).double(), values.mean()])
        torch.testing.assert_close(moments(normalizer)[:2], expected)


# -- in an environment


class Game(EnvBase):
    """Two groups of agents."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(1))
        self.action_spec = Bounded(-1, 1, (1,))
        team = Composite(reward=Unbounded((3, 1)), shape=())
        self.reward_spec = Composite(team=team, rivals=Composite(reward=Unbounded((2, 1))))
        done = CategoricalSpec(2, shape=(1,), dtype=torch.bool)
        self.done_spec = Composite(done=done, terminated=done.clone())

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        return TensorDict({"observation": torch.zeros(1), "done": torch.zeros(1).bool()})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        done = torch.rand(1) < 0.2
        rewards = {"team": {"reward": torch.randn(3, 1)}, "rivals": {"reward": torch.randn(2, 1)}}
        out = {"observation": torch.zeros(1), **rewards, "done": done, "terminated": done}
        return TensorDict(out)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def test_two_normalizers_in_an_environment():
    pair = RewardNormalizer(0.9, reward_key=TEAM), RewardNormalizer(0.9, reward_key=RIVALS)
    env = TransformedEnv(Game(), Compose(*pair))
    rollout = env.rollout(60, break_when_any_done=False)
    assert rollout[DONE].any()
    assert pair[0].count == 180
    assert pair[1].count == 120
    for raw, key, normalizer in zip((RAW_TEAM, RAW_RIVALS), (TEAM, RIVALS), pair, strict=True):
        outside = RewardNormalizer(0.9, reward_key=key)
        out = outside(TensorDict({DONE: rollout[DONE], key: rollout[raw]}, [60]).unsqueeze(0))
        torch.testing.assert_close(moments(normalizer), moments(outside), rtol=1e-9, atol=1e-9)
        # the last step's scale is that of all
        torch.testing.assert_close(rollout[key][-1], out[key][0, -1])
    check_env_specs(TransformedEnv(Game(), RewardNormalizer(reward_key=RIVALS)))


def test_open_returns_of_an_environment_are_reset_and_saved():
    env = TransformedEnv(Game(), RewardNormalizer(1.0, reward_key=RIVALS))
    env.set_seed(3)
    env.rollout(4)
    state = env.state_dict()
    assert state["env_returns"].shape == (2, 1)
    fresh = TransformedEnv(Game(), RewardNormalizer(1.0, reward_key=RIVALS))
    fresh.load_state_dict(state)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, state[name])
    fresh.reset()
    assert not fresh.state_dict()["env_returns"].any()
