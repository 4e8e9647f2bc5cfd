"""AdaptiveLearningRate in PPOUpdate, on ranks and in torchrl's trainers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from ppokit import (
    AdaptiveKLCoeff,
    AdaptiveLearningRate,
    DualClipPPOLoss,
    KLEarlyStopper,
    PPOUpdate,
    TrainingStep,
)
from ppokit.functional import _checks
from tests.blocks import Given, make_actor, make_critic, make_minibatch, ppo_update
from tests.marks import slow
from tests.ranks import run_on_two_ranks
from tests.schedules.cases import rates as rates_of
from tests.test_state import assert_same_state, flat
from tests.trust_region.test_adaptive_rate import GOOD, HIGH, LOW, NAN, make_optimizer
from tests.trust_region.training import BATCHES, EPOCHS, FRAMES, MINIBATCH, Run, evaluate_at
from tests.update.parts import parameters_of

every_when = pytest.mark.parametrize("when", ["minibatch", "epoch"])

# -- PPOUpdate --------------------------------------------------------------------------


def scripted(
    kls: list[float], *, when: str = "epoch", kl_key: str = "kl", **options: Any
) -> tuple[list[float], dict[str, float]]:
    """Return the rate of each step with these KLs, in thousandths, the last, and statistics."""
    values, rates = map(torch.tensor, kls), []

    def make(weight: torch.Tensor, _: Any) -> TensorDict:
        kl = next(values)
        return TensorDict({"loss_any": weight + 0 * kl, "kl": kl, "other": kl})

    loss = Given(make, "x")
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-3)
    adaptive = AdaptiveLearningRate(optimizer, when=when, factor=2.0, kl_key=kl_key)
    optimizer.register_step_pre_hook(lambda *_: rates.append(rates_of(optimizer)[0]))
    update = ppo_update(loss, optimizer, adaptive_kl=adaptive, minibatch_size=4, **options)
    statistics = update(TensorDict({"x": torch.zeros(8, 1)}, [8]))
    return [1e3 * rate for rate in [*rates, *rates_of(optimizer)]], statistics


def test_in_an_update_it_moves_after_each_step():
    kls = [0.0, HIGH, GOOD, HIGH, LOW, LOW]
    rates, statistics = scripted(kls, when="minibatch", epochs=3)
    assert rates == [1, 1, 0.5, 0.5, 0.25, 0.5, 1]
    assert statistics["lr"] == 1e-3  # as the update began


@pytest.mark.parametrize(
    ("when", "accumulate_grads", "expected"),
    [
        ("epoch", False, [1, 1, 0.5, 0.5, 1, 1, 1]),
        ("epoch", True, [1, 0.5, 1, 1]),
        ("minibatch", True, [1, 0.5, 1, 1]),  # an epoch has one step
    ],
)
def test_in_an_update_it_moves_after_each_epoch(when: str, accumulate_grads: bool, expected: Any):
    kls = [0.0, 0.07, LOW, LOW, GOOD, GOOD]
    rates, _ = scripted(kls, when=when, epochs=3, accumulate_grads=accumulate_grads)
    assert rates == expected


def test_the_minibatch_that_stops_the_update_moves_the_rate():
    """It makes no step: the last number is the rate after the update."""
    rates, statistics = scripted([LOW, 0.05], when="minibatch", stopper=KLEarlyStopper(0.02))
    assert (rates, statistics["stopped"]) == ([1, 1], 1)  # times 2, then divided by 2
    rates, statistics = scripted([LOW, 0.05], when="epoch", stopper=KLEarlyStopper(0.02))
    assert (rates, statistics["stopped"]) == ([1, 0.5], 1)  # the mean is above twice the target
    stopper = KLEarlyStopper(1e-9, when="epoch")
    rates, statistics = scripted([LOW, LOW], when="epoch", stopper=stopper)
    assert (rates, statistics["stopped"]) == ([1, 1, 2], 1)


@every_when
def test_a_skipped_minibatch_does_not_move_the_rate(when: str):
    options: dict[str, Any] = {"when": when, "nonfinite": "skip", "epochs": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates, statistics = scripted([NAN, NAN, NAN, HIGH], **options)
    assert rates == [1, 0.5]
    assert statistics["skipped"] == 3


def test_in_an_update_the_key_is_checked_before_the_first_step():
    rates, _ = scripted([HIGH, GOOD], kl_key="other", epochs=1)
    assert rates == [1, 1, 1]
    with pytest.raises(KeyError, match="'absent'"):
        scripted([HIGH, GOOD], kl_key="absent", epochs=1)


def make_update(compile: Any = False, **options: Any) -> PPOUpdate:
    of_rate = {"when": "minibatch", "target_kl": 2e-3, "bounds": (1e-5, 1.0)}
    of_rate |= {name: options.pop(name) for name in of_rate if name in options}
    loss = DualClipPPOLoss(make_actor(), make_critic(), functional=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    adaptive = AdaptiveLearningRate(optimizer, **of_rate)
    options = {"minibatch_size": 8, "seed": 0, "max_grad_norm": 0.5} | options
    return ppo_update(loss, optimizer, adaptive_kl=adaptive, compile=compile, **options)


def batch(seed: int = 0, actor: Any = None) -> TensorDict:
    return make_minibatch(make_actor() if actor is None else actor, 24, spread=0.0, seed=seed)


def test_other_losses_and_optimizers_raise():
    update = make_update()
    other: Any = make_update().adaptive_kl
    with pytest.raises(ValueError, match="adaptive_kl belongs to another optimizer than the step"):
        PPOUpdate(update.step, adaptive_kl=other)
    wrong: Any = nn.Identity()
    with pytest.raises(TypeError, match="must be a AdaptiveKLCoeff or AdaptiveLearningRate, got"):
        PPOUpdate(update.step, adaptive_kl=wrong)
    loss = DualClipPPOLoss(make_actor(), make_critic(), kl_coeff=0.2)
    with pytest.raises(ValueError, match="adaptive_kl belongs to another loss than the step"):
        PPOUpdate(update.step, adaptive_kl=AdaptiveKLCoeff(loss))


@every_when
@pytest.mark.parametrize("backend", [None, slow("aot_eager")])
def test_a_compiled_update_is_an_eager_one_and_compiles_once(when: str, backend: Any):
    captured, results = [], []
    backend = backend or (lambda graph, _: captured.append(1) or graph)
    for compile in ({"backend": backend}, False):
        update, rates = make_update(compile, when=when), []
        for seed in range(4):
            update(batch(seed, update.step.loss.actor_network))
            rates += rates_of(update.step.optimizer)
        assert not compile or "compiled" in update.step.extra_repr()
        results.append((rates, parameters_of(update.step.loss)))
    (rates, own), (expected_rates, expected) = results
    assert len(captured) == callable(backend)
    assert rates == pytest.approx(expected_rates)
    assert len({round(rate, 9) for rate in rates}) > 2
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("compile", [False, slow({"backend": "eager"})])
@pytest.mark.parametrize("limit", [2e-3, slow(None)])
@every_when
def test_on_a_device_the_rates_are_the_same(when: str, limit: Any, compile: Any, monkeypatch: Any):
    """CPU tensors take the path of a device; there a stop is read after the epoch."""

    def trained(compile: Any) -> tuple[list[float], list[float]]:
        stopper = None if limit is None else KLEarlyStopper(limit)
        update = make_update(compile, when=when, stopper=stopper, nonfinite="skip")
        for group in update.step.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        rates, stops = [], []
        for seed in range(3):
            frames = batch(seed)
            if seed == 1:
                frames["advantage"][3] = NAN
            stops.append(update(frames)["stopped"])
            rates += rates_of(update.step.optimizer)
        return rates, stops

    expected = trained(False)
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    rates, stops = trained(compile)
    assert rates == pytest.approx(expected[0])
    assert stops == expected[1]
    assert (1 in stops) == (limit is not None)
    assert len(set(rates)) > 1


@every_when
def test_a_resumed_update_equals_an_uninterrupted_one(when: str, tmp_path: Path):
    whole, resumed = make_update(when=when), make_update(when=when)
    whole(batch())
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert rates_of(resumed.step.optimizer) == rates_of(whole.step.optimizer) != [1e-2]
    for update in (whole, resumed):
        update(batch(1))
    assert_same_state(flat(whole.state_dict()), flat(resumed.state_dict()))
    assert whole.state_dict()["adaptive_kl"] == {}  # the optimizer's state holds the rate


# -- ranks ------------------------------------------------------------------------------


def on_rank(rank: int) -> dict[str, Any]:
    optimizer = make_optimizer()
    adaptive, rates = AdaptiveLearningRate(optimizer, factor=2.0), []
    values = [((0.0, 0.05), (1.0, 1.0)), ((0.0, 0.05), (9.0, 1.0)), ((NAN, LOW), (0.0, 1.0))]
    for kls, weights in values:  # means 0.025, 0.005 and 0.001
        adaptive.update(kls[rank], weight=weights[rank])
        rates += rates_of(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adaptive.update((NAN, HIGH)[rank])
    assert len(caught) == 1
    update = make_update(when="minibatch", minibatch_size=None, epochs=6)
    share = batch()[16:] if rank else batch()[:16]
    update(share)
    return {
        "rates": [*rates, *rates_of(optimizer)],
        "update": rates_of(update.step.optimizer),
        "parameters": parameters_of(update.step.loss),
        "ranks": dist.get_world_size(),
    }


@pytest.mark.slow
def test_two_ranks_have_the_rates_of_one_process(tmp_path: Path):
    results = run_on_two_ranks(on_rank, tmp_path)
    update = make_update(when="minibatch", minibatch_size=None, epochs=6)
    update(batch())
    for found in results:
        assert found["ranks"] == 2
        assert found["rates"] == [5e-4, 5e-4, 1e-3, 1e-3]
        assert found["update"] == pytest.approx(rates_of(update.step.optimizer))
        torch.testing.assert_close(found["parameters"], parameters_of(update.step.loss))
    assert results[0]["update"] == results[1]["update"] != [1e-2]


# -- torchrl's trainers -----------------------------------------------------------------


def expected_rates(run: Run, target: float, when: str) -> list[float]:
    """Return the rate of each step, by the KLs that the trainer's loss returned."""
    rate, rates, size = 0.1, [], FRAMES // MINIBATCH if when == "epoch" else 1
    for kls, valid in zip(run.kls, run.valid, strict=True):
        for first in range(0, len(kls), size):
            weights = torch.tensor(valid[first : first + size], dtype=torch.float64)
            rates += [rate] * len(weights)
            values = torch.tensor(kls[first : first + size], dtype=torch.float64)
            kl = float((values * weights).sum() / weights.sum())
            factor = 1 / 1.5 if kl > 2 * target else 1.5 if 1e-7 < kl < target / 2 else 1
            rate = min(max(rate * factor, 1e-3), 1.0)
    return rates


def register(run: Run, when: str, target: float = 0.02) -> list[float]:
    """Register an adaptive rate, and return the list of the rates of each step."""
    adaptive = AdaptiveLearningRate(run.optimizer, target_kl=target, when=when, bounds=(1e-3, 1.0))
    adaptive.register(run.trainer)
    rates: list[float] = []
    run.optimizer.register_step_pre_hook(lambda *_: rates.extend(rates_of(run.optimizer)))
    return rates


@every_when
@pytest.mark.parametrize("kind", ["PPOTrainer", "Trainer", "mixed precision", "TrainingStep"])
def test_in_a_trainer_it_moves_after_each_step_or_epoch(kind: str, when: str):
    step = kind == "TrainingStep"
    run = Run(kind="PPOTrainer" if step else kind, masked=True)
    if step:
        TrainingStep(run.loss, run.optimizer).register(run.trainer)
    rates = register(run, when)
    run.train()
    assert rates == pytest.approx(expected_rates(run, 0.02, when))
    assert len(rates) == BATCHES * EPOCHS * FRAMES // MINIBATCH
    assert len(set(rates)) > 2


def test_in_a_trainer_losses_that_no_step_follows_are_ignored():
    run = Run()

    def forget() -> None:
        run.kls[-1].pop()
        run.valid[-1].pop()

    evaluate_at(run, "pre_epoch_log", "post_optim_log", afterwards=forget)
    rates = register(run, "epoch")
    run.train()
    assert rates == pytest.approx(expected_rates(run, 0.02, "epoch"))


@pytest.mark.parametrize("rate_first", [True, False])
def test_in_a_trainer_a_loss_after_a_stopped_epoch_is_ignored(rate_first: bool):
    """The stop ends the second and third epoch after the hook that expects losses."""
    run, stopper = Run(), KLEarlyStopper(1e-9, when="epoch")
    evaluate_at(run, "post_epoch_log")
    if not rate_first:
        stopper.register(run.trainer)
    rates = register(run, "epoch", target=1.0)
    if rate_first:
        stopper.register(run.trainer)
    run.train()
    per_epoch = rates[:: FRAMES // MINIBATCH]
    assert per_epoch == pytest.approx([0.1, 0.15, 0.225])  # once in each batch


@pytest.mark.slow
@every_when
def test_a_compiled_step_in_a_trainer_is_an_eager_one(when: str):
    runs = []
    for compile in ({"backend": "aot_eager"}, False):
        run = Run()
        hooks: Any = run.loss._forward_hooks
        hooks.clear()  # of the record of the run, which a graph cannot run
        step = TrainingStep(run.loss, run.optimizer, compile=compile, stopper=KLEarlyStopper(0.05))
        step.register(run.trainer)
        adaptive = AdaptiveLearningRate(run.optimizer, when=when, bounds=(1e-3, 1.0))
        adaptive.register(run.trainer)
        run.train()
        runs.append((rates_of(run.optimizer), parameters_of(run.loss), step.extra_repr()))
    (rates, own, path), (expected_rates, expected, _) = runs
    assert path.endswith("compiled")
    assert rates == pytest.approx(expected_rates) != pytest.approx([0.1])
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_a_trainer_restores_the_rate_with_its_optimizer(tmp_path: Path):
    run, other = Run(), Run()
    for each in (run, other):
        TrainingStep(each.loss, each.optimizer).register(each.trainer)
        register(each, "minibatch")
    # torchrl's collector has no state once it is shut down.
    save = lambda: torch.save(run.trainer.state_dict(), tmp_path / "trainer.pt")  # noqa: E731
    run.trainer.register_op("post_steps", save)
    run.train()
    other.trainer.load_state_dict(torch.load(tmp_path / "trainer.pt", weights_only=False))
    assert rates_of(other.optimizer) == rates_of(run.optimizer) != [0.1]


def test_trainers_that_do_not_fit_raise():
    run = Run()
    adaptive = AdaptiveLearningRate(Run().optimizer, bounds=(1e-3, 1.0))
    with pytest.raises(ValueError, match="another optimizer than the AdaptiveLearningRate"):
        adaptive.register(run.trainer)
    mixed = Run(kind="mixed precision").trainer
    mixed.optimizer = None  # its stepper has one
    with pytest.raises(ValueError, match="another optimizer than the AdaptiveLearningRate"):
        adaptive.register(mixed)
    adaptive = AdaptiveLearningRate(mixed.optimization_stepper.optimizer, bounds=(1e-3, 1.0))
    adaptive.register(mixed, "by epoch")
    adaptive.when, mixed.optimization_stepper.gradient_accumulation_steps = "minibatch", 2
    with pytest.raises(ValueError, match="accumulated over minibatches, use when='epoch'"):
        adaptive.register(mixed)
    adaptive = AdaptiveLearningRate(run.optimizer, bounds=(1e-3, 1.0))
    adaptive.register(run.trainer)
    with pytest.raises(RuntimeError, match="adaptive_learning_rate is already registered"):
        adaptive.register(run.trainer)
    with pytest.raises(ValueError, match="Register the training step before"):
        TrainingStep(run.loss, run.optimizer).register(run.trainer)
