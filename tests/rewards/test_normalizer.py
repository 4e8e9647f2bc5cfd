"""Reward scaling: hand values, SB3's and rl8's rules, what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor

from ppokit import RewardNormalizer
from tests.golden import assert_golden, rl8
from tests.rewards.streams import (
    DONE,
    IDS,
    MASK,
    RAW,
    REWARD,
    Slow,
    assert_unchanged,
    left_open,
    make_batch,
    make_rollout,
    moments,
    saved,
    time_pieces,
)

# -- values


def test_hand_values():
    # R = 1, 2.5 | 4, 1 + 0.5 * 4 = 3: mean 2.625, squared deviations 4.6875 in all
    batch = make_batch([[1.0, 2.0, 4.0, 1.0]], [[0, 1, 0, 0]], [[0, 0, 1, 1]])
    normalizer = RewardNormalizer(gamma=0.5, epsilon=0.0)
    out = normalizer(batch)
    sigma = math.sqrt(4.6875 / 4)
    expected = torch.tensor([1.0, 2.0, 4.0, 1.0], dtype=torch.float64) / sigma
    torch.testing.assert_close(out[REWARD].flatten(), expected)
    torch.testing.assert_close(moments(normalizer), torch.tensor([4, 2.625, 4.6875]).double())
    assert left_open(normalizer) == {1: [3.0]}


def test_hand_values_of_a_batch_are_unbiased():
    batch = make_batch([[1.0, 3.0, 5.0]])
    out = RewardNormalizer(gamma=0.0, statistics="batch", epsilon=0.5)(batch)
    expected = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64) / 2.5
    torch.testing.assert_close(out[REWARD].flatten(), expected)


@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.0, 0.9, 1.0]), envs=st.integers(1, 4))
def test_running_is_the_slow_loop(seed, gamma, envs):
    rollout = make_rollout(seed, envs, 14, 0.2)
    normalizer, slow = RewardNormalizer(gamma=gamma), Slow(gamma)
    for piece in time_pieces(rollout, [1, 5, 8]):
        expected = slow(piece)
        torch.testing.assert_close(normalizer(piece)[REWARD], expected, rtol=1e-9, atol=1e-9)
    kept = {key: value for key, (value,) in left_open(normalizer).items()}
    assert kept == pytest.approx(slow.open, abs=1e-9)


def test_running_is_stable_baselines3s_rule():
    # VecNormalize, step by step, without the prior of its RunningMeanStd (1e-4 observations).
    rollout = make_rollout(0, 3, 50, 0.1, scale=4.0)
    reward, done = rollout[REWARD].squeeze(-1).numpy(), rollout[DONE].squeeze(-1).numpy()
    normalizer = RewardNormalizer(gamma=0.99)
    returns, mean, var, count = np.zeros(3), 0.0, 0.0, 0
    for t, piece in enumerate(time_pieces(rollout, [1] * 50)):
        returns = returns * 0.99 + reward[:, t]
        delta, total = returns.mean() - mean, count + 3
        m2 = var * count + returns.var() * 3 + delta**2 * count * 3 / total
        mean, var, count = mean + delta * 3 / total, m2 / total, total
        expected = np.clip(reward[:, t] / np.sqrt(var + 1e-8), -10, 10)
        actual = normalizer(piece)[REWARD].flatten()
        torch.testing.assert_close(actual, torch.from_numpy(expected))
        returns[done[:, t]] = 0


@pytest.mark.parametrize("case", range(len(rl8("reward_scale")["cases"])))
def test_batch_is_rl8s_scale(case):
    recorded = rl8("reward_scale")["cases"][case]
    normalizer = RewardNormalizer(
        gamma=recorded["gamma"], statistics="batch", epsilon=0.0, clip=None
    )
    resets = 0
    for horizon in recorded["horizons"]:
        # What rl8 calls a reset starts new trajectories; otherwise R goes on.
        resets += horizon["env_reset"]
        ids = torch.arange(recorded["num_envs"]).unsqueeze(-1) + 100 * resets
        reward = torch.tensor(horizon["rewards"])
        batch = make_batch(reward, None, ids.expand(reward.shape), dtype=torch.float32)
        out = normalizer(batch)
        recorded_returns = torch.tensor(horizon["reversed_discounted_returns"])
        assert_golden(normalizer.scale.float(), horizon["reward_scale"])
        carry = normalizer.open_returns[: len(reward)].flatten()  # the rows come first
        assert_golden(carry.float(), recorded_returns[:, -1])
        assert_golden(out[REWARD].squeeze(-1), reward / horizon["reward_scale"])


def test_clip_bounds_the_scaled_reward():
    reward = [[0.0] * 200 + [1000.0]]
    assert RewardNormalizer(gamma=0.0)(make_batch(reward))[REWARD].max() == 10
    assert RewardNormalizer(gamma=0.0, clip=2.0)(make_batch(reward))[REWARD].max() == 2
    free = RewardNormalizer(gamma=0.0, clip=None)(make_batch(reward))[REWARD].max()
    assert free == pytest.approx(math.sqrt(201**2 / 200), rel=1e-6)


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_a_large_mean_does_not_drown_a_small_spread(statistics):
    generator = torch.Generator().manual_seed(0)
    reward = 1e6 + 1e-3 * torch.randn(8, 500, generator=generator, dtype=torch.float64)
    normalizer = RewardNormalizer(gamma=0.0, statistics=statistics, epsilon=0.0, clip=None)
    pieces = [500] if statistics == "batch" else [100] * 5
    for piece in time_pieces(make_batch(reward), pieces):
        normalizer(piece)
    biased = statistics == "running"
    expected = np.std((reward - 1e6).numpy(), ddof=0 if biased else 1)
    assert normalizer.scale.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("value", [0.0, 0.1, 7.3, -3.0])
def test_constant_rewards_are_left_as_they_are(statistics, value):
    normalizer = RewardNormalizer(gamma=0.0, statistics=statistics)
    for _ in range(4):
        batch = make_batch(torch.full((3, 7), value), dtype=torch.float32)
        assert (normalizer(batch)[REWARD] == torch.tensor(value)).all()


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_a_single_frame_is_left_as_it_is(statistics):
    normalizer = RewardNormalizer(statistics=statistics)
    assert normalizer(make_batch([[2.5]]))[REWARD].item() == 2.5
    assert normalizer.scale == 1


# -- rewards that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_rewards_raise_and_change_nothing(bad):
    normalizer = RewardNormalizer()
    normalizer(make_rollout(0, 2, 5, 0.2))
    before = saved(normalizer)
    batch = make_batch([[1.0, bad, 2.0], [bad, 0.0, 0.0]], ids=[[0] * 3, [1] * 3])
    kept = batch.clone()
    with pytest.raises(ValueError, match=r"2 of 6 rewards at .* not finite.* \[0, 1, 0\]"):
        normalizer(batch)
    assert_unchanged(normalizer, before)
    assert set(batch.keys(True, True)) == set(kept.keys(True, True))
    torch.testing.assert_close(batch[REWARD], kept[REWARD], equal_nan=True, rtol=0, atol=0)


def test_ignored_rewards_stay_out_of_the_statistics():
    normalizer, clean = RewardNormalizer(nonfinite="ignore"), RewardNormalizer(gamma=0.99)
    out = normalizer(make_batch([[1.0, math.nan], [3.0, 4.0]], ids=[[0, 0], [1, 1]]))
    assert normalizer.count == 3
    assert out[REWARD].isfinite().tolist() == [[[True], [False]], [[True], [True]]]
    # One episode's NaN is no other's business: row 1 has the R it would have had alone.
    clean(make_batch([[3.0, 4.0]], ids=[[1, 1]]))
    assert normalizer.open_returns[1] == clean.open_returns[0]
    assert normalizer.open_returns[0] == pytest.approx(0.99)
    later = normalizer(make_batch([[1.0, 2.0], [3.0, 4.0]], ids=[[0, 0], [1, 1]]))
    assert later[REWARD].isfinite().all()
    assert moments(normalizer).isfinite().all()


def test_nothing_but_ignored_rewards_leaves_the_statistics():
    normalizer = RewardNormalizer(nonfinite="ignore")
    normalizer(make_batch([[math.nan, math.inf]]))
    assert normalizer.count == 0
    assert normalizer.scale == 1
    normalizer(make_batch([[1.0, 2.0]]))
    before = moments(normalizer)
    normalizer(make_batch([[math.nan]]))
    assert torch.equal(moments(normalizer), before)


# -- freezing, dtypes, keys


def test_freezing_stops_the_statistics_and_not_the_accumulators():
    rollout = make_rollout(0, 2, 12, 0.1)
    frozen, moving = RewardNormalizer(), RewardNormalizer()
    first, second, third = time_pieces(rollout, [4, 4, 4])
    frozen(first.clone())
    moving(first.clone())
    before, scale = moments(frozen), frozen.scale.clone()
    raw = second[REWARD].clone()
    assert frozen.freeze() is frozen
    out = frozen(second.clone())
    assert torch.equal(moments(frozen), before)
    torch.testing.assert_close(out[REWARD], (raw / scale).clamp(-10, 10))
    moving(second.clone())
    torch.testing.assert_close(frozen.open_returns, moving.open_returns)
    assert frozen.unfreeze() is frozen
    frozen(third.clone())
    assert frozen.count == before[0] + 8


def test_eval_does_not_freeze():
    normalizer = RewardNormalizer().eval()
    normalizer(make_rollout(0, 2, 4, 0.0))
    assert normalizer.count == 8


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_dtype_is_kept_and_statistics_are_float64(dtype):
    reward = torch.randn(3, 6).to(dtype)
    normalizer, wide = RewardNormalizer(), RewardNormalizer()
    out = normalizer(make_batch(reward, dtype=dtype))
    expected = wide(make_batch(reward.double()))[REWARD]
    assert out[REWARD].dtype == out[RAW].dtype == dtype
    assert {x.dtype for x in moments(normalizer)} == {torch.float64}
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out[REWARD].double(), expected, rtol=2 * eps, atol=eps)
    torch.testing.assert_close(moments(normalizer), moments(wide), rtol=1e-14, atol=0)


def test_raw_reward_is_kept_bit_for_bit():
    rollout = make_rollout(0, 2, 5, 0.2, dtype=torch.float32)
    raw = rollout[REWARD].clone()
    out = RewardNormalizer()(rollout)
    assert torch.equal(out[RAW], raw)
    assert not torch.equal(out[REWARD], raw)
    renamed = RewardNormalizer(raw_key=("raw", "reward"))(make_batch([[1.0, 2.0]]))
    assert renamed["raw", "reward"].flatten().tolist() == [1.0, 2.0]


def test_agents_keep_accumulators_of_their_own():
    reward = torch.randn(2, 6, 3, 1, dtype=torch.float64)
    done = torch.zeros(2, 6, 3, 1, dtype=torch.bool)
    done[0, 2] = True
    ids = torch.tensor([[0, 0, 0, 2, 2, 2], [1] * 6])
    keys = {
        "reward_key": ("next", "agents", "reward"),
        "raw_key": ("next", "agents", "raw_reward"),
        "done_key": ("next", "agents", "done"),
    }
    agents = {"reward": reward, "done": done}
    batch = TensorDict({"next": {"agents": agents}, "collector": {"traj_ids": ids}}, [2, 6])
    together, single = RewardNormalizer(**keys), RewardNormalizer()
    for piece in batch.clone().split(2, dim=1):
        assert together(piece)["next", "agents", "raw_reward"].shape == (2, 2, 3, 1)
    rows = lambda x: x.squeeze(-1).movedim(2, 0).reshape(6, 6)  # noqa: E731
    single(
        make_batch(
            rows(reward), rows(done), (ids + torch.arange(3)[:, None, None] * 10).reshape(6, 6)
        )
    )
    torch.testing.assert_close(moments(together), moments(single))
    assert together.open_returns.T.flatten().tolist() == pytest.approx(
        single.open_returns.flatten().tolist()
    )


def test_an_agent_that_is_done_starts_from_zero_while_the_others_go_on():
    batch = TensorDict({"next": {"reward": torch.ones(1, 2, 2, 1)}}, [1, 2])
    batch[DONE] = torch.tensor([[False, False], [False, True]]).reshape(1, 2, 2, 1)
    batch[IDS] = torch.zeros(1, 2, dtype=torch.int64)
    normalizer = RewardNormalizer(gamma=1.0)
    normalizer(batch.clone())
    assert normalizer.open_returns.tolist() == [[2.0, 0.0]]
    normalizer(batch.clone())
    assert normalizer.open_returns.tolist() == [[4.0, 0.0]]


def test_composes_in_tensordict_sequential():
    double = TensorDictModule(lambda x: 2 * x, in_keys=[REWARD], out_keys=["doubled"])
    sequence = TensorDictSequential(RewardNormalizer(), double)
    rollout = make_rollout(0, 2, 5, 0.2)
    expected = RewardNormalizer()(rollout.clone())[REWARD]
    out = sequence(rollout)
    torch.testing.assert_close(out["doubled"], 2 * expected)
    assert RewardNormalizer().in_keys == [REWARD, DONE]
    assert RewardNormalizer().out_keys == [REWARD, RAW]


# -- once, and only once


def test_a_normalized_batch_is_refused():
    normalizer = RewardNormalizer()
    out = normalizer(make_rollout(0, 2, 5, 0.2))
    before, again = saved(normalizer), out.clone()
    for offered in (out, again):
        with pytest.raises(ValueError, match="is normalised already"):
            normalizer(offered)
    with pytest.raises(ValueError, match="is normalised already"):
        copy.deepcopy(normalizer)(out)
    assert_unchanged(normalizer, before)
    assert torch.equal(out[REWARD], again[REWARD])


def test_a_locked_batch_is_refused_before_anything_moves():
    normalizer, batch = RewardNormalizer(), make_rollout(0, 2, 5, 0.2)
    before = saved(normalizer)
    with pytest.raises(RuntimeError, match="locked"):
        normalizer(batch.lock_())
    assert_unchanged(normalizer, before)


# -- bad input


def _without(key: Any) -> TensorDict:
    return make_rollout(0, 2, 4, 0.2).exclude(key)


def _with(key: Any, value: Tensor) -> TensorDict:
    batch = make_rollout(0, 2, 4, 0.2)
    batch.batch_size = []
    batch[key] = value
    batch.batch_size = [2, 4]
    return batch


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: _without(REWARD), KeyError, r"'reward'\).* is not in the batch"),
        (lambda: _without(DONE), KeyError, r"'done'\).* is not in the batch"),
        (
            lambda: _with(REWARD, torch.ones(2, 4)),
            ValueError,
            r"'done'\) has shape \[2, 4, 1\], but \('next', 'reward'\) has shape \[2, 4\]",
        ),
        (
            lambda: make_batch([[1.0, 2.0]]).apply(lambda x: x.squeeze(-1)),
            ValueError,
            r"has the shape of the batch, \[1, 2\]",
        ),
        (lambda: _with(REWARD, torch.ones(2, 4, 1).int()), TypeError, r"'reward'\).*float"),
        (lambda: _with(DONE, torch.ones(2, 4, 1)), TypeError, r"'done'\).*torch.bool"),
        (lambda: make_batch(torch.zeros(2, 0)), ValueError, r"empty batch of shape \[2, 0\]"),
        (lambda: make_batch([[1.0, 2.0]])[0], ValueError, 'dimension named "time"'),
        (lambda: _with(MASK, torch.ones(2, 4)), TypeError, "mask must be torch.bool"),
        (lambda: _with(MASK, torch.ones(2, 4, 3).bool()), ValueError, "one flag for each frame"),
        (lambda: _with(IDS, torch.zeros(2, 4, 1).long()), ValueError, r"shape \[2, 4, 1\], but"),
        (
            lambda: make_batch([[1.0, 2.0]], [[0, 0]], [[0, 1]]),
            ValueError,
            "has lost its time order",
        ),
        (
            lambda: make_batch([[1.0], [2.0]], ids=[[7], [7]]),
            ValueError,
            "rows that start with the same trajectory",
        ),
    ],
)
def test_bad_batches_are_refused(make, error, match):
    normalizer = RewardNormalizer()
    normalizer(make_rollout(0, 2, 4, 0.2))
    before = saved(normalizer)
    with pytest.raises(error, match=match):
        normalizer(make())
    assert_unchanged(normalizer, before)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"gamma": 1.01}, r"gamma must lie in \[0, 1\]"),
        ({"gamma": -0.1}, r"gamma must lie in \[0, 1\]"),
        ({"gamma": math.nan}, r"gamma must lie in \[0, 1\]"),
        ({"statistics": "ema"}, "statistics must be 'running' or 'batch', got 'ema'"),
        ({"nonfinite": "skip"}, "nonfinite must be 'raise' or 'ignore', got 'skip'"),
        ({"clip": 0.0}, "clip must be positive or None, got 0.0"),
        ({"clip": math.nan}, "clip must be positive or None"),
        ({"epsilon": -1e-8}, "epsilon must be 0 or more"),
        ({"epsilon": math.nan}, "epsilon must be 0 or more"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        RewardNormalizer(**arguments)
