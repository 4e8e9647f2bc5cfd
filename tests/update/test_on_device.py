"""Steps and updates whose decisions are made on a device are those of the CPU."""

from __future__ import annotations

import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from ppokit import (
    GAE,
    AdaptiveLearningRate,
    KLEarlyStopper,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
)
from ppokit.functional import _checks
from ppokit.update import decision
from tests.blocks import Given, make_actor, make_minibatch
from tests.update.parts import make_batch, make_loss, parameters_of

On = Callable[[bool], None]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> On:
    """Return a function that chooses the path of a device for tensors of the CPU, or not."""
    real = _checks.reads_are_free

    def choose(on: bool) -> None:
        monkeypatch.setattr(_checks, "reads_are_free", (lambda _: False) if on else real)

    return choose


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "dampened": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_first_step_leaves_no_state(name: str, on_device: On):
    found = []
    for on in (False, True):
        loss = make_loss()
        optimizer = OPTIMIZERS[name](loss.parameters())
        on_device(on)
        step = TrainingStep(loss, optimizer, nonfinite="skip")
        for number in range(4):
            minibatch = make_minibatch(make_actor(), 16, seed=number, spread=0.01)
            if number == 0:
                minibatch["advantage"][0] = math.nan
            step(minibatch)
        step.reset()
        state = [x for p in optimizer.state.values() for x in p.values() if isinstance(x, Tensor)]
        found.append((parameters_of(loss), state))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def make_update(**options: Any) -> PPOUpdate:
    loss = make_loss()
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    step = TrainingStep(loss, optimizer)
    return PPOUpdate(step, advantage=gae, minibatch_size=4, seed=0, **options)


@pytest.mark.slow
def test_an_update_keeps_few_minibatches(on_device: On, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decision, "MOST_BYTES", 400)  # of three minibatches
    on_device(True)
    update, alive, most = make_update(epochs=5), [], []
    train_on = update.step.train_on

    def note(minibatch: Any, frames: float) -> Any:
        alive.append(weakref.ref(minibatch))
        gc.collect()
        most.append(sum(x() is not None for x in alive))
        return train_on(minibatch, frames)

    monkeypatch.setattr(update.step, "train_on", note)
    statistics = update(make_batch())
    assert statistics["steps"] == len(alive) == 15
    assert max(most) <= 6  # three that wait, and those of an epoch's copy


def test_a_stop_among_decisions_that_are_read_early(on_device: On, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decision, "MOST_DECISIONS", 2)
    found = []
    for on in (False, True):
        loss = make_loss()
        optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
        step = TrainingStep(loss, optimizer, stopper=KLEarlyStopper(1.0))
        on_device(on)
        update = PPOUpdate(step, advantage=gae, minibatch_size=2, epochs=3, seed=0)
        found.append({k: x for k, x in update(make_batch()).items() if "second" not in k})
    assert found[0]["stopped"] == 1
    assert found[1] == pytest.approx(found[0], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_an_update_that_raises_after_a_step_is_not_undone(
    on: bool, error: type[BaseException], on_device: On, monkeypatch: pytest.MonkeyPatch
):
    update = make_update(epochs=1, shuffle=False, reward_normalizer=RewardNormalizer(0.99))
    batch, before = make_batch(), parameters_of(update.step.loss).clone()
    if error is FloatingPointError:
        batch["action_log_prob"][-1, -1] = math.nan  # of the last minibatch
    else:
        calls, forward = [], update.step.loss.forward

        def interrupt(minibatch: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return forward(minibatch)

        monkeypatch.setattr(update.step.loss, "forward", interrupt)
    on_device(on)
    with pytest.raises(error):
        update(batch)
    assert not torch.equal(parameters_of(update.step.loss), before)
    assert "advantage" in batch.keys()
    assert update.reward_normalizer.count == 12


def test_versions_that_are_no_numbers(on_device: On):
    on_device(True)
    batch = make_batch()
    batch["policy_version"] = NonTensorStack.from_list([["a"] * 6, ["b"] * 6])
    assert make_update(epochs=1)(batch)["steps"] == 3


@pytest.mark.parametrize("on", [False, True])
def test_a_stop_stays_when_the_target_changes(on: bool, on_device: On):
    on_device(on)
    loss, stopper = make_loss(), KLEarlyStopper(0.01)
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=1e-2), stopper=stopper)
    minibatch = make_minibatch(make_actor(), 16, seed=0, spread=0.5)
    assert not step(minibatch)["stepped"]
    stopper.target_kl = 100.0
    step.settle()
    assert stopper.stopped
    assert not step(minibatch)["stepped"]
    stopper.reset()  # instead of step.reset()
    assert step(minibatch)["stepped"]


def test_foreach_is_named(on_device: On):
    on_device(True)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, foreach=True)
    with pytest.raises(ValueError, match="pass fused=True or capturable=True"):
        AdaptiveLearningRate(optimizer)


@pytest.mark.parametrize("wide", [False, True])
def test_a_loop_without_reset_raises_soon_after_a_bad_minibatch(wide: bool, on_device: On):
    on_device(True)
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=1e-2))
    good, bad = (make_minibatch(make_actor(), 8, spread=0.01) for _ in range(2))
    bad["advantage"][0] = math.nan
    if wide:  # 128 MiB each: decisions are read after three
        good["pixels"] = torch.zeros(8, 2**24, dtype=torch.uint8)
    step(bad)
    before = 2 if wide else 31  # 32 calls with the bad one
    assert not any(step(good)["stepped"] for _ in range(before))
    with pytest.raises(FloatingPointError, match="not finite"):
        step(good)


@pytest.mark.parametrize("on", [False, True])
def test_a_forgotten_reset_warns_once(on: bool, on_device: On, recwarn: pytest.WarningsRecorder):
    on_device(on)
    loss = make_loss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    step = TrainingStep(loss, optimizer, stopper=KLEarlyStopper(0.02))

    def train_until_it_stops():
        old = make_minibatch(loss.actor_network, 16, spread=0.0)
        for _ in range(200):
            step(old)
        step.settle()
        assert step.stopped

    train_until_it_stops()
    assert not recwarn.list
    for _ in range(100):
        assert not step(make_minibatch(loss.actor_network, 16, spread=0.0))["stepped"]
    (warning,) = recwarn.list
    assert re.search(r"KL is 0 now.*Call step\.reset\(\)", str(warning.message))
    step.reset()
    train_until_it_stops()
    for _ in range(100):
        step(make_minibatch(loss.actor_network, 16, spread=0.0))
    assert len(recwarn.list) == 2  # once for each stop


def test_a_forgotten_reset_before_any_step_warns_late(recwarn: pytest.WarningsRecorder):
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters()), stopper=KLEarlyStopper(0.01))
    step(make_minibatch(make_actor(), 16, spread=0.5))
    new = make_minibatch(make_actor(), 16, spread=0.0)
    for _ in range(990):
        step(new)
    assert not recwarn.list
    for _ in range(200):
        step(new)
    (warning,) = recwarn.list
    assert "Call step.reset()" in str(warning.message)


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("on", [False, True])
def test_one_stale_frame_is_no_forgotten_reset(
    steps_before: int, on: bool, on_device: On, recwarn: pytest.WarningsRecorder
):
    """It stops a batch; without steps, or with small ones, the KL of the others is 0."""
    on_device(on)
    loss = make_loss()
    step = TrainingStep(
        loss, torch.optim.SGD(loss.parameters(), lr=1e-6), stopper=KLEarlyStopper(0.01)
    )
    for _ in range(3):
        for _ in range(steps_before):
            assert step(make_minibatch(make_actor(), 16, spread=0.0))["stepped"]
        for _ in range(3):  # epochs
            step(make_minibatch(make_actor(), 16, spread=0.5))
            for _ in range(32):
                step(make_minibatch(make_actor(), 16, spread=0.0))
        assert step.stopped
        step.reset()
    assert not recwarn.list


def test_an_estimate_that_crosses_0_is_no_forgotten_reset(recwarn: pytest.WarningsRecorder):
    """torchrl's KL, the mean of -log(ratio), is 0 by chance now and then, of a stopped batch."""
    kls = itertools.cycle([0.3, 0.0, -0.2, 0.0, 0.0, 0.1])
    loss = Given(lambda weight, _: TensorDict({"loss_any": weight, "kl": torch.tensor(next(kls))}))
    step = TrainingStep(
        loss, torch.optim.SGD(loss.parameters(), lr=0.0), stopper=KLEarlyStopper(0.01)
    )
    for _ in range(60):
        step(TensorDict({}, [4]))
    assert step.stopped
    assert not recwarn.list
