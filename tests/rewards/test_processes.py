"""Rewards that come from several processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from tensordict import TensorDictBase
from torch import multiprocessing as mp
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv
from torchrl.envs.utils import RandomPolicy

from ppokit import RewardNormalizer
from tests.rewards.routes import (
    BATCH,
    STEPS,
    Batches,
    assert_as_in,
    collected,
    rows_of,
    slow,
)
from tests.rewards.streams import (
    RAW,
    REWARD,
    Rows,
    Slow,
    as_batch,
    left_open,
    play,
    play_serial,
)


@pytest.fixture
def forks() -> Iterator[None]:
    """Forking takes a tenth of the time that spawning does."""
    before = mp.get_start_method(allow_none=True)
    mp.set_start_method("fork", force=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* use of fork", DeprecationWarning)
        yield
    mp.set_start_method(before, force=True)


def run(collector: Iterable[TensorDictBase]) -> Batches:
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()  # pyright: ignore


def in_workers(rows: Rows) -> tuple[list[partial[EnvBase]], RandomPolicy, int]:
    half = len(rows) // 2
    parts = [rows[:half], rows[half:]]
    return [partial(play_serial, part) for part in parts], policy_of(rows[:half]), half


def policy_of(rows: Rows) -> RandomPolicy:
    return RandomPolicy(play_serial(rows).full_action_spec)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("envs", "outside"),
    [(3, False), (3, True), *(pytest.param(8, x, marks=pytest.mark.slow) for x in (False, True))],
)
def test_parallel_environments(envs, outside):
    rows, normalizer = rows_of("CartPole-v1", envs), RewardNormalizer(0.99)
    env = ParallelEnv(envs, [partial(play, row) for row in rows])
    if outside:
        collected(TransformedEnv(env, normalizer))
    else:
        collected(env, normalizer)
    assert_as_in(rows, normalizer)


def multi_sync(rows: Rows, **options: Any) -> Batches:
    """What two workers collect."""
    makers, policy, _ = in_workers(rows)
    frames = {"frames_per_batch": BATCH * len(rows), "total_frames": STEPS * len(rows)}
    return run(MultiSyncCollector(makers, policy, **frames, use_buffers=True, **options))


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("cat_results", ["stack", 0])
def test_a_multi_sync_collector(cat_results):
    rows, normalizer = rows_of("CartPole-v1", 8), RewardNormalizer(0.99)
    batches = multi_sync(rows, cat_results=cat_results, postproc=normalizer)
    assert batches[0].shape == ((2, 4, BATCH) if cat_results == "stack" else (8, BATCH))
    assert_as_in(rows, normalizer)


@pytest.mark.usefixtures("forks")
def test_a_multi_async_collector():
    # Each batch is of one worker or the other, as they come.
    rows, normalizer, loop = rows_of("CartPole-v1", 8), RewardNormalizer(0.99), Slow(0.99)
    makers, policy, half = in_workers(rows)
    copied = RewardNormalizer(0.99)
    collector = MultiAsyncCollector(
        makers,
        policy,
        frames_per_batch=BATCH * half,
        total_frames=(STEPS // BATCH) * BATCH * half,
        postproc=copied,
    )
    for batch in run(collector):
        assert batch.shape == (half, BATCH)
        raw = batch.exclude(REWARD, RAW).set(REWARD, batch[RAW])
        loop(raw)
        normalizer(raw)
    assert normalizer.mean == pytest.approx(sum(loop.seen) / len(loop.seen), rel=1e-9)
    assert {i: r for i, (r,) in left_open(normalizer).items()} == pytest.approx(loop.open)
    assert copied.count == 0  # MultiAsyncCollector copies its postproc, so it is of no use here


@pytest.mark.usefixtures("forks")
def test_a_multi_sync_collector_that_puts_workers_one_after_the_other_is_refused():
    rows = rows_of("Pendulum-v1", 4)
    with pytest.raises(ValueError, match="cat_results='stack'"):
        multi_sync(rows, cat_results=-1, postproc=RewardNormalizer())


@pytest.mark.usefixtures("forks")
@pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning")
def test_a_multi_sync_collector_that_splits_trajectories_renumbers_them():
    # So their ids must not be believed: what goes on has another id in the next batch.
    rows = rows_of("CartPole-v1", 4)
    batches = multi_sync(rows, split_trajs=True)
    believing, cutting = RewardNormalizer(0.99), RewardNormalizer(0.99, traj_key=None)
    for batch in batches:
        believing(batch.clone())
        cutting(batch)
    continued, cut = slow(rows)[0].seen, []
    for start in range(0, STEPS, BATCH):
        loop = Slow(0.99)
        loop(as_batch(rows)[:, start : start + BATCH])
        cut += loop.seen
    assert believing.mean != pytest.approx(sum(continued) / len(continued))
    assert cutting.mean == pytest.approx(sum(cut) / len(cut))
    assert not left_open(cutting)
