"""The normaliser in a replay buffer, and as a transform without an environment."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement, SliceSampler
from torchrl.envs import (
    Compose,
    GymEnv,
    TransformedEnv,
)

from ppokit import RewardNormalizer
from tests.rewards.streams import (
    DONE,
    IDS,
    RAW,
    REWARD,
    assert_state_equal,
    assert_unchanged,
    make_rollout,
    saved,
    time_pieces,
)


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("layout", ["rows", "time"])
def test_a_replay_buffer_moves_the_statistics_on_write_only(layout, invert):
    envs = 3 if layout == "rows" else 1
    rollout, outside = make_rollout(0, envs, 16, 0.2, dtype=torch.float32), RewardNormalizer()
    expected = [outside(piece)[REWARD] for piece in time_pieces(rollout, [8, 8])]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(16 * envs, ndim=2 if layout == "rows" else 1),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
    )
    normalizer = RewardNormalizer()
    buffer.append_transform(normalizer, invert=invert)
    assert not normalizer.training
    for i, piece in enumerate(time_pieces(rollout, [8, 8])):
        if layout == "time":
            piece = piece[0]
            piece.names = ["time"]
        raw = piece[REWARD].clone()
        buffer.empty()
        buffer.extend(piece)
        assert torch.equal(piece[REWARD], raw)  # the caller's batch is the caller's
        assert RAW not in piece.keys(True)
        written = saved(normalizer)
        assert normalizer.count == (i + 1) * 8 * envs
        sampled = torch.cat(list(buffer))
        assert torch.equal(buffer[:][REWARD].flatten().sort().values,
                           sampled[REWARD].flatten().sort().values)  # fmt: skip
        assert_unchanged(normalizer, written)
        assert sampled.numel() == 8 * envs
        torch.testing.assert_close(
            sampled[REWARD].flatten().sort().values, expected[i].flatten().sort().values
        )
        assert torch.equal(sampled[RAW].flatten().sort().values, raw.flatten().sort().values)
    assert_state_equal(normalizer, outside)
    assert normalizer.in_keys == [REWARD, DONE]


@pytest.mark.parametrize("invert", [False, True])
def test_slices_out_of_a_replay_buffer_move_nothing(invert):
    # They have the shape of collected batches.
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=5, traj_key=IDS),
        batch_size=20,
    )  # fmt: skip
    normalizer = RewardNormalizer()
    buffer.append_transform(normalizer, invert=invert)
    rollout = make_rollout(0, 1, 60, 0.02, dtype=torch.float32)[0]
    rollout.names = ["time"]
    buffer.extend(rollout)
    written = saved(normalizer)
    for _ in range(3):
        sampled = buffer.sample()
        assert torch.equal(sampled[REWARD], buffer[:][REWARD][sampled["index"].flatten()])
    assert_unchanged(normalizer, written)


def test_a_normalizer_that_comes_after_the_data_says_so():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
    buffer.extend(make_rollout(0, 2, 10, 0.1))
    normalizer = RewardNormalizer()
    buffer.append_transform(normalizer)
    with pytest.raises(ValueError, match="written before the normalizer was appended"):
        buffer.sample()
    with pytest.raises(ValueError, match="written before the normalizer was appended"):
        buffer[:]
    assert normalizer.count == 0


def test_single_steps_have_no_order_in_time():
    step = make_rollout(0, 1, 1, 0.0)[0, 0]
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        buffer = kind(storage=LazyTensorStorage(20), transform=RewardNormalizer())
        with pytest.raises(ValueError, match="needs time order"):
            buffer.add(step)


def test_a_buffer_that_several_processes_write_to_is_refused():
    with pytest.raises(RuntimeError, match="keeps replay-buffer write state"):
        ReplayBuffer(storage=LazyTensorStorage(20), transform=RewardNormalizer(), shared=True)


# -- offline


@pytest.mark.parametrize("build", ["at once", "by append"])
def test_in_a_compose_without_an_environment(build):
    normalizer, alone = RewardNormalizer(), RewardNormalizer()
    compose = Compose(normalizer) if build == "at once" else Compose()
    if build == "by append":
        compose.append(normalizer)
    for piece in time_pieces(make_rollout(0, 2, 10, 0.2), [4, 6]):
        expected = alone(piece.clone())
        assert torch.equal(compose(piece)[REWARD], expected[REWARD])
        with pytest.raises(ValueError, match="is normalised already"):
            compose(piece)
    assert_state_equal(normalizer, alone)


def test_before_a_model_that_reads_the_reward():
    model = nn.Sequential(RewardNormalizer(), TensorDictModule(nn.Linear(1, 2), [REWARD], ["out"]))
    rollout = make_rollout(0, 2, 5, 0.2, dtype=torch.float32)
    expected = RewardNormalizer()(rollout.clone())
    out = model(rollout)
    assert torch.equal(out[REWARD], expected[REWARD])
    out["out"].sum().backward()
    with pytest.raises(KeyError, match="is not in the batch"):
        model(TensorDict({"reward": torch.ones(2, 5, 1)}, [2, 5]))


def test_inverse_is_what_writing_does():
    rollout = make_rollout(0, 2, 5, 0.2)
    normalizer, forward = RewardNormalizer(), RewardNormalizer()
    out = normalizer.inv(rollout)
    assert RAW not in rollout.keys(True)
    assert torch.equal(out[REWARD], forward(rollout)[REWARD])
    assert_state_equal(normalizer, forward)


def test_a_transform_has_one_place():
    normalizer = RewardNormalizer()
    env = TransformedEnv(GymEnv("Pendulum-v1"), normalizer)
    with pytest.raises(AttributeError, match="already set"):
        Compose(normalizer)
    assert Compose(normalizer.clone()).transforms[0].in_keys == [REWARD, DONE]
    assert env.transform.in_keys == ["reward", "done"]
