"""The same rewards by every route: one meaning, once only; replay buffers and transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import SerialEnv, TransformedEnv

from ppokit import GAE, RewardNormalizer
from tests.blocks import make_minibatch, ppo_update
from tests.rewards.routes import (
    BATCH,
    ENVS,
    ROUTES,
    STEPS,
    accumulators,
    assert_as_in,
    call,
    collected,
    environment,
    make_update,
    rows_of,
    slow,
)
from tests.rewards.streams import (
    RAW,
    REWARD,
    Rows,
    as_batch,
    assert_state_equal,
    assert_unchanged,
    make_rollout,
    play,
    play_serial,
    recorded,
    saved,
    time_pieces,
)
from tests.update.parts import make_batch, make_loss


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("env_id", ENVS)
def test_every_route_gives_the_same_statistics(env_id, route):
    for envs in (1, 8):
        rows, normalizer = rows_of(env_id, envs), RewardNormalizer(0.99)
        batches = route(rows, normalizer)
        assert_as_in(rows, normalizer)
        raw = torch.cat([batch[RAW].reshape(envs, BATCH, 1) for batch in batches], 1)
        assert torch.equal(raw, as_batch(rows)[REWARD])


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_frozen_every_route_gives_the_same_rewards(route):
    env_id = "CartPole-v1"
    rows, trained = rows_of(env_id, 3), RewardNormalizer(0.99)
    call(recorded(env_id, 8, STEPS)[3:], trained)
    trained.reset_returns().freeze()
    expected = torch.cat([batch[REWARD] for batch in call(rows, trained.clone())], 1)
    normalizer = trained.clone()
    rewards = torch.cat([batch[REWARD] for batch in route(rows, normalizer)], 1)
    assert torch.equal(rewards, expected)
    assert torch.equal(normalizer.moments, trained.moments)
    assert accumulators(normalizer) == pytest.approx(sorted(filter(None, slow(rows)[1])), abs=1e-6)


# -- once, and once only


def in_workers(rows: Rows) -> TensorDictBase:
    makers = [partial(play, row, RewardNormalizer) for row in rows]
    return collected(SerialEnv(len(rows), makers))[0]


FIRST: dict[str, Callable[[Rows], TensorDictBase]] = {
    "environment": lambda rows: environment(rows, RewardNormalizer())[0],
    "environments of workers": in_workers,
    "batch": lambda rows: call(rows, RewardNormalizer())[0],
    "replay buffer": lambda rows: ROUTES["replay buffer"](rows, RewardNormalizer())[0],
}


def written(batch: TensorDictBase, *, invert: bool = False) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(batch.numel(), ndim=2))
    buffer.append_transform(RewardNormalizer(), invert=invert)
    buffer.extend(batch)


SECOND: dict[str, Callable[[TensorDictBase], object]] = {
    "batch": lambda batch: RewardNormalizer()(batch),
    "frozen": lambda batch: RewardNormalizer().freeze()(batch),
    "in eval mode": lambda batch: RewardNormalizer().eval()(batch),
    "replay buffer": written,
    "replay buffer, inverted": partial(written, invert=True),
    "PPOUpdate": lambda batch: make_update(RewardNormalizer())(batch),
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND.keys())
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_a_second_normalizer_raises(first, second):
    batch = first(rows_of("CartPole-v1", 2))
    before = batch.clone()
    with pytest.raises(ValueError, match="Keep one of them, in the environment or on the batch"):
        second(batch)
    assert (batch == before).all()


def test_a_second_normalizer_in_a_collector_or_in_an_environment_raises():
    rows = rows_of("CartPole-v1", 2)
    env = TransformedEnv(play_serial(rows), RewardNormalizer())
    with pytest.raises(ValueError, match="Keep one of them"):
        collected(env, RewardNormalizer())
    env = TransformedEnv(play_serial(rows), RewardNormalizer())
    inside: Any = SerialEnv(2, [partial(play, row, RewardNormalizer) for row in rows])
    env.append_transform(RewardNormalizer())
    for twice in (env, TransformedEnv(inside, RewardNormalizer())):
        with pytest.raises(ValueError, match="Keep one of them"):
            twice.reset()


# -- replay buffers


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
    for i, piece in enumerate(time_pieces(rollout, [8, 8])):
        if layout == "time":
            piece = piece[0]
            piece.names = ["time"]
        raw = piece[REWARD].clone()
        buffer.empty()
        buffer.extend(piece)
        assert torch.equal(piece[REWARD], raw)  # the caller's batch does not change
        assert RAW not in piece.keys(True)
        state = saved(normalizer)
        assert normalizer.count == (i + 1) * 8 * envs
        for sampled in (torch.cat(list(buffer)), buffer[:]):
            for key, wanted in ((REWARD, expected[i]), (RAW, raw)):
                found = sampled[key].flatten().sort().values
                torch.testing.assert_close(found, wanted.flatten().sort().values)
        assert_unchanged(normalizer, state)
    assert_state_equal(normalizer, outside)


def test_with_gae_in_one_buffer_the_normalizer_comes_last():
    """A buffer's transforms run in reverse order when it is written."""
    batch = make_rollout(0, 3, 16, 0.2, dtype=torch.float32)
    batch["state_value"] = torch.randn(3, 16, 1)
    batch["next", "state_value"] = torch.randn(3, 16, 1)
    batch["next", "terminated"] = batch["next", "done"].clone()
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=None)
    expected = gae(RewardNormalizer()(batch.clone()))["advantage"]
    for invert in (False, True):
        buffer = ReplayBuffer(storage=LazyTensorStorage(48, ndim=2))
        buffer.append_transform(gae, invert=True)
        buffer.append_transform(RewardNormalizer(), invert=invert)
        buffer.extend(batch.clone())
        found = buffer[:]["advantage"].reshape(expected.shape)
        torch.testing.assert_close(found, expected)
        buffer = ReplayBuffer(storage=LazyTensorStorage(48, ndim=2))
        buffer.append_transform(RewardNormalizer(), invert=invert)
        buffer.append_transform(gae, invert=True)
        with pytest.raises(ValueError, match="append GAE first"):
            buffer.extend(batch.clone())


def test_an_update_that_normalizes_rewards_of_a_given_advantage_raises():
    loss = make_loss()
    batch = make_minibatch(loss.actor_network, 2, 6).update(make_batch())
    update = ppo_update(
        loss, torch.optim.SGD(loss.parameters()), reward_normalizer=RewardNormalizer()
    )
    before = batch.clone()
    with pytest.raises(ValueError, match="pass advantage=, too"):
        update(batch)
    assert (batch == before).all()
    assert update.reward_normalizer.count == 0


def test_buffers_that_a_normalizer_cannot_serve_raise():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
    buffer.extend(make_rollout(0, 2, 10, 0.1))
    normalizer = RewardNormalizer()
    buffer.append_transform(normalizer)
    with pytest.raises(ValueError, match="written before the normalizer was appended"):
        buffer.sample()
    assert normalizer.count == 0
    step = make_rollout(0, 1, 1, 0.0)[0, 0]
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        with pytest.raises(ValueError, match="needs time order"):
            kind(storage=LazyTensorStorage(20), transform=RewardNormalizer()).add(step)
    with pytest.raises(RuntimeError, match="keeps replay-buffer write state"):
        ReplayBuffer(storage=LazyTensorStorage(20), transform=RewardNormalizer(), shared=True)
