"""Plugged in twice by mistake, the normaliser says so: every pair of routes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import SerialEnv, TransformedEnv

from ppokit import PPOUpdate, RewardNormalizer, TrainingStep
from tests.rewards.routes import (
    ROUTES,
    Loss,
    collected,
    environment,
    rows_of,
)
from tests.rewards.streams import (
    Rows,
    play,
    play_serial,
)


def in_env(rows: Rows) -> TensorDictBase:
    return environment(rows, RewardNormalizer())[0]


def in_worker(rows: Rows) -> TensorDictBase:
    makers = [partial(play, row, RewardNormalizer) for row in rows]
    return collected(SerialEnv(len(rows), makers))[0]


FIRST: dict[str, Callable[[Rows], TensorDictBase]] = {
    "environment": in_env,
    "inside of workers": in_worker,
    **{
        name: lambda rows, route=route: route(rows, RewardNormalizer())[0]
        for name, route in ROUTES.items()
        if name != "environment"
    },
}


def written(batch: TensorDictBase, *, invert: bool = False) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(batch.numel(), ndim=2))
    buffer.append_transform(RewardNormalizer(), invert=invert)
    buffer.extend(batch)


def updated(batch: TensorDictBase) -> None:
    loss = Loss()
    optimizer = torch.optim.SGD(loss.parameters())
    PPOUpdate(TrainingStep(loss, optimizer), reward_normalizer=RewardNormalizer())(batch)


def evaluating(batch: TensorDictBase) -> None:
    RewardNormalizer().eval()(batch)


SECOND: dict[str, Callable[[TensorDictBase], object]] = {
    "batch": lambda batch: RewardNormalizer()(batch),
    "frozen": lambda batch: RewardNormalizer().freeze()(batch),
    "in eval mode": evaluating,
    "replay buffer": written,
    "replay buffer, inverted": partial(written, invert=True),
    "PPOUpdate": updated,
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND.keys())
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_twice_is_once_too_often(first, second):
    batch = first(rows_of("CartPole-v1", 2))
    before = batch.clone()
    with pytest.raises(ValueError, match="Keep one of them, in the environment or on the batch"):
        second(batch)
    assert (batch == before).all()


def test_twice_in_a_collector_is_once_too_often():
    env = TransformedEnv(play_serial(rows_of("CartPole-v1", 2)), RewardNormalizer())
    with pytest.raises(ValueError, match="Keep one of them"):
        collected(env, RewardNormalizer())


@pytest.mark.parametrize("inside", [False, True])
def test_twice_in_an_environment_is_refused_before_the_first_step(inside):
    rows = rows_of("CartPole-v1", 2)
    if inside:
        env = SerialEnv(2, [partial(play, row, RewardNormalizer) for row in rows])
        env = TransformedEnv(env, RewardNormalizer())
    else:
        env = TransformedEnv(play_serial(rows), RewardNormalizer())
        env.append_transform(RewardNormalizer())
    with pytest.raises(ValueError, match="Keep one of them"):
        env.reset()
