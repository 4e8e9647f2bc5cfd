"""How old the policy was that collected a frame: a number that travels with the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs import GymEnv

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TensorActor, TrainingStep
from tests.update.test_ppo_update import make_networks


def make(functional: bool = False) -> tuple[Any, PPOUpdate]:
    actor, critic = make_networks()
    actor.register_buffer("policy_version", torch.zeros((), dtype=torch.int64))
    loss = DualClipPPOLoss(actor, critic, functional=functional)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    return actor, PPOUpdate(
        TrainingStep(loss, optimizer), advantage=gae, epochs=1, minibatch_size=16
    )


def env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_collector(actor: Any, **options: Any) -> GymCollector:
    options = {"frames_per_batch": 32, "num_envs": 2, "total_frames": 96} | options
    return GymCollector("CartPole-v1", actor, categorical_action_encoding=True, **options)


@pytest.mark.parametrize("functional", [False, True])
def test_in_one_process_there_is_no_lag(functional: bool):
    actor, update = make(functional)
    for count, batch in enumerate(make_collector(actor)):
        assert batch["policy_version"].shape == (2, 16)
        assert (batch["policy_version"] == count).all()
        assert update(batch)["policy_lag"] == 0.0
        assert (batch["policy_version"] == count).all()  # the batch's own
    assert actor.policy_version == 3


def test_a_batch_of_before_has_a_lag_and_padding_does_not_count():
    actor, update = make()
    batches = list(make_collector(actor))
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 8:] = False
    batches[2]["collector", "mask"] = mask
    batches[2]["policy_version"][1, 8:] = -1_000
    assert [update(batch)["policy_lag"] for batch in batches] == [0.0, 1.0, 2.0]


def test_a_resumed_run_goes_on_counting():
    actor, update = make()
    batches = list(make_collector(actor))
    update(batches[0])
    other, resumed = make()
    resumed.load_state_dict(update.state_dict())
    assert other.policy_version == 1
    assert resumed(batches[1])["policy_lag"] == 1.0


def test_the_lag_of_frames_without_a_version_is_nan():
    actor, update = make()
    batch, other, *_ = make_collector(actor)
    assert math.isnan(update(batch.exclude("policy_version"))["policy_lag"])
    assert update(other)["policy_lag"] == 1.0


def test_without_the_buffer_nothing_is_written():
    actor, update = make()
    del actor.policy_version
    (batch, *_) = make_collector(actor)
    assert "policy_version" not in batch.keys()
    assert "policy_lag" not in update(batch)


def test_in_torchrls_collector_a_lean_actor_writes_it():
    actor, update = make()
    collector = Collector(
        env,
        TensorActor(actor),
        frames_per_batch=32,
        total_frames=64,
        auto_register_policy_transforms=False,
    )
    for count, batch in enumerate(collector):
        assert (batch["policy_version"] == count).all()
        assert update(batch)["policy_lag"] == 0.0


@pytest.mark.slow
def test_an_asynchronous_collector_shows_its_lag():
    actor, update = make()
    collector = MultiAsyncCollector(
        [env, env],
        TensorActor(actor),
        frames_per_batch=32,
        total_frames=256,
        auto_register_policy_transforms=False,
    )
    lags = []
    for batch in collector:
        versions = batch["policy_version"].unique()
        lags.append(update(batch)["policy_lag"])
        assert lags[-1] >= 0.0
        assert versions.max() < actor.policy_version
        collector.update_policy_weights_()
    collector.shutdown()
    assert max(lags) >= 1.0  # the second worker's first batch is of the policy of the beginning
