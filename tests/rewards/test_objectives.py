"""Several objectives in one reward, each with statistics of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from ppokit import RewardNormalizer, kernels
from tests.rewards.streams import (
    DONE,
    IDS,
    MASK,
    RAW,
    REWARD,
    assert_state_equal,
    assert_unchanged,
    make_rollout,
    moments,
    saved,
    time_pieces,
)


def single(batch: TensorDict, reward: Tensor) -> TensorDict:
    """A batch of one of the objectives ``[B, T]``."""
    out = TensorDict({}, batch.batch_size)
    out[REWARD], out[IDS], out[DONE] = reward.unsqueeze(-1), batch[IDS], batch[DONE]
    return out


def objectives(seed: int, count: int, *, agents: int = 0, dtype: Any = torch.float64) -> TensorDict:
    batch = make_rollout(seed, 2, 12, 0.2)
    shape = (2, 12, agents, count) if agents else (2, 12, count)
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.arange(count, dtype=torch.float64)
    reward = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return batch.set(REWARD, reward.to(dtype))


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("masked", [False, True])
def test_each_objective_has_statistics_of_its_own(statistics, masked):
    batch = objectives(0, 3)
    together = RewardNormalizer(0.9, statistics=statistics)
    alone = [RewardNormalizer(0.9, statistics=statistics) for _ in range(3)]
    for piece in time_pieces(batch, [5, 7]):
        if masked:
            piece[MASK] = torch.arange(piece.shape[1]) < torch.tensor([[4], [99]])
        parts = [single(piece, piece[REWARD][..., k]) for k in range(3)]
        if masked:
            parts = [part.set(MASK, piece[MASK]) for part in parts]
        out = together(piece)
        for k in range(3):
            expected = alone[k](parts[k])
            torch.testing.assert_close(out[REWARD][..., k : k + 1], expected[REWARD])
            torch.testing.assert_close(moments(together)[:, k], moments(alone[k]))
    torch.testing.assert_close(together.open_returns[:, 1:2], alone[1].open_returns)
    assert together.scale[2] > 50 * together.scale[0]


def test_agents_with_several_objectives_share_each():
    batch, normalizer = objectives(0, 2, agents=3), RewardNormalizer(0.9)
    for k in range(2):
        part, alone = batch.clone(), RewardNormalizer(0.9)
        alone(part.set(REWARD, batch[REWARD][..., k : k + 1].clone()))
        normalizer(batch.clone()) if k == 0 else None
        torch.testing.assert_close(moments(normalizer)[:, k], moments(alone))


@pytest.mark.parametrize("kernel", kernels.available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtype_and_clip_are_kept(dtype, kernel):
    with kernels.use(kernel):
        out = RewardNormalizer(clip=0.5)(objectives(0, 2, dtype=dtype))
    assert out[REWARD].dtype == out[RAW].dtype == dtype
    assert out[REWARD].abs().max() == 0.5
    assert out[RAW].shape == out[REWARD].shape == (2, 12, 2)


def test_frozen_before_anything_was_seen():
    normalizer, batch = RewardNormalizer(clip=None).freeze(), objectives(0, 3)
    assert torch.equal(normalizer(batch.clone())[REWARD], batch[REWARD])
    assert normalizer.count.tolist() == [0, 0, 0]


def test_the_state_goes_on_bit_for_bit():
    first, second = time_pieces(objectives(0, 2), [5, 7])
    normalizer, twin = RewardNormalizer(), RewardNormalizer()
    normalizer(first)
    twin.load_state_dict(normalizer.state_dict())
    assert torch.equal(normalizer(second.clone())[REWARD], twin(second.clone())[REWARD])
    assert_state_equal(normalizer, twin)


def test_other_numbers_of_objectives_are_refused():
    normalizer = RewardNormalizer()
    normalizer(objectives(0, 2))
    before = saved(normalizer)
    with pytest.raises(ValueError, match=r"3 rewards with statistics of their own.* are of 2"):
        normalizer(objectives(0, 3).exclude(IDS))
    with pytest.raises(ValueError, match=r"has 3 rewards a frame, .* left open have 2"):
        normalizer(objectives(0, 3))
    with pytest.raises(ValueError, match=r"1 rewards with statistics of their own.* are of 2"):
        normalizer(make_rollout(0, 2, 3, 0.2).exclude(IDS))
    assert_unchanged(normalizer, before)


def test_objectives_that_are_not_finite():
    batch = objectives(0, 2)
    batch[REWARD][0, 3, 1] = math.nan
    with pytest.raises(ValueError, match=r"1 of 48 rewards .* first at \[0, 3, 1\]"):
        RewardNormalizer()(batch.clone())
    normalizer = RewardNormalizer(nonfinite="ignore")
    normalizer(batch)
    assert normalizer.count.tolist() == [24, 23]
