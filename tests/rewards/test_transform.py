"""The normaliser as a TorchRL transform: in environments and in replay buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import (
    Bounded,
    Unbounded,
)
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    ParallelEnv,
    RenameTransform,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import RandomPolicy

from ppokit import RewardNormalizer
from tests.rewards.streams import (
    DONE,
    RAW,
    REWARD,
    Slow,
    assert_state_equal,
    make_batch,
    make_envs,
    play,
    play_serial,
    recorded,
    time_pieces,
)


def collect(env: EnvBase, batches: int, **arguments: Any) -> list[TensorDictBase]:
    policy = RandomPolicy(env.full_action_spec)
    frames = 20 * env.batch_size.numel()
    collector = Collector(
        env, policy, frames_per_batch=frames, total_frames=batches * frames, **arguments
    )
    try:
        return list(collector)
    finally:
        collector.shutdown()


# -- in an environment

forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


def parallel(count: int, make: Callable[[], EnvBase]) -> EnvBase:
    """Forked, which takes a tenth of the time that spawning does."""
    return ParallelEnv(count, make, mp_start_method="fork")


def one() -> EnvBase:
    return GymEnv("Pendulum-v1")


def transformed(clip: float | None, make: Callable[[], EnvBase] = one) -> EnvBase:
    return TransformedEnv(make(), RewardNormalizer(clip=clip))


ARRANGEMENTS: dict[str, Callable[[float | None], EnvBase]] = {
    "single": transformed,
    "of a serial one": lambda clip: transformed(clip, lambda: SerialEnv(2, one)),
    "in a serial one": lambda clip: SerialEnv(2, partial(transformed, clip)),
    "of a parallel one": lambda clip: transformed(clip, lambda: parallel(2, one)),
    "in a parallel one": lambda clip: parallel(2, partial(transformed, clip)),
}


@forks
@pytest.mark.parametrize("clip", [5.0, None])
@pytest.mark.parametrize("make", ARRANGEMENTS.values(), ids=ARRANGEMENTS.keys())
def test_specs(make, clip):
    env = make(clip)
    try:
        env.set_seed(0)
        check_env_specs(env)
        reward, raw = env.full_reward_spec["reward"], env.full_reward_spec["raw_reward"]
        assert isinstance(reward, Unbounded if clip is None else Bounded)
        if clip is not None:
            assert (reward.low == -clip).all()
            assert (reward.high == clip).all()
        rollout = env.rollout(25, break_when_any_done=False)
        assert raw.is_in(rollout[RAW][..., 0, :])
        assert reward.is_in(rollout[REWARD][..., -1, :])
        assert "raw_reward" not in rollout.keys()
    finally:
        env.close()


def test_specs_in_a_compose_that_reads_the_raw_reward():
    normalizer = RewardNormalizer(clip=5.0)
    total = RewardSum(in_keys=["raw_reward"], out_keys=["episode_reward"])
    env = TransformedEnv(make_envs("CartPole-v1", 3), Compose(normalizer, total, StepCounter(9)))
    env.set_seed(0)
    check_env_specs(env)
    assert env.full_reward_spec["raw_reward"] == env.base_env.full_reward_spec["reward"]
    assert normalizer.in_keys == ["reward", "done"]
    assert normalizer.out_keys == ["reward", "raw_reward"]
    rollout = env.rollout(25, break_when_any_done=False)
    assert torch.equal(rollout["next", "episode_reward"][..., 0, :], rollout[RAW][..., 0, :])


def test_specs_with_entries_of_other_names():
    rename = RenameTransform(["reward"], [("gain", "reward")])
    normalizer = RewardNormalizer(reward_key=("next", "gain", "reward"), raw_key=("next", "raw"))
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(rename, normalizer))
    check_env_specs(env)
    assert normalizer.in_keys == [("gain", "reward"), "done"]
    assert env.rollout(3)["next", "raw"].shape == (3, 1)
    wrong = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(reward_key=("next", "gain")))
    with pytest.raises(KeyError, match="'gain' is no reward of this environment, which has reward"):
        wrong.full_reward_spec  # noqa: B018


def test_a_reset_and_a_step():
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(gamma=1.0, clip=None))
    env.set_seed(0)
    start = env.reset()
    assert "reward" not in start.keys()
    assert "raw_reward" not in start.keys()
    action = env.rand_action(start)
    first = env.step(action)["next"]
    assert first["reward"] == first["raw_reward"]  # a single return has no spread
    second = env.step(action)["next"]  # the first step's entries are still there
    assert isinstance(env.transform, RewardNormalizer)
    assert second["reward"] == second["raw_reward"] / env.transform.scale.float()


@forks
def test_in_workers_each_has_statistics_of_its_own():
    rows = recorded("CartPole-v1", 2, 40)
    env = ParallelEnv(2, [partial(play, row, RewardNormalizer) for row in rows],
                      mp_start_method="fork")  # fmt: skip
    try:
        rollout = env.rollout(40, RandomPolicy(env.full_action_spec), break_when_any_done=False)
        states = env.state_dict()
    finally:
        env.close()
    for i, row in enumerate(rows):
        alone = TransformedEnv(play(row), RewardNormalizer())
        expected = alone.rollout(40, RandomPolicy(alone.action_spec), break_when_any_done=False)
        assert torch.equal(rollout[REWARD][i], expected[REWARD])
        moments = alone.state_dict()["moments"]
        assert torch.equal(states[f"worker{i}"]["moments"], moments)


@pytest.mark.parametrize("env_name", ["CartPole-v1", "Pendulum-v1"])
def test_frozen_in_the_env_is_frozen_on_the_batch(env_name):
    trained = RewardNormalizer()
    for batch in collect(make_envs(env_name, 3), 2):
        trained(batch)
    trained.freeze()
    on_batch = trained.clone()
    for batch in collect(make_envs(env_name, 3, trained.clone), 2):
        assert batch[REWARD].isfinite().all()
        expected = on_batch(batch.exclude(REWARD, RAW).set(REWARD, batch[RAW].clone()))
        torch.testing.assert_close(batch[REWARD], expected[REWARD], rtol=0, atol=0)


def test_in_the_env_the_statistics_are_those_of_the_slow_loop_step_by_step():
    normalizer, slow = RewardNormalizer(gamma=0.9), Slow(0.9)
    env = make_envs("CartPole-v1", 3, lambda: normalizer)
    rollout = env.rollout(40, RandomPolicy(env.full_action_spec), break_when_any_done=False)
    assert rollout[DONE].any()
    started = torch.cat([torch.zeros(3, 1), rollout[DONE].squeeze(-1)[:, :-1].cumsum(-1)], -1)
    ids = started.long() * 3 + torch.arange(3).unsqueeze(-1)
    raw = make_batch(rollout[RAW].squeeze(-1), rollout[DONE].squeeze(-1), ids)
    expected = torch.cat([slow(piece) for piece in time_pieces(raw, [1] * 40)], 1)
    torch.testing.assert_close(rollout[REWARD], expected.float(), rtol=1e-5, atol=1e-6)
    assert normalizer.count == 120


def test_a_partial_reset_in_mid_episode_zeroes_only_those_envs():
    normalizer = RewardNormalizer(gamma=1.0)
    env = make_envs("CartPole-v1", 3, lambda: normalizer)
    state = env.rollout(4, RandomPolicy(env.full_action_spec))[:, -1]["next"]
    assert normalizer.env_returns.flatten().tolist() == [4.0, 4.0, 4.0]
    state["_reset"] = torch.tensor([[False], [True], [False]])
    env.reset(state.exclude("reward", "raw_reward"))
    assert normalizer.env_returns.flatten().tolist() == [4.0, 0.0, 4.0]
    env.reset()
    assert normalizer.env_returns.flatten().tolist() == [0.0, 0.0, 0.0]


def test_a_done_zeroes_the_env_accumulator_before_any_reset():
    normalizer = RewardNormalizer(gamma=1.0)
    env = make_envs("CartPole-v1", 2, lambda: Compose(StepCounter(max_steps=3), normalizer))
    policy = RandomPolicy(env.full_action_spec)
    env.rollout(2, policy)
    assert normalizer.env_returns.flatten().tolist() == [2.0, 2.0]
    assert env.rollout(3, policy)[DONE][:, -1].all()
    assert normalizer.env_returns.flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("composed", [False, True])
def test_rows_that_take_no_step_are_left_alone(composed):
    # A rollout to the end of all episodes steps only those that go on.
    rows = recorded("CartPole-v1", 3, 40, max_episode_steps=50)
    normalizer = RewardNormalizer(gamma=0.9)
    env = TransformedEnv(play_serial(rows), Compose(normalizer) if composed else normalizer)
    rollout = env.rollout(40, RandomPolicy(env.full_action_spec), break_when_all_done=True)
    ends = [int(np.argmax(terminated | truncated)) for _, terminated, truncated in rows]
    assert len(set(ends)) == 3
    assert normalizer.count == sum(end + 1 for end in ends)
    returns = []
    for (reward, *_), end in zip(rows, ends, strict=True):
        returns.append(reward[0].astype(float))
        for x in reward[1 : end + 1].astype(float):
            returns.append(x + (0.9 * returns[-1]))
    assert normalizer.mean == pytest.approx(np.mean(returns))
    assert normalizer.scale == pytest.approx(np.std(returns))
    assert rollout[REWARD].isfinite().all()


def test_rows_that_come_without_a_reset_are_refused():
    normalizer = RewardNormalizer()
    TransformedEnv(GymEnv("Pendulum-v1"), normalizer).rollout(3)
    both = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), RewardNormalizer())
    first = both.rand_action(both.reset())
    both.transform.load_state_dict(normalizer.state_dict())
    with pytest.raises(ValueError, match=r"has shape \[2, 1\], .* step before had \[1\]"):
        both.step(first)
    both.step(both.rand_action(both.reset()))


def test_a_reward_that_is_not_finite_is_refused_in_an_env():
    normalizer = RewardNormalizer()
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(RewardScaling(0.0, math.inf), normalizer))
    with pytest.raises(ValueError, match="1 of 1 rewards at 'reward' are not finite"):
        env.rollout(2)
    assert normalizer.count == 0


def test_batch_statistics_are_refused_in_an_env():
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(statistics="batch"))
    with pytest.raises(ValueError, match="statistics='batch' needs a whole batch"):
        env.rollout(2)


@pytest.mark.parametrize("env_name", ["CartPole-v1", "Pendulum-v1"])
def test_as_postproc_it_does_what_it_does_on_the_batches(env_name):
    inside, outside = RewardNormalizer(), RewardNormalizer()
    processed = collect(make_envs(env_name, 3), 4, postproc=inside)
    plain = collect(make_envs(env_name, 3), 4)
    for with_postproc, batch in zip(processed, plain, strict=True):
        assert torch.equal(with_postproc[RAW], batch[REWARD])
        expected = outside(batch)
        assert set(with_postproc.keys(True, True)) == set(expected.keys(True, True))
        assert (with_postproc == expected).all()
    assert_state_equal(inside, outside)
    assert inside.count == 4 * 3 * 20
