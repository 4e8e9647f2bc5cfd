"""Reward scaling: hand values, SB3's and rl8's rules, and that no trajectory sees another's R."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import Bounded, LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import RandomPolicy

from ppokit import RewardNormalizer, kernels
from tests.golden import assert_golden, rl8

REWARD, RAW, DONE = ("next", "reward"), ("next", "raw_reward"), ("next", "done")
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


def make_batch(
    reward: Any, done: Any = None, ids: Any = None, *, dtype: torch.dtype = torch.float64
) -> TensorDict:
    """A batch ``[B, T]`` from rows of numbers; without ``done`` no episode ends."""
    rewards = torch.as_tensor(reward, dtype=dtype).unsqueeze(-1)
    dones = torch.zeros(rewards.shape[:2]) if done is None else torch.as_tensor(done)
    batch = TensorDict({}, rewards.shape[:2])
    batch[REWARD], batch[DONE] = rewards, dones.bool().unsqueeze(-1)
    if ids is not None:
        batch[IDS] = torch.as_tensor(ids)
    return batch


def make_rollout(
    seed: int,
    envs: int,
    steps: int,
    end_probability: float,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> TensorDict:
    """A rollout whose episodes end at random, with a new trajectory id after each end."""
    generator = torch.Generator().manual_seed(seed)
    reward = scale * torch.randn(envs, steps, generator=generator, dtype=torch.float64)
    done = torch.rand(envs, steps, generator=generator) < end_probability
    started = torch.cat([torch.zeros(envs, 1), done[:, :-1].cumsum(-1)], -1).long()
    ids = started * envs + torch.arange(envs).unsqueeze(-1)
    return make_batch(reward, done, ids, dtype=dtype)


@st.composite
def rollouts(draw: st.DrawFn) -> TensorDict:
    return make_rollout(
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 12)),
        draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


class Slow:
    """The running rule in plain Python: a dictionary of R, and a list of all returns."""

    def __init__(self, gamma: float, *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.open: dict[int, float] = {}
        self.seen: list[float] = []

    def __call__(self, batch: TensorDictBase) -> Tensor:
        reward, done = (batch[key].squeeze(-1).tolist() for key in (REWARD, DONE))
        ids = batch[IDS].tolist()
        for b in range(batch.shape[0]):
            for t in range(batch.shape[1]):
                total = reward[b][t] + self.gamma * self.open.pop(ids[b][t], 0.0)
                self.seen.append(total)
                if not done[b][t]:
                    self.open[ids[b][t]] = total
        mean = math.fsum(self.seen) / len(self.seen)
        variance = math.fsum((x - mean) ** 2 for x in self.seen) / len(self.seen)
        spread = math.sqrt(variance + self.epsilon) if variance > 0 else 1.0
        bound = lambda x: max(-self.clip, min(self.clip, x))  # noqa: E731
        scaled = [[[bound(r / spread)] for r in row] for row in reward]
        return torch.tensor(scaled, dtype=torch.float64)


def left_open(normalizer):
    """The R of the trajectories that are open, by id."""
    pairs = zip(normalizer.open_ids.tolist(), normalizer.open_returns.tolist(), strict=True)
    return {key: returns for key, returns in pairs if key >= 0}


def moments(normalizer: RewardNormalizer) -> Tensor:
    return torch.stack([normalizer.count, normalizer.mean, normalizer.m2])


def assert_state_equal(a: RewardNormalizer, b: RewardNormalizer) -> None:
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), rtol=0, atol=0)


def saved(normalizer: RewardNormalizer) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in normalizer.state_dict().items()}


def assert_unchanged(normalizer: RewardNormalizer, before: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(normalizer.state_dict()), before, rtol=0, atol=0)


def time_pieces(batch: TensorDict, lengths: Sequence[int]) -> Iterator[TensorDict]:
    """Clones, because the normalizer writes into what it is given."""
    yield from (piece.clone() for piece in batch.split(list(lengths), dim=1))


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


# -- trajectories


@given(rollout=rollouts(), data=st.data())
def test_cutting_a_rollout_along_time_changes_nothing(rollout, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, rollout.shape[1] - 1)))))
    edges = [0, *(cut for cut in cuts if cut < rollout.shape[1]), rollout.shape[1]]
    whole, pieces = RewardNormalizer(gamma=0.95), RewardNormalizer(gamma=0.95)
    whole(rollout.clone())
    for piece in time_pieces(rollout, np.diff(edges).tolist()):
        order = data.draw(st.permutations(range(rollout.shape[0])))
        pieces(piece[torch.tensor(order)])
    found, expected = left_open(pieces), left_open(whole)
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], abs=1e-9) for key in found)
    torch.testing.assert_close(moments(pieces), moments(whole), rtol=1e-9, atol=1e-9)


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


@given(rollout=rollouts())
def test_trajectories_are_not_mixed(rollout):
    # Moments are those of every trajectory taken for itself.
    together, alone = RewardNormalizer(gamma=0.9), RewardNormalizer(gamma=0.9)
    for piece in time_pieces(rollout, [1] * rollout.shape[1]):
        together(piece)
    for trajectory in rollout[IDS].unique():
        frames = (rollout[IDS] == trajectory).nonzero(as_tuple=True)
        alone(rollout[frames].unsqueeze(0))
    torch.testing.assert_close(moments(together), moments(alone), rtol=1e-9, atol=1e-9)


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


def test_a_done_at_the_last_step_closes_the_trajectory():
    normalizer = RewardNormalizer(gamma=1.0)
    normalizer(make_batch([[1.0, 2.0], [5.0, 5.0]], [[0, 1], [0, 0]], [[0, 0], [1, 1]]))
    assert left_open(normalizer) == {1: [10.0]}
    assert normalizer.count == 4


def test_terminated_and_truncated_together_cut_once():
    batch = make_batch([[1.0, 1.0, 1.0]], [[0, 1, 0]])
    both = batch.clone()
    both["next", "terminated"] = both["next", "truncated"] = both[DONE].clone()
    plain, flagged = RewardNormalizer(gamma=1.0), RewardNormalizer(gamma=1.0)
    torch.testing.assert_close(plain(batch)[REWARD], flagged(both)[REWARD])
    torch.testing.assert_close(moments(flagged), torch.tensor([3, 4 / 3, 2 / 3]).double())


def test_when_every_step_ends_an_episode_returns_are_rewards():
    rollout = make_rollout(3, 2, 6, 1.0)
    ending, myopic = RewardNormalizer(gamma=1.0), RewardNormalizer(gamma=0.0)
    torch.testing.assert_close(ending(rollout.clone())[REWARD], myopic(rollout.clone())[REWARD])
    assert not left_open(ending)


def test_masked_frames_stay_out_and_padding_ids_close_nothing():
    normalizer = RewardNormalizer(gamma=1.0)
    normalizer(make_batch([[3.0]], ids=[[0]]))
    padded = make_batch([[1.0, 2.0, math.nan, 99.0]], ids=[[5, 5, 0, 0]])
    padded[MASK] = torch.tensor([[True, True, False, False]])
    normalizer(padded)
    assert normalizer.count == 3
    assert left_open(normalizer) == {0: [3.0], 5: [3.0]}


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
    cube, c = make_rollout(1, 3, 5, 0.3).unsqueeze(0), RewardNormalizer()
    assert torch.equal(c(cube)[REWARD][0], rollout[REWARD])
    single, d, e = make_rollout(2, 1, 5, 0.3), RewardNormalizer(), RewardNormalizer()
    row = single[0].clone()
    row.names = ["time"]
    assert torch.equal(d(row)[REWARD], e(single)[REWARD][0])
    assert_state_equal(d, e)


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


@pytest.mark.parametrize("layout", ["rows", "time"])
def test_a_replay_buffer_moves_the_statistics_on_write_only(layout):
    envs = 3 if layout == "rows" else 1
    rollout, outside = make_rollout(0, envs, 16, 0.2, dtype=torch.float32), RewardNormalizer()
    expected = [outside(piece)[REWARD] for piece in time_pieces(rollout, [8, 8])]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(16 * envs, ndim=2 if layout == "rows" else 1),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
    )
    normalizer = RewardNormalizer()
    buffer.append_transform(normalizer)
    assert not normalizer.training
    for i, piece in enumerate(time_pieces(rollout, [8, 8])):
        if layout == "time":
            piece = piece[0]
            piece.names = ["time"]
        raw = piece[REWARD].clone()
        buffer.empty()
        buffer.extend(piece)
        assert torch.equal(piece[REWARD], raw)  # the caller's batch is the caller's
        written = saved(normalizer)
        assert normalizer.count == (i + 1) * 8 * envs
        sampled = torch.cat(list(buffer))
        assert_unchanged(normalizer, written)
        assert sampled.numel() == 8 * envs
        torch.testing.assert_close(
            sampled[REWARD].flatten().sort().values, expected[i].flatten().sort().values
        )
        assert torch.equal(sampled[RAW].flatten().sort().values, raw.flatten().sort().values)
    assert_state_equal(normalizer, outside)
    assert normalizer.in_keys == [REWARD, DONE]


def make_envs(name: str, count: int, transform: Callable[[], Any] | None = None) -> EnvBase:
    env: EnvBase = SerialEnv(count, lambda: GymEnv(name))
    if transform is not None:
        env = TransformedEnv(env, transform())
    env.set_seed(0)
    torch.manual_seed(0)
    return env


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


# -- in an environment


@pytest.mark.parametrize(
    "make", [lambda: GymEnv("Pendulum-v1"), lambda: make_envs("CartPole-v1", 3)]
)
@pytest.mark.parametrize("composed", [False, True])
def test_env_specs(make, composed):
    normalizer = RewardNormalizer(clip=5.0)
    total = RewardSum(in_keys=["raw_reward"], out_keys=["episode_reward"])
    env = TransformedEnv(
        make(), Compose(normalizer, total, StepCounter(9)) if composed else normalizer
    )
    env.set_seed(0)
    check_env_specs(env)
    reward, raw = env.full_reward_spec["reward"], env.full_reward_spec["raw_reward"]
    assert isinstance(reward, Bounded)
    assert (reward.low == -5).all()
    assert (reward.high == 5).all()
    assert raw == env.base_env.full_reward_spec["reward"]
    assert normalizer.in_keys == ["reward", "done"]
    assert normalizer.out_keys == ["reward", "raw_reward"]
    rollout = env.rollout(25, break_when_any_done=False)
    assert rollout[REWARD].abs().max() <= 5
    assert "raw_reward" not in rollout.keys()
    if composed:
        assert torch.equal(rollout["next", "episode_reward"][..., 0, :], rollout[RAW][..., 0, :])


def test_without_clip_the_reward_spec_is_unbounded():
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(clip=None))
    assert not isinstance(env.full_reward_spec["reward"], Bounded)
    check_env_specs(env)


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


def test_in_the_env_and_on_the_batch_is_once_too_often():
    (batch,) = collect(make_envs("Pendulum-v1", 2, RewardNormalizer), 1)
    with pytest.raises(ValueError, match="Keep one of them, in the environment or on the batch"):
        RewardNormalizer()(batch)
    with pytest.raises(ValueError, match="Keep one of them, in the environment or on the batch"):
        make_envs(
            "Pendulum-v1", 2, lambda: Compose(RewardNormalizer(), RewardNormalizer())
        ).rollout(2)


def test_batch_statistics_are_refused_in_an_env():
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardNormalizer(statistics="batch"))
    with pytest.raises(ValueError, match="statistics='batch' needs a whole batch"):
        env.rollout(2)


# -- state


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("envs_before", [0, 1, 5])
def test_save_load_and_go_on_bit_for_bit(statistics, envs_before):
    first, second = time_pieces(make_rollout(0, 3, 10, 0.1), [6, 4])
    normalizer = RewardNormalizer(statistics=statistics)
    normalizer(first)
    normalizer.freeze()
    file = io.BytesIO()
    torch.save(normalizer.state_dict(), file)
    file.seek(0)
    fresh = RewardNormalizer(statistics=statistics)
    if envs_before:
        fresh(make_rollout(1, envs_before, 3, 0.0))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_state_equal(fresh, normalizer)
    normalizer.unfreeze()
    fresh.unfreeze()
    assert torch.equal(fresh(second.clone())[REWARD], normalizer(second.clone())[REWARD])
    assert_state_equal(fresh, normalizer)


def test_the_env_accumulator_is_saved():
    env = make_envs("CartPole-v1", 2, RewardNormalizer)
    env.rollout(3, RandomPolicy(env.full_action_spec))
    assert isinstance(env, TransformedEnv)
    fresh = make_envs("CartPole-v1", 2, RewardNormalizer)
    fresh.load_state_dict(env.state_dict())
    assert isinstance(fresh, TransformedEnv)
    assert fresh.transform.env_returns.shape == (2, 1)
    assert torch.equal(fresh.transform.env_returns, env.transform.env_returns)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n)), RewardNormalizer.clone],
    ids=["deepcopy", "pickle", "clone"],
)
def test_copies_go_on_bit_for_bit_and_by_themselves(duplicate):
    first, second = time_pieces(make_rollout(0, 3, 10, 0.1), [6, 4])
    normalizer = RewardNormalizer()
    normalizer(first)
    twin = duplicate(normalizer)
    before = saved(normalizer)
    out = twin(second.clone())
    assert_unchanged(normalizer, before)
    assert torch.equal(normalizer(second.clone())[REWARD], out[REWARD])
    assert_state_equal(twin, normalizer)
    twin.load_state_dict(RewardNormalizer().state_dict())
    assert normalizer.count == 30


@pytest.mark.parametrize("cast", [lambda n: n.half(), lambda n: n.to(torch.bfloat16)])
def test_a_cast_does_not_round_the_statistics(cast):
    normalizer = RewardNormalizer()
    normalizer(make_rollout(0, 3, 10, 0.1))
    before = saved(normalizer)
    cast(normalizer)
    assert_unchanged(normalizer, before)


def test_a_pickle_does_not_carry_the_last_batch():
    normalizer = RewardNormalizer()
    empty = len(pickle.dumps(normalizer))
    normalizer(make_rollout(0, 3, 10_000, 0.0))
    assert len(pickle.dumps(normalizer)) < empty + 10_000


def test_repr_tells_the_scale():
    assert "scale=1, count=0" in repr(RewardNormalizer())


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
