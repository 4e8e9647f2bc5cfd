"""Attributes with a range: a value that the constructor rejects raises wherever it is set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    AdaptiveLearningRate,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    LSTMModule,
    ObservationNormalizer,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    StepSchedule,
    TensorActor,
    TrainingStep,
    diagnose,
    evaluate,
)
from ppokit.functional import _checks
from ppokit.networks import actor_critic
from ppokit.plotting import record_episode
from tests.blocks import make_actor, make_critic, make_minibatch
from tests.update.parts import make_batch, make_loss, parameters_of

NAN, INF = math.nan, math.inf


def make_step(**options: Any) -> TrainingStep:
    loss = make_loss(entropy_coeff=0.1, critic_coeff=1.0)
    return TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), **options)


def make_update(**options: Any) -> PPOUpdate:
    step = make_step()
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=step.loss.critic_network)
    return PPOUpdate(step, advantage=gae, seed=0, **options)


def make_rate(**options: Any) -> AdaptiveLearningRate:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return AdaptiveLearningRate(optimizer, **options)


def make_coefficient(**options: Any) -> AdaptiveKLCoeff:
    return AdaptiveKLCoeff(make_loss(kl_coeff=0.2), **options)


def make_collector(**options: Any) -> GymCollector:
    actor = make_actor("categorical")
    return GymCollector("CartPole-v1", actor, **{"frames_per_batch": 8} | options)


# the block, the attribute, a good value, and values that the constructor rejects
RANGES: list[tuple[Callable[..., Any], str, Any, list[Any]]] = [
    (make_step, "max_grad_norm", 0.5, [0.0, -0.5, NAN, "0.5"]),
    (make_step, "nonfinite", "skip", ["foo"]),
    (make_step, "amp_dtype", torch.bfloat16, [torch.float64, "bfloat16"]),
    (lambda **o: GAE(gamma=1, lmbda=1, value_network=None, **o), "shifted", True, ["foo", 2]),
    (make_update, "epochs", 3, [0, -1, 2.5, NAN, None, True]),
    (make_update, "minibatch_size", 4, [0, -3, 1.5]),
    (make_update, "accumulate_grads", True, ["no", 2, None]),
    (make_update, "recompute_advantage", True, ["no", None]),
    (partial := (lambda **o: RewardNormalizer(**o)), "clip", 5.0, [-5.0, 0.0, NAN]),
    (partial, "gamma", 0.9, [-0.1, 1.1, NAN]),
    (partial, "epsilon", 0.1, [-1.0, NAN]),
    (partial, "statistics", "batch", ["sliding"]),
    (partial, "nonfinite", "ignore", ["foo", None]),
    (lambda **o: KLEarlyStopper(**{"target_kl": 1} | o), "target_kl", 0.1, [-1.0, 0.0, NAN]),
    (lambda **o: KLEarlyStopper(1.0, **o), "tolerance", 1.0, [-1.0, 0.0, NAN]),
    (lambda **o: KLEarlyStopper(1.0, **o), "when", "epoch", ["foo", None]),
    (lambda **o: KLEarlyStopper(1.0, **o), "check_every", 3, [0, 1.5]),
    (make_coefficient, "target_kl", 0.1, [0.0, INF, NAN]),
    (make_coefficient, "increase", 2.0, [1.0, INF, NAN]),
    (make_coefficient, "decrease", 0.9, [0.0, 1.0, NAN]),
    (make_rate, "target_kl", 0.1, [0.0, INF, NAN]),
    (make_rate, "factor", 2.0, [1.0, INF, NAN]),
    (make_rate, "bounds", (1e-4, 1e-2), [(0.0, 1.0), (1.0, 0.1), (NAN, 1.0)]),
    (make_rate, "when", "minibatch", ["foo"]),
    (lambda **o: SequenceBatcher(**{"seq_len": 4} | o), "seq_len", 8, [0, -1, 2.5]),
    (lambda **o: SequenceBatcher(4, **o), "burn_in", 2, [-1, 0.5, None]),
    (make_collector, "frames_per_batch", 16, [0, -8, 2.5]),
    (make_collector, "total_frames", 64, [0, -2, 1.5]),
    (make_collector, "trajs_per_batch", 2, [0, -1, 1.5]),
    (make_loss, "reduction", "sum", ["foo"]),
    (make_loss, "loss_critic_type", "l2", ["huber"]),
    (make_loss, "samples_mc_entropy", 4, [0, -1, 0.5]),
    (lambda **o: ObservationNormalizer(2, **o), "clip", 5.0, [0.0, -1.0, NAN]),
    (lambda **o: ObservationNormalizer(2, **o), "epsilon", 1e-3, [0.0, -1.0, NAN, INF]),
]


@pytest.mark.parametrize(("make", "name", "good", "bad"), RANGES, ids=lambda x: str(x)[:20])
def test_the_constructor_and_an_assignment_reject_the_same(
    make: Callable[..., Any], name: str, good: Any, bad: list[Any]
):
    block = make()
    setattr(block, name, good)
    for value in bad:
        with pytest.raises((ValueError, TypeError), match=name) as at_construction:
            make(**{name: value})
        with pytest.raises((ValueError, TypeError), match=name) as at_assignment:
            setattr(block, name, value)
        assert str(at_assignment.value) == str(at_construction.value)
        assert getattr(block, name) == good


def test_a_schedule_of_a_value_that_the_constructor_rejects_raises_before_anything_is_written():
    step = make_step(max_grad_norm=1.0)
    falling = InterpSchedule([(0, 0.5), (100, -0.5)])
    with pytest.raises(ValueError, match=r"max_grad_norm must be positive or None, got -0\.5"):
        ParameterScheduler({"max_grad_norm": (step, falling)})
    assert step.max_grad_norm == 1.0
    other: Any = make_update()
    late = lambda frames: 0.5 if frames < 50 else -0.5  # noqa: E731  # has no points to look at
    schedules = {"max_grad_norm": (step, late), "lr": (other.step.optimizer, lambda n: 1 / (1 + n))}
    scheduler = ParameterScheduler(schedules)
    with pytest.raises(ValueError, match=r"max_grad_norm must be positive or None, got -0\.5"):
        scheduler.step(60)
    assert (step.max_grad_norm, other.step.optimizer.param_groups[0]["lr"]) == (0.5, 1.0)
    assert scheduler.frames == 0


@pytest.mark.parametrize("name", ["epochs", "minibatch_size"])
def test_a_schedule_of_whole_numbers_is_stored_as_such(name: str):
    update = make_update(minibatch_size=6)
    scheduler = ParameterScheduler({name: (update, StepSchedule([(0, 3), (10, 2)]))})
    assert type(getattr(update, name)) is int
    found = [update(make_batch(number=0))]
    scheduler.step(10)
    found.append(update(make_batch(number=1)))
    frames = make_batch().numel()
    expected = [(3, 2), (2, 2)] if name == "epochs" else [(4, frames // 3), (4, frames // 2)]
    assert [(x["epochs"], x["minibatches"] / x["epochs"]) for x in found] == expected
    with pytest.raises(ValueError, match=rf"{name} must be a whole number .* got 2\.5"):
        ParameterScheduler({name: (update, InterpSchedule([(0, 3.0), (1, 2.5)]))})


# -- numbers that no attribute guards -------------------------------------------------------


def fill(name: str, value: float) -> Callable[[Any], None]:
    return lambda step: getattr(step.loss, name).fill_(value)


def in_group(name: str, value: Any) -> Callable[[Any], None]:
    return lambda step: step.optimizer.param_groups[0].update({name: value})


UNGUARDED: list[tuple[Callable[[Any], None], str]] = [
    (in_group("lr", -0.01), r"'lr', in a parameter group.*got -0\.01"),
    (in_group("lr", NAN), "'lr', in a parameter group.*got nan"),
    (in_group("lr", INF), "'lr', in a parameter group.*got inf"),
    (in_group("lr", torch.tensor(-0.01)), r"'lr', in a parameter group.*got .*-0\.01"),
    (in_group("lr", None), "'lr', in a parameter group.*got None"),
    (in_group("lr", torch.ones(2)), "'lr', in a parameter group.*got tensor"),
    (in_group("lr", "1"), "'lr', in a parameter group.*got '1'"),
    (in_group("weight_decay", -0.1), r"'weight_decay'.*got -0\.1"),
    (in_group("momentum", NAN), "'momentum'.*got nan"),
    (in_group("betas", (0.9, 2.0)), r"'betas'.*\[0, 1\), got 2\.0"),
    (in_group("alpha", NAN), "'alpha'.*got nan"),
    (in_group("rho", 2.0), r"'rho'.*\[0, 1\], got 2\.0"),
    (in_group("dampening", NAN), "'dampening'.*got nan"),
    (in_group("momentum_decay", -1.0), "'momentum_decay'.*got -1"),
    (in_group("lr_decay", NAN), "'lr_decay'.*got nan"),
    (in_group("etas", (-0.5, 1.2)), r"'etas'.*got -0\.5"),
    (fill("clip_epsilon", -0.1), "clip_epsilon .* must lie in"),
    (fill("entropy_coeff", -0.1), "entropy_coeff must lie in"),
    (fill("critic_coeff", NAN), "critic_coeff must lie in"),
    (lambda step: setattr(step, "amp_dtype", torch.float16), "build another TrainingStep"),
]


@pytest.mark.parametrize(("change", "message"), UNGUARDED)
@pytest.mark.parametrize("whole", [False, True], ids=["step", "update"])
def test_a_number_set_in_place_raises_in_the_next_call(
    whole: bool, change: Callable[[Any], None], message: str
):
    update = make_update()
    before, batch = parameters_of(update.step.loss), make_batch()
    change(update.step)
    with pytest.raises(ValueError, match=message):
        update(batch) if whole else update.step(make_minibatch(make_actor(), 8))
    assert torch.equal(parameters_of(update.step.loss), before)
    assert "advantage" not in batch.keys()
    with pytest.raises(ValueError, match=message):
        update.validate(batch)


@pytest.mark.parametrize("name", ["gamma", "lmbda"])
@pytest.mark.parametrize("value", [2.0, NAN])
def test_a_discount_set_in_place_raises_before_the_update(name: str, value: float):
    normalizer = RewardNormalizer(0.9)
    update = make_update(reward_normalizer=normalizer)
    gae: Any = update.advantage
    kept = getattr(gae, name).clone()
    for change in (
        lambda: getattr(gae, name).fill_(value),
        lambda: setattr(gae, name, torch.tensor(value)),
    ):
        batch = make_batch()
        change()
        with pytest.raises(ValueError, match=f"{name} must lie in"):
            update(batch)
        with pytest.raises(RuntimeError, match="must lie in"):  # nor can it be restored
            gae.load_state_dict({**gae.state_dict(), "gamma": torch.tensor(-1.0)})
        assert ("next", "raw_reward") not in batch.keys(True)
        assert normalizer.count == 0
        setattr(gae, name, kept.clone())
    assert update(make_batch())["steps"] > 0


@pytest.mark.parametrize("change", [in_group("lr", torch.tensor(NAN)), fill("critic_coeff", -1.0)])
def test_a_number_on_a_device_raises_with_the_next_deferred_read(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
):
    step = make_step()
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    step(make_minibatch(make_actor(), 8))
    step.reset()
    change(step)
    step(make_minibatch(make_actor(), 8))
    with pytest.raises(ValueError, match=r"critic_coeff|'lr', in"):
        step.reset()


def test_max_grad_norm_below_0_would_be_gradient_ascent():
    """With a factor of -0.5 / norm each step went uphill, and nothing raised."""
    step, minibatch = make_step(max_grad_norm=0.5), make_minibatch(make_actor(), 16, spread=0.0)
    step.__dict__["max_grad_norm"] = -0.5  # past every check: what it was like
    losses = [float(step(minibatch)["loss_critic"]) for _ in range(30)]
    assert losses[-1] > 2 * losses[0]


@pytest.mark.parametrize("value", [0.0, 0, -1.0, NAN])
def test_a_width_of_0_is_no_way_to_turn_a_clip_off(value: float):
    for name in ("clip_value", "max_importance_ratio"):
        with pytest.raises(ValueError, match=rf"{name} must be positive, got .*None turns it off"):
            DualClipPPOLoss(make_actor(), make_critic(), **{name: value})
    assert DualClipPPOLoss(make_actor(), make_critic(), clip_value=False).clip_value is None
    loss = make_loss(clip_value=0.2)
    with pytest.raises(ValueError, match="clip_value must be positive"):
        loss.clip_value = value
    assert loss.clip_value == torch.tensor(0.2)


@pytest.mark.parametrize("name", ["clip_epsilon", "entropy_coeff"])
def test_a_coefficient_that_a_loss_always_reads_cannot_become_none(name: str):
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        setattr(make_loss(entropy_coeff=0.1), name, None)


@pytest.mark.parametrize("value", ["x", np.float32(2), [1]])
def test_a_term_that_is_absent_cannot_be_set_by_another_kind_of_number(value: Any):
    with pytest.raises(AttributeError, match="its term is absent"):
        make_loss().max_importance_ratio = value


@pytest.mark.parametrize("value", [torch.zeros(2), 0.1, [1]], ids=str)
@pytest.mark.parametrize(("block", "name"), [(make_rate(), "bounds"), (make_step(), "nonfinite")])
def test_a_value_of_another_kind_names_the_attribute(block: Any, name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name} must be"):
        setattr(block, name, value)


def test_numbers_of_numpy_are_numbers():
    normalizer = RewardNormalizer(np.float32(0.5), clip=np.array(0.25))
    assert (normalizer.gamma, normalizer.clip) == (0.5, 0.25)
    assert {type(normalizer.gamma), type(normalizer.clip)} == {float}
    step = make_step()
    step.optimizer.param_groups[0]["lr"] = torch.tensor([0.1])
    assert step(make_minibatch(make_actor(), 8))["stepped"]


@pytest.mark.parametrize(("name", "value"), [("beta2_decay", math.nan), ("d", 0.5)])
def test_numbers_that_adafactor_rejects_raise(name: str, value: float):
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.Adafactor(loss.parameters()))
    step.optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        step(make_minibatch(make_actor(), 8))


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_numbers_that_an_optimizer_accepts_pass(rho: float):
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.Adadelta(loss.parameters(), rho=rho))
    assert step(make_minibatch(make_actor(), 8))["stepped"]
    step = TrainingStep(loss, torch.optim.Adafactor(loss.parameters()))  # eps=(None, 1e-3)
    assert step(make_minibatch(make_actor(), 8))["stepped"]


# -- one value, two writers in one update ---------------------------------------------------


def test_an_update_rejects_a_scheduler_and_an_adaptive_block_of_one_value():
    loss = make_loss(kl_coeff=0.2)
    optimizer = torch.optim.SGD([{"params": loss.parameters(), "name": "all"}], lr=1e-3)
    line = InterpSchedule([(0, 1e-3), (100, 1e-4)])
    coefficient, rate = AdaptiveKLCoeff(loss), AdaptiveLearningRate(optimizer)
    step = TrainingStep(loss, optimizer)
    for block, schedules in (
        (coefficient, {"kl_coeff": (loss, line)}),
        (rate, {"lr": (optimizer, line)}),
        (rate, {("lr", "all"): (optimizer, line)}),
    ):
        with pytest.raises(ValueError, match=r"adaptive_kl and the scheduler both drive '(lr|kl_)"):
            PPOUpdate(step, adaptive_kl=block, scheduler=ParameterScheduler(schedules))
    others: Any = {"target_kl": (rate, line), "clip_epsilon": (loss, line)}
    PPOUpdate(step, adaptive_kl=rate, scheduler=ParameterScheduler(others))


def test_a_dictionary_in_place_of_a_batch_is_named():
    step, update = make_step(), make_update()
    blocks = {
        "TrainingStep": step,
        "PPOUpdate": update,
        "GAE": update.advantage,
        "DualClipPPOLoss": step.loss,
        "RewardNormalizer": RewardNormalizer(),
        "SequenceBatcher": SequenceBatcher(4),
        "KLEarlyStopper": KLEarlyStopper(0.1).forward,
        "ParameterScheduler": ParameterScheduler({}),
        "ObservationNormalizer": ObservationNormalizer(4).update,
        "TensorActor": TensorActor(make_actor()),
        "LSTMModule": LSTMModule(4, 8, in_key="observation", out_key="embed"),
    }
    for name, block in blocks.items():
        with pytest.raises(TypeError, match=rf"{name} needs a TensorDict, got dict: .*batch_size="):
            block({"observation": torch.zeros(2, 4)})
    assert isinstance(step.loss(make_minibatch(make_actor(), 4)), TensorDict)


@pytest.mark.parametrize("value", [torch.tensor([0.1, 0.3]), torch.ones(0), [0.1, 0.3]])
def test_a_clip_is_one_number(value: Any):
    """Two numbers would broadcast against the frames, silently."""
    names = ["clip_value", "dual_clip", "critic_loss_clip"]
    names += ["clip_epsilon"] * isinstance(value, torch.Tensor)
    for name in names:
        with pytest.raises(ValueError, match=f"{name} must be one number"):
            make_loss(**{name: value})
    loss = make_loss(clip_value=0.2, dual_clip=3.0, critic_loss_clip=1.0)
    for name in [*names, "clip_epsilon"]:
        before = getattr(loss, name).clone()
        with pytest.raises(ValueError, match=f"{name} must be one number"):
            setattr(loss, name, value)
        assert torch.equal(getattr(loss, name), before)


@pytest.mark.parametrize("schedules", [False, True])
def test_a_clip_of_observations_that_is_set_later_is_used(schedules: bool):
    normalizer = ObservationNormalizer(1, clip=10.0)
    normalizer.update(TensorDict({"observation": torch.tensor([[-1.0], [1.0]])}, [2]))
    if schedules:
        schedule = InterpSchedule([(0, 10.0), (100, 2.0)])
        ParameterScheduler({"clip": (normalizer, schedule)}).step(100)
    else:
        normalizer.clip = 2.0
    found = normalizer(TensorDict({"observation": torch.tensor([[50.0]])}, [1]))
    assert found["observation"].item() == 2.0


@pytest.mark.parametrize("value", [0.2, torch.tensor(0.2)])
def test_a_clip_of_two_numbers_is_set_by_both(value: Any):
    loss = make_loss(clip_epsilon=(0.1, 0.3))
    with pytest.raises(AttributeError, match="clip_epsilon_low and clip_epsilon_high"):
        loss.clip_epsilon = value
    loss.clip_epsilon_low = value


@pytest.mark.parametrize("seed", [-1, 2**70, 0.5, "a"])
def test_seeds_that_are_none_raise(seed: Any):
    actor, _ = actor_critic("CartPole-v1")
    with pytest.raises(ValueError, match="seed must be a whole number from 0"):
        evaluate("CartPole-v1", actor, episodes=1, seed=seed)
    with pytest.raises(ValueError, match="seed must be a whole number from 0"):
        record_episode("CartPole-v1", actor, seed=seed)


@pytest.mark.parametrize("frames", [math.nan, math.inf])
def test_frames_of_a_scheduler_are_finite(frames: Any):
    step = make_step()
    scheduler = ParameterScheduler({"lr": (step.optimizer, StepSchedule([(0, 0.1)]))})
    with pytest.raises(ValueError, match="a whole number, got"):
        scheduler.step(frames)


@pytest.mark.parametrize("weight", [-1, math.nan, [64.0, -1.0], torch.tensor([1.0, math.nan])])
def test_weights_of_a_kl_are_at_least_0(weight: Any):
    kl = torch.zeros(()) if isinstance(weight, int | float) else torch.zeros(2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    for block in (KLEarlyStopper(0.1), AdaptiveLearningRate(optimizer)):
        with pytest.raises(ValueError, match="none below 0"):
            block.update(kl, weight=weight)
    assert not KLEarlyStopper(0.1).update(torch.tensor([0.0, 0.2]), weight=[1.0, 1.0])


def test_spaces_without_entries_are_named():
    for pair in itertools.permutations((spaces.Dict(), spaces.Discrete(2))):
        with pytest.raises(ValueError, match=r"The space of \w+ is empty"):
            actor_critic(pair)


@pytest.mark.parametrize("last", [math.nan, 5.5, math.inf, None, 4])
def test_the_updates_that_diagnose_reads_are_a_whole_number(last: Any):
    with pytest.raises(ValueError, match="last must be a whole number of at least 5"):
        diagnose([{"frames": 1.0}] * 9, last=last)
