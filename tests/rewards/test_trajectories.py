"""Returns belong to trajectories, however rows and batches are cut."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.collectors.utils import split_trajectories

from ppokit import RewardNormalizer, kernels
from tests.rewards.streams import (
    DONE,
    IDS,
    MASK,
    REWARD,
    Slow,
    assert_state_equal,
    left_open,
    make_batch,
    make_rollout,
    moments,
    rollouts,
)

# -- trajectories


@pytest.mark.parametrize("kernel", kernels.available())
@given(data=st.data(), seed=st.integers(0, 2**31), in_order=st.booleans())
def test_rows_may_come_in_any_number_and_order(kernel, data, seed, in_order):
    # As from collectors: several workers in turn, ids as trajectories begin, or of workers' own.
    random = torch.Generator().manual_seed(seed)
    envs, fresh = 4, count(4)
    current = list(range(envs))
    normalizer, slow = RewardNormalizer(gamma=0.9), Slow(0.9)
    for _ in range(6):
        rows = data.draw(st.permutations(range(envs)))[: data.draw(st.integers(1, envs))]
        rows = sorted(rows) if in_order else rows
        steps = data.draw(st.integers(1, 3))
        reward = torch.randn(len(rows), steps, generator=random, dtype=torch.float64)
        done = torch.rand(len(rows), steps, generator=random) < 0.4
        ids = torch.zeros(len(rows), steps, dtype=torch.int64)
        for t in range(steps):
            for i, row in enumerate(rows):
                ids[i, t] = current[row]
                if done[i, t]:
                    current[row] = next(fresh) if in_order else 100 * row + next(fresh)
        batch = make_batch(reward, done, ids)
        with kernels.use(kernel):
            expected = slow(batch)
            torch.testing.assert_close(normalizer(batch)[REWARD], expected, rtol=1e-9, atol=1e-9)
    assert {i: pytest.approx(r) for i, (r,) in left_open(normalizer).items()} == slow.open


def test_without_ids_every_batch_starts_from_zero():
    cut, continued = RewardNormalizer(gamma=1.0), RewardNormalizer(gamma=1.0)
    unnamed = RewardNormalizer(gamma=1.0, traj_key=None)
    for _ in range(2):
        cut(make_batch([[1.0, 2.0]]))
        unnamed(make_batch([[1.0, 2.0]], ids=[[0, 0]]))
        continued(make_batch([[1.0, 2.0]], ids=[[0, 0]]))
    torch.testing.assert_close(moments(cut), torch.tensor([4, 2, 4]).double())  # 1 3 1 3
    assert_state_equal(cut, unnamed)
    torch.testing.assert_close(moments(continued), torch.tensor([4, 3.5, 13]).double())  # 1 3 4 6


@pytest.mark.parametrize("begun", [(7, 7), (2, 7), (7, 1)])
def test_rows_that_begin_may_have_any_ids_but_those_of_other_rows(begun: tuple[int, int]):
    normalizer = RewardNormalizer(gamma=1.0)
    normalizer(make_batch([[1.0], [2.0], [4.0]], [[1], [1], [0]], [[0], [1], [2]]))
    following = make_batch([[1.0], [1.0], [1.0]], ids=[[begun[0]], [begun[1]], [2]])
    if len({*begun, 2}) < 3:
        with pytest.raises(ValueError, match="rows that start with the same trajectory"):
            normalizer(following)
    else:
        normalizer(following)
        assert left_open(normalizer) == {begun[0]: [1.0], begun[1]: [1.0], 2: [5.0]}


def test_masked_frames_are_not_in_the_statistics_and_their_ids_close_nothing():
    normalizer = RewardNormalizer(gamma=1.0)
    normalizer(make_batch([[3.0]], ids=[[0]]))
    padded = make_batch([[1.0, 2.0, math.nan, 99.0]], ids=[[5, 5, 0, 0]])
    padded[MASK] = torch.tensor([[True, True, False, False]])
    normalizer(padded)
    assert normalizer.count == 3
    assert left_open(normalizer) == {0: [3.0], 5: [3.0]}


@pytest.mark.parametrize(
    ("ids", "expected"), [([0, 0], {0: [7.0]}), ([0, 1], {0: [3.0], 1: [4.0]})]
)
def test_a_row_whose_first_frame_is_masked_goes_on_with_its_first_valid_one(
    ids: list[int], expected: dict[int, list[float]]
):
    normalizer = RewardNormalizer(gamma=1.0)
    normalizer(make_batch([[3.0]], ids=[[0]]))
    batch = make_batch([[99.0, 4.0]], [[ids[0] != ids[1], False]], ids=[ids])
    batch[MASK] = torch.tensor([[False, True]])
    normalizer(batch)
    assert normalizer.count == 2
    assert left_open(normalizer) == expected


def test_a_masked_frame_is_a_step_with_a_reward_of_0():
    normalizer = RewardNormalizer(gamma=0.5)
    normalizer(make_batch([[8.0]], ids=[[0]]))
    for mask in ([False, True, True], [True, False, True]):
        batch = make_batch([[0.0, 0.0, 1.0]], ids=[[0] * 3])
        batch[MASK] = torch.tensor([mask])
        before = left_open(normalizer)[0][0]
        normalizer(batch)
        assert left_open(normalizer) == {0: [before / 8 + 1.0]}


@given(rollout=rollouts())
def test_split_trajectories_give_the_same_statistics(rollout):
    split = split_trajectories(rollout.clone(), trajectory_key=IDS, done_key=DONE)
    assert split[MASK].sum() == rollout.numel()
    as_rows, as_collected = RewardNormalizer(gamma=0.9), RewardNormalizer(gamma=0.9)
    as_rows(split)
    as_collected(rollout)
    torch.testing.assert_close(moments(as_rows), moments(as_collected), rtol=1e-9, atol=1e-9)
    found, expected = left_open(as_rows), left_open(as_collected)
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], abs=1e-9) for key in found)


def test_time_may_be_any_dimension_with_that_name():
    rollout = make_rollout(1, 3, 5, 0.3)
    time_first = rollout.clone().transpose(0, 1)
    time_first.names = ["time", None]
    a, b = RewardNormalizer(), RewardNormalizer()
    torch.testing.assert_close(b(time_first)[REWARD], a(rollout)[REWARD].transpose(0, 1))
    assert_state_equal(a, b)
    row = make_rollout(2, 1, 5, 0.3)
    c, d, named = RewardNormalizer(), RewardNormalizer(), row[0].clone()
    named.names = ["time"]
    assert torch.equal(c(named)[REWARD], d(row)[REWARD][0])


# -- new environments


def test_a_new_collector_counts_from_zero_and_is_announced():
    first, second = make_rollout(0, 2, 6, 0.0), make_rollout(1, 2, 6, 0.0)
    assert torch.equal(first[IDS], second[IDS])
    normalizer, slow = RewardNormalizer(gamma=0.9), Slow(0.9)
    normalizer(first.clone())
    assert normalizer.reset_returns() is normalizer
    assert not left_open(normalizer)
    normalizer(second.clone())
    slow(first)
    slow.open.clear()
    slow(second)
    assert normalizer.moments[1] == pytest.approx(sum(slow.seen) / len(slow.seen))
    assert normalizer.count == 24


def test_the_oldest_trajectories_that_never_come_back_are_forgotten():
    # As from collectors that reset their environments at each iteration.
    normalizer, rows = RewardNormalizer(gamma=0.9), 1 << 13
    for i in range(10):
        batch = make_rollout(i, rows, 2, 0.0)
        batch[IDS] += rows * i
        normalizer(batch)
    assert sorted(left_open(normalizer)) == list(range(rows, 10 * rows))


def test_the_done_flag_of_a_masked_frame_is_ignored():
    means = []
    for is_done in (False, True):
        batch = make_batch([[1.0, 99.0, 0.0, 3.0]], [[0, is_done, 0, 0]])
        batch[MASK] = torch.tensor([[True, False, True, True]])
        normalizer = RewardNormalizer(0.5)
        normalizer(batch)
        means.append(normalizer.moments[1])
    assert torch.equal(*means)
