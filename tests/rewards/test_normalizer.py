"""RewardNormalizer on batches: values, non-finite rewards, freezing, state and bad input."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from ppokit import RewardNormalizer
from tests.golden import assert_golden, rl8
from tests.rewards.streams import (
    DONE,
    IDS,
    MASK,
    RAW,
    REWARD,
    Slow,
    assert_state_equal,
    assert_unchanged,
    left_open,
    make_batch,
    make_rollout,
    moments,
    saved,
    time_pieces,
)

# -- values


def test_batch_statistics_by_hand_are_unbiased():
    batch = make_batch([[1.0, 3.0, 5.0]])
    out = RewardNormalizer(gamma=0.0, statistics="batch", epsilon=0.5)(batch)
    expected = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64) / 2.5
    torch.testing.assert_close(out[REWARD].flatten(), expected)


@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([0.0, 0.9, 1.0]), envs=st.integers(1, 4))
def test_running_statistics_equal_the_slow_loop(seed, gamma, envs):
    rollout = make_rollout(seed, envs, 14, 0.2)
    normalizer, slow = RewardNormalizer(gamma=gamma), Slow(gamma)
    for piece in time_pieces(rollout, [1, 5, 8]):
        expected = slow(piece)
        torch.testing.assert_close(normalizer(piece)[REWARD], expected, rtol=1e-9, atol=1e-9)
    kept = {key: value for key, (value,) in left_open(normalizer).items()}
    assert kept == pytest.approx(slow.open, abs=1e-9)


@pytest.mark.parametrize("case", range(len(rl8("reward_scale")["cases"])))
def test_golden_batch_statistics_of_rl8(case):
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
def test_a_small_deviation_beside_a_large_mean_is_exact(statistics):
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
@pytest.mark.parametrize("value", [0.1, -3.0])
def test_constant_rewards_and_a_single_frame_are_not_scaled(statistics, value):
    normalizer = RewardNormalizer(gamma=0.0, statistics=statistics)
    assert RewardNormalizer(statistics=statistics)(make_batch([[value]]))[REWARD].item() == value
    for _ in range(4):
        batch = make_batch(torch.full((3, 7), value), dtype=torch.float32)
        assert (normalizer(batch)[REWARD] == torch.tensor(value)).all()


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


def test_finite_rewards_with_a_sum_beyond_float32_are_accepted():
    normalizer = RewardNormalizer(gamma=0.0, clip=None)
    normalizer(make_batch([[3e38, 1e38]], dtype=torch.float32))
    assert normalizer.scale == pytest.approx(1e38, rel=1e-6)


def test_ignored_rewards_stay_out_of_the_statistics():
    normalizer, clean = RewardNormalizer(nonfinite="ignore"), RewardNormalizer(gamma=0.99)
    out = normalizer(make_batch([[1.0, math.nan], [3.0, 4.0]], ids=[[0, 0], [1, 1]]))
    assert normalizer.count == 3
    assert out[REWARD].isfinite().tolist() == [[[True], [False]], [[True], [True]]]
    # The NaN of one episode does not change the return of another.
    clean(make_batch([[3.0, 4.0]], ids=[[1, 1]]))
    assert normalizer.open_returns[1] == clean.open_returns[0]
    assert normalizer.open_returns[0] == pytest.approx(0.99)
    later = normalizer(make_batch([[1.0, 2.0], [3.0, 4.0]], ids=[[0, 0], [1, 1]]))
    assert later[REWARD].isfinite().all()
    before = moments(normalizer)
    assert before.isfinite().all()
    normalizer(make_batch([[math.nan, math.inf]]))
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


# -- state


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("envs_before", [0, 5])
def test_a_state_resumes_bit_for_bit(statistics, envs_before):
    first, second = time_pieces(make_rollout(0, 3, 10, 0.1), [6, 4])
    normalizer, file = RewardNormalizer(statistics=statistics), io.BytesIO()
    normalizer(first)
    normalizer.freeze()
    torch.save(normalizer.state_dict(), file)
    file.seek(0)
    fresh = RewardNormalizer(statistics=statistics)
    if envs_before:
        fresh(make_rollout(1, envs_before, 3, 0.0))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_state_equal(fresh, normalizer)
    for each in (fresh, normalizer):
        each.unfreeze()
    assert torch.equal(fresh(second.clone())[REWARD], normalizer(second.clone())[REWARD])
    assert_state_equal(fresh, normalizer)


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
            r"'reward'\) has shape \[2, 4\] in a batch of shape \[2, 4\]",
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
def test_bad_batches_raise_and_change_nothing(make, error, match):
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
        ({"gamma": math.nan}, r"gamma must lie in \[0, 1\]"),
        ({"gamma": None}, r"gamma must lie in \[0, 1\].* got None"),
        ({"gamma": "0.9"}, r"gamma must lie in \[0, 1\].* got '0.9'"),
        ({"statistics": "ema"}, "statistics must be 'running' or 'batch', got 'ema'"),
        ({"nonfinite": "skip"}, "nonfinite must be 'raise' or 'ignore', got 'skip'"),
        ({"clip": 0.0}, "clip must be positive or None, got 0.0"),
    ],
)
def test_bad_arguments_raise(arguments, match):
    with pytest.raises(ValueError, match=match):
        RewardNormalizer(**arguments)


def test_a_batch_whose_rewards_are_locked_is_not_counted():
    normalizer, batch = RewardNormalizer(), make_batch([[1.0, 3.0]])
    batch["next"].lock_()
    with pytest.raises(RuntimeError, match=r"The entry 'next' of the batch is locked.*unlock_"):
        normalizer(batch)
    assert normalizer.count == 0


def test_a_list_of_keys_and_a_state_that_is_not_finite_raise():
    keys: Any = [("next", "a"), ("next", "b")]
    with pytest.raises(TypeError, match="a RewardNormalizer for each reward"):
        RewardNormalizer(reward_key=keys)
    normalizer = RewardNormalizer()
    state = normalizer.state_dict() | {"moments": torch.full((4,), torch.nan).double()}
    with pytest.raises(RuntimeError, match=r"'moments' is .* must be finite"):
        normalizer.load_state_dict(state)
    assert normalizer.count == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moments", [5.0, 0, -1, 1]),
        ("moments", [-5.0, 0, 1, 1]),
        ("moments", [5.0, 0, 1, 0]),
        ("moments", [5.0, 0, 1, -2]),
        ("env_returns", [0.0, math.nan]),
        ("env_returns", [-math.inf]),
    ],
)
def test_a_state_that_no_rewards_give_is_not_loaded(name: str, value: list[float]):
    normalizer = RewardNormalizer()
    state = normalizer.state_dict() | {name: torch.tensor(value, dtype=torch.float64)}
    with pytest.raises(RuntimeError, match=rf"'{name}' is .* must be finite and in range"):
        normalizer.load_state_dict(state)
    assert normalizer.moments.tolist() == [0, 0, 0, 1]
    assert normalizer.env_returns.numel() == 0
    good = state | {name: torch.tensor([3.0, -1, 2, 0.5][: len(value)], dtype=torch.float64)}
    normalizer.load_state_dict(good)


@pytest.mark.parametrize("change", [lambda x: x.clamp_(-5, 5), lambda x: x.mul_(0.5)])
def test_a_reward_that_was_changed_in_place_is_not_normalized_again(change: Any):
    normalizer, batch = RewardNormalizer(), make_rollout(0, 2, 4, 0.2)
    raw = normalizer(batch)["next", "raw_reward"].clone()
    change(batch["next", "reward"])
    with pytest.raises(ValueError, match="Keep one of them"):
        normalizer(batch)
    assert torch.equal(batch["next", "raw_reward"], raw)
    assert normalizer.count == batch.numel()


def test_collectors_that_use_their_buffers_again_may_share_a_normalizer():
    """Each writes the rewards of the next batch over the scaled ones, in its own TensorDict."""
    normalizer, batches = RewardNormalizer(), [make_rollout(n, 2, 4, 0.2) for n in range(2)]
    raw = [batch["next", "reward"].clone() for batch in batches]
    for number in range(3):
        for batch, reward in zip(batches, raw, strict=True):
            normalizer(batch)
            assert torch.equal(batch["next", "raw_reward"], reward)
            with pytest.raises(ValueError, match="Keep one of them"):
                normalizer(batch)
        assert normalizer.count == (number + 1) * 2 * batches[0].numel()
        for batch, reward in zip(batches, raw, strict=True):
            batch["next", "reward"].copy_(reward)
            batch["next", "done"].copy_(batch["next", "done"].clone())


def test_a_buffer_that_was_written_before_is_refused_where_it_is_sampled():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(make_rollout(0, 8, 4, 0.2))
    normalizer = RewardNormalizer()
    buffer.append_transform(normalizer, invert=True)
    with pytest.raises(ValueError, match="written before the normalizer was appended"):
        buffer.sample()
    assert not normalizer.count
