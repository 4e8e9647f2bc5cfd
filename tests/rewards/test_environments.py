"""RewardNormalizer in environments, in one process and in several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import multiprocessing as mp
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import Bounded, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    ParallelEnv,
    RenameTransform,
    RewardScaling,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import RandomPolicy

from ppokit import RewardNormalizer
from tests.rewards.routes import BATCH, STEPS, assert_as_in, collected, rows_of
from tests.rewards.streams import (
    DONE,
    RAW,
    REWARD,
    Rows,
    Slow,
    as_batch,
    ids_of,
    left_open,
    make_batch,
    make_envs,
    play,
    play_serial,
    recorded,
    time_pieces,
)

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
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_specs_of_every_arrangement(name):
    clip = None if name == "of a serial one" else 5.0
    env = ARRANGEMENTS[name](clip)
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


def test_specs_with_other_keys():
    rename = RenameTransform(["reward"], [("gain", "reward")])
    normalizer = RewardNormalizer(reward_key=("next", "gain", "reward"), raw_key=("next", "raw"))
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(rename, normalizer))
    check_env_specs(env)
    assert normalizer.in_keys == [("gain", "reward"), "done"]
    assert env.rollout(3)["next", "raw"].shape == (3, 1)
    wrong = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(reward_key=("next", "gain")))
    with pytest.raises(KeyError, match="'gain' is no reward of this environment, which has reward"):
        wrong.full_reward_spec  # noqa: B018


def test_in_an_environment_each_step_equals_the_slow_loop():
    normalizer, slow = RewardNormalizer(gamma=0.9), Slow(0.9)
    env = make_envs("CartPole-v1", 3, lambda: normalizer)
    rollout = env.rollout(40, RandomPolicy(env.full_action_spec), break_when_any_done=False)
    assert rollout[DONE].any()
    done = rollout[DONE].squeeze(-1)
    raw = make_batch(rollout[RAW].squeeze(-1), done, ids_of(done))
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


@pytest.mark.parametrize("composed", [False, True])
def test_rows_that_take_no_step_are_not_counted(composed):
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
    assert normalizer.moments[1] == pytest.approx(np.mean(returns))
    assert normalizer.scale == pytest.approx(np.std(returns))
    assert rollout[REWARD].isfinite().all()


def test_bad_rewards_and_batch_statistics_raise_in_an_environment():
    normalizer = RewardNormalizer()
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(RewardScaling(0.0, math.inf), normalizer))
    with pytest.raises(ValueError, match="1 of 1 rewards at 'reward' are not finite"):
        env.rollout(2)
    assert normalizer.count == 0
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(statistics="batch"))
    with pytest.raises(ValueError, match="statistics='batch' needs a whole batch"):
        env.rollout(2)


# -- several processes


@pytest.fixture
def _forks() -> Iterator[None]:
    """Forking takes a tenth of the time of spawning."""
    before = mp.get_start_method(allow_none=True)
    mp.set_start_method("fork", force=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* use of fork", DeprecationWarning)
        yield
    mp.set_start_method(before, force=True)


def in_two_workers(kind: Any, rows: Rows, frames: int, **options: Any) -> list[TensorDictBase]:
    """Collect the rows, half of them in each of two workers."""
    half = len(rows) // 2
    makers = [partial(play_serial, part) for part in (rows[:half], rows[half:])]
    policy = RandomPolicy(play_serial(rows[:half]).full_action_spec)
    total = STEPS // BATCH * frames
    collector = kind(makers, policy, frames_per_batch=frames, total_frames=total, **options)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize("outside", [False, True])
def test_parallel_environments(outside):
    rows, normalizer = rows_of("CartPole-v1", 3), RewardNormalizer(0.99)
    env = ParallelEnv(3, [partial(play, row) for row in rows])
    if outside:
        collected(TransformedEnv(env, normalizer))
    else:
        collected(env, normalizer)
    assert_as_in(rows, normalizer)


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize("cat_results", ["stack", 0])
def test_postproc_of_a_multi_sync_collector(cat_results):
    rows, normalizer = rows_of("CartPole-v1", 8), RewardNormalizer(0.99)
    options = {"use_buffers": True, "cat_results": cat_results, "postproc": normalizer}
    batches = in_two_workers(MultiSyncCollector, rows, BATCH * 8, **options)
    assert batches[0].shape == ((2, 4, BATCH) if cat_results == "stack" else (8, BATCH))
    assert_as_in(rows, normalizer)


@pytest.mark.usefixtures("_forks")
def test_batches_of_a_multi_async_collector():
    """Each batch is of one worker; the collector copies its postproc, so it is called here."""
    rows, normalizer, loop = rows_of("CartPole-v1", 8), RewardNormalizer(0.99), Slow(0.99)
    for batch in in_two_workers(MultiAsyncCollector, rows, BATCH * 4):
        assert batch.shape == (4, BATCH)
        loop(batch)
        normalizer(batch)
    assert normalizer.moments[1] == pytest.approx(sum(loop.seen) / len(loop.seen), rel=1e-9)
    assert {i: r for i, (r,) in left_open(normalizer).items()} == pytest.approx(loop.open)


@pytest.mark.usefixtures("_forks")
@pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning")
def test_without_trajectory_ids_split_trajectories_start_from_zero():
    """split_trajs renumbers the ids in each batch, so they must not be used."""
    rows, cut, seen = rows_of("CartPole-v1", 4), RewardNormalizer(0.99, traj_key=None), []
    options = {"use_buffers": True, "split_trajs": True}
    for batch in in_two_workers(MultiSyncCollector, rows, BATCH * 4, **options):
        cut(batch)
    for start in range(0, STEPS, BATCH):
        loop = Slow(0.99)
        loop(as_batch(rows)[:, start : start + BATCH])
        seen += loop.seen
    assert cut.moments[1] == pytest.approx(sum(seen) / len(seen))
    assert not left_open(cut)
