"""policy_version: a number that travels with the weights, and the policy lag."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs import GymEnv

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TensorActor, TrainingStep
from tests.update.parts import make_networks

OF_TORCHRL: Any = {"frames_per_batch": 32, "auto_register_policy_transforms": False}


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
        assert (batch["policy_version"] == count).all()  # the batch keeps its version
    assert actor.policy_version == 3


def test_the_lag_of_older_batches():
    """Padding does not count, frames without a version have none, and a resumed run continues."""
    actor, update = make()
    batches = list(make_collector(actor, total_frames=160))
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 8:] = False
    batches[2]["collector", "mask"] = mask
    batches[2]["policy_version"][1, 8:] = -1_000
    assert [update(batch)["policy_lag"] for batch in batches[:3]] == [0.0, 1.0, 2.0]
    assert math.isnan(update(batches[3].exclude("policy_version"))["policy_lag"])
    other, resumed = make()
    resumed.load_state_dict(update.state_dict())
    assert other.policy_version == 4
    assert resumed(batches[4])["policy_lag"] == 4.0


def test_without_the_buffer_nothing_is_written():
    actor, update = make()
    del actor.policy_version
    (batch, *_) = make_collector(actor)
    assert "policy_version" not in batch.keys()
    assert "policy_lag" not in update(batch)


def test_in_torchrls_collector_tensor_actor_writes_it():
    actor, update = make()
    collector = Collector(env, TensorActor(actor), total_frames=64, **OF_TORCHRL)
    for count, batch in enumerate(collector):
        assert (batch["policy_version"] == count).all()
        assert update(batch)["policy_lag"] == 0.0


@pytest.mark.slow
def test_an_asynchronous_collector_shows_its_lag():
    actor, update = make()
    collector = MultiAsyncCollector([env] * 2, TensorActor(actor), total_frames=256, **OF_TORCHRL)
    lags = []
    for batch in collector:
        versions = batch["policy_version"].unique()
        lags.append(update(batch)["policy_lag"])
        assert lags[-1] >= 0.0
        assert versions.max() < actor.policy_version
        collector.update_policy_weights_()
    collector.shutdown()
    assert max(lags) >= 1.0  # the second worker's first batch is of the policy of the beginning
