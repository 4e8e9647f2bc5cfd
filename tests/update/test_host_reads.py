"""How often the host waits for a device, on tensors that stand for those of one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn
from torchrl.modules import ValueOperator

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    AdaptiveLearningRate,
    DualClipPPOLoss,
    GRUModule,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from ppokit.functional import _checks
from ppokit.networks import actor_critic
from ppokit.update import decision
from tests.blocks import categorical_actor
from tests.fake_device import counted, to_device
from tests.update.parts import make_batch

MASK = ("collector", "mask")


def make_networks(*, recurrent: bool) -> tuple[Any, Any]:
    if not recurrent:
        return actor_critic(gym.make("CartPole-v1"))
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    actor = categorical_actor(gru, nn.Linear(8, 2), in_key="features")
    return actor, ValueOperator(nn.Linear(4, 1), in_keys=["observation"])


def update_twice(
    monkeypatch: pytest.MonkeyPatch,
    on_device: bool,
    options: dict[str, Any],
    *,
    minibatch_size: int = 16,
) -> tuple[list[dict[str, float]], list[list[str]], list[torch.Tensor]]:
    """Return statistics and transfers of two updates, and the parameters after them."""
    options = dict(options)
    torch.manual_seed(0)
    actor, critic = make_networks(recurrent="batcher" in options)
    actor.register_buffer("policy_version", torch.tensor(0))
    make = {"frames_per_batch": 64, "num_envs": 4, "total_frames": -1}
    with GymCollector("CartPole-v1", actor, **make) as collector:
        collector.set_seed(0)
        batches = [collector.rollout().clone() for _ in range(2)]
    if options.pop("masked", False):
        for batch in batches:
            mask = torch.ones(batch.batch_size, dtype=torch.bool)
            mask[0, -3:] = False
            batch[MASK] = mask
    if on_device:
        monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
        actor, critic, *batches = map(to_device, (actor, critic, *batches))
    loss: Any = DualClipPPOLoss(actor, critic, kl_coeff=options.pop("kl_coeff", None))
    loss = to_device(loss) if on_device else loss
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    if (make_rule := options.pop("rule", None)) is not None:
        options["adaptive_kl"] = make_rule(loss, optimizer)
    else:
        falling: Any = InterpSchedule([(0, 1e-3), (1_000, 0.0)])
        options["scheduler"] = ParameterScheduler({"lr": (optimizer, falling)})
    average_gae = options.pop("average_gae", False)
    update = PPOUpdate(
        TrainingStep(loss, optimizer, max_grad_norm=0.5, stopper=options.pop("stopper", None)),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=average_gae),
        reward_normalizer=RewardNormalizer(0.99),
        epochs=EPOCHS,
        minibatch_size=minibatch_size,
        seed=0,
        **options,
    )
    statistics, transfers = [], []
    for batch in batches:
        with counted() as found:
            statistics.append(update(batch))
        transfers.append([x for x in found if "recurrent.py" not in x])  # the recurrent networks
    return statistics, transfers, [p.detach().as_subclass(torch.Tensor) for p in loss.parameters()]


EPOCHS = 3
# Reads at the start and the end of an update, and in each epoch.
UPDATES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (19, 0, {}),
    "mask": (25, 0, {"masked": True}),
    "standardized advantages": (26, 0, {"masked": True, "average_gae": True}),
    "advantages again in each epoch": (17, 2, {"recompute_advantage": True}),
    "sequences": (27, 1, {"batcher": SequenceBatcher(8)}),
    "burn-in": (27, 1, {"batcher": SequenceBatcher(8, burn_in=2)}),
    "sequences again in each epoch": (
        26,
        8,
        {"batcher": SequenceBatcher(8), "recompute_advantage": True, "masked": True},
    ),
    "stop after minibatches": (18, 1, {"stopper": KLEarlyStopper(1.0)}),
    "stop after epochs": (18, 1, {"stopper": KLEarlyStopper(1.0, when="epoch")}),
    "learning rate after minibatches": (
        20,
        1,
        {"rule": lambda _, optimizer: AdaptiveLearningRate(optimizer, when="minibatch")},
    ),
    "learning rate after epochs": (18, 1, {"rule": lambda _, x: AdaptiveLearningRate(x)}),
    "KL coefficient": (21, 1, {"kl_coeff": 0.2, "rule": lambda x, _: AdaptiveKLCoeff(x)}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_waits_for_a_device(name: str, monkeypatch: pytest.MonkeyPatch):
    around, in_epoch, options = UPDATES[name]
    assert in_epoch <= 12
    most = around + EPOCHS * in_epoch
    statistics, _, parameters = update_twice(monkeypatch, False, options)
    found, transfers, moved = update_twice(monkeypatch, True, options)
    for number, of_update in enumerate(transfers):  # the optimizer's first step waits, too
        assert len(of_update) <= most + (number == 0), of_update
    for own, expected in zip(found, statistics, strict=True):
        own, expected = ({k: v for k, v in x.items() if "second" not in k} for x in (own, expected))
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    for own, expected in zip(moved, parameters, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", UPDATES)
def test_the_number_of_reads_does_not_depend_on_the_minibatches(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    options = UPDATES[name][2]
    few, many = (
        update_twice(monkeypatch, True, options, minibatch_size=size)[:2] for size in (32, 8)
    )
    assert all(x["minibatches"] > y["minibatches"] for x, y in zip(many[0], few[0], strict=True))
    assert [len(x) for x in many[1]] == [len(x) for x in few[1]]


def make_blocks() -> tuple[Any, Any, Any]:
    """Return a loss, a GAE and a batch with a mask and trajectory ids."""
    actor, critic = actor_critic((Box(-9, 9, (4,)), Box(-9, 9, (2,))))
    loss = DualClipPPOLoss(actor, critic, dual_clip=3.0, normalize_advantage=True)
    batch = make_batch().set(MASK, torch.ones(2, 6, dtype=torch.bool))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic, average_gae=True)
    return loss, gae, batch


def test_blocks_alone_wait_a_few_times_or_never(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    loss, gae, batch = map(to_device, make_blocks())
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    step = TrainingStep(loss, optimizer, max_grad_norm=0.5, stopper=KLEarlyStopper(1.0))
    schedule = ParameterScheduler({"entropy_coeff": (loss, InterpSchedule([(0, 0.01), (9, 0.0)]))})
    blocks: list[tuple[Any, int]] = [(RewardNormalizer(0.9), 5), (gae, 3), (schedule, 1)]
    for block, most in blocks:
        with counted() as transfers:
            block(batch)
        assert 0 < len(transfers) <= most, transfers
    for block, most in ((loss, 0), (step, 1), (step, 0)):  # the optimizer's first step waits
        with counted() as transfers:
            block(batch.reshape(-1))
        assert len(transfers) == most


def test_a_loop_that_never_closes_a_batch_keeps_few_minibatches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    monkeypatch.setattr(decision, "MOST_DECISIONS", 3)
    loss, gae, batch = make_blocks()
    gae(batch)
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=1e-3))
    minibatches = [batch.reshape(-1).clone() for _ in range(8)]
    alive = [weakref.ref(minibatch) for minibatch in minibatches]
    while minibatches:
        assert step(minibatches.pop(0))["stepped"]
    gc.collect()
    assert sum(x() is not None for x in alive) == 2


def test_tensors_without_numbers():
    loss, gae, batch = (x.to("meta") for x in make_blocks())
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-3), max_grad_norm=0.5)
    assert gae(batch)["advantage"].shape == (2, 6, 1)
    assert loss(batch.reshape(-1))["loss_objective"].is_meta
    assert step(batch.reshape(-1))["stepped"].is_meta


def test_tensors_of_inference_mode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    with torch.inference_mode():
        batch = make_batch()
        scaled = RewardNormalizer(0.9)(to_device(batch.clone()))["next", "reward"]
    monkeypatch.undo()
    torch.testing.assert_close(scaled, RewardNormalizer(0.9)(batch)["next", "reward"])
