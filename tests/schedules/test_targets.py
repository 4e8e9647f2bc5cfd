"""What a schedule drives, and that what is driven takes notice."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TORCHRL_GAE

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    StepSchedule,
)
from tests.blocks import loss_on_path, make_actor, make_critic, make_minibatch

END = 100
LOSSES: dict[str, Any] = {
    "fast": DualClipPPOLoss,
    "not fast": lambda *a, **k: loss_on_path(*a, fast=False, **k),
    "torchrl's": ClipPPOLoss,
}
OURS = [kind for kind in LOSSES if kind != "torchrl's"]
# name: (what the loss is built with, the first value, the last value)
COEFFICIENTS: dict[str, tuple[dict[str, Any], float, float]] = {
    "clip_epsilon": ({}, 0.4, 0.05),
    "clip_epsilon_low": ({"clip_epsilon": (0.1, 0.3)}, 0.4, 0.05),
    "clip_epsilon_high": ({"clip_epsilon": (0.1, 0.3)}, 0.4, 0.05),
    "clip_value": ({"clip_value": 0.9}, 1.0, 0.1),
    "critic_coeff": ({"critic_coeff": 1.0}, 0.5, 2.0),
    "entropy_coeff": ({"entropy_coeff": 1.0}, 0.5, 0.0),
    "max_importance_ratio": ({"max_importance_ratio": 3.0}, 4.0, 1.5),
    "dual_clip": ({"dual_clip": 9.0}, 4.0, 1.5),
    "critic_loss_clip": ({"critic_loss_clip": 9.0}, 4.0, 0.1),
    "kl_coeff": ({"kl_coeff": 1.0}, 0.5, 0.0),
}
EVERYWHERE = [name for name in COEFFICIENTS if name not in ("dual_clip", "kl_coeff")]
EVERYWHERE.remove("critic_loss_clip")
CASES = [(kind, name) for kind in OURS for name in COEFFICIENTS]
CASES += [("torchrl's", name) for name in EVERYWHERE]


def build(kind: str, **options: Any) -> Any:
    return LOSSES[kind](make_actor(), make_critic(), **options)


def losses_and_gradients(loss: Any, batch: TensorDict) -> tuple[dict[str, Any], list[Any]]:
    torch.manual_seed(0)
    losses = loss(batch.clone())
    total = sum(value for key, value in losses.items() if key.startswith("loss_"))
    gradients = torch.autograd.grad(total, list(loss.parameters()), allow_unused=True)
    return losses.detach().to_dict(), list(gradients)


def assert_same_loss(one: Any, other: Any) -> None:
    """Bit for bit, on a minibatch far from the actor's own, so that everything is clipped."""
    batch = make_minibatch(make_actor(), 32, spread=1.0)
    torch.testing.assert_close(
        losses_and_gradients(one, batch), losses_and_gradients(other, batch), rtol=0, atol=0
    )


def built_with(name: str, value: float, options: dict[str, Any]) -> dict[str, Any]:
    if name in ("clip_epsilon_low", "clip_epsilon_high"):
        low, high = options["clip_epsilon"]
        return {"clip_epsilon": (value, high) if name.endswith("low") else (low, value)}
    return options | {name: value}


# -- losses --------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_scheduled_loss_is_the_loss_built_with_that_value(kind: str, name: str):
    options, first, last = COEFFICIENTS[name]
    loss = build(kind, **options)
    loss(make_minibatch(make_actor(), 8))  # whatever a loss may remember of its first call
    buffer = getattr(loss, name)
    schedule = InterpSchedule.linear(first, last, frames=END)
    scheduler = ParameterScheduler({name: (loss, schedule)})
    for frames in (0, END // 2, END - 1):
        scheduler.step(frames)
        assert getattr(loss, name) is buffer
        torch.testing.assert_close(
            loss.state_dict()[name], torch.tensor(schedule(frames)), rtol=0, atol=0
        )
        assert_same_loss(loss, build(kind, **built_with(name, schedule(frames), options)))


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("name", ["entropy_coeff", "kl_coeff", "critic_coeff", "clip_epsilon"])
def test_down_to_zero(kind: str, name: str):
    """A coefficient of 0 masks its term, which is then 0 and not absent."""
    options, first, _ = COEFFICIENTS[name]
    loss = build(kind, **options)
    schedule = InterpSchedule.linear(first, 0.0, frames=END)
    ParameterScheduler({name: (loss, schedule)}).step(END)
    losses, gradients = losses_and_gradients(loss, make_minibatch(make_actor(), 32))
    assert getattr(loss, name).item() == 0
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)
    term = {"entropy_coeff": "entropy", "kl_coeff": "kl", "critic_coeff": "critic"}.get(name)
    assert term is None or losses[f"loss_{term}"] == 0


@pytest.mark.parametrize("name", ["critic_coeff", "clip_epsilon", "entropy_coeff", "dual_clip"])
def test_a_coefficient_given_as_an_int_takes_any_number(name: str):
    more = float(name == "dual_clip")
    loss = build("fast", **{name: 1 + int(more)})
    ParameterScheduler({name: (loss, StepSchedule([(0, 0.75 + more)]))})
    assert getattr(loss, name).item() == 0.75 + more
    setattr(loss, name, 0.25 + more)
    assert getattr(loss, name).item() == 0.25 + more


def test_of_torchrls_loss_it_would_be_cut_to_an_int():
    with pytest.raises(TypeError, match=r"'critic_coeff' of this ClipPPOLoss .* torch\.int64"):
        ParameterScheduler({"critic_coeff": (build("torchrl's", critic_coeff=1), lambda _: 0.5)})


# -- clip_value=True -------------------------------------------------------------


def through_a_file(loss: Any) -> Any:
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def reloaded(loss: Any, **options: Any) -> Any:
    other = build("fast", clip_value=True, clip_epsilon=0.9)
    other.load_state_dict(copy.deepcopy(loss.state_dict()), **options)
    return other


COPIES: dict[str, Any] = {
    "itself": lambda loss: loss,
    "deepcopy": copy.deepcopy,
    "pickle": through_a_file,
    "to": lambda loss: loss.to(torch.float64).to(torch.float32),
    "state": reloaded,
    "state, assigned": lambda loss: reloaded(loss, assign=True),
}


@pytest.mark.parametrize("kind", OURS)
def test_clip_value_follows_a_scheduled_clip_epsilon(kind: str):
    loss = build(kind, clip_value=True)
    scheduler = ParameterScheduler(
        {"clip_epsilon": (loss, InterpSchedule.linear(0.4, 0.1, frames=END))}
    )
    for frames in (0, 60):
        scheduler.step(frames)
        value = scheduler.values["clip_epsilon"]
        assert_same_loss(loss, build(kind, clip_epsilon=value, clip_value=value))


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES.keys())
def test_clip_value_goes_on_following(copier: Any):
    loss = copier(build("fast", clip_value=True, clip_epsilon=0.3))
    assert loss.clip_value.item() == pytest.approx(0.3)
    ParameterScheduler({"clip_epsilon": (loss, lambda _: 0.125)})
    assert loss.clip_value.item() == 0.125
    loss.clip_epsilon = 0.25
    assert loss.clip_value.item() == 0.25
    loss.clip_epsilon = torch.tensor(0.5)  # another buffer
    loss.clip_epsilon = 0.75
    assert loss.clip_value.item() == 0.75
    assert set(loss.state_dict()) >= {"clip_epsilon", "clip_value"}


def test_a_clip_value_of_its_own_does_not_follow():
    loss = build("fast", clip_value=0.2, clip_epsilon=0.2)
    loss.clip_epsilon = 0.1
    assert loss.clip_value.item() == pytest.approx(0.2)
    loss.clip_value = 0.3
    assert loss.clip_epsilon.item() == pytest.approx(0.1)


def test_a_clip_value_that_follows_has_no_schedule_of_its_own():
    loss = build("fast", clip_value=True)
    for schedules in ({"clip_value"}, {"clip_value", "clip_epsilon"}):
        with pytest.raises(ValueError, match=r"clip_value of this DualClipPPOLoss follows clip_ep"):
            ParameterScheduler({name: (loss, lambda _: 0.1) for name in schedules})
    with pytest.raises(AttributeError, match=r"clip_value follows clip_epsilon here"):
        loss.clip_value = 0.1


def test_torchrls_clip_value_does_not_follow_so_both_are_scheduled():
    loss = build("torchrl's", clip_value=True)
    ParameterScheduler({"clip_epsilon": (loss, lambda _: 0.125)})
    assert loss.clip_value.item() == pytest.approx(0.2)
    schedules = {name: (loss, lambda _: 0.25) for name in ("clip_epsilon", "clip_value")}
    ParameterScheduler(schedules)
    assert_same_loss(loss, build("torchrl's", clip_epsilon=0.25, clip_value=0.25))


# -- names that mean nothing -----------------------------------------------------


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clip_eps", {}, r"\.clip_eps is missing, .* no effect.* It has clip_epsilon, critic_co"),
        ("clip_epsilon", {"clip_epsilon": (0.1, 0.3)}, r"missing.* It has clip_epsilon_high, clip"),
        ("clip_epsilon_low", {}, r"PPOLoss\.clip_epsilon_low is missing"),
        ("clip_value", {}, r"PPOLoss\.clip_value is None: the loss was built without it"),
        ("critic_coeff", {"critic_coeff": 0.0}, r"critic_coeff is .* built without"),
        ("entropy_coeff", {"entropy_bonus": False}, r"entropy_coeff is of no use: .* without"),
        ("dual_clip", {}, r"PPOLoss\.dual_clip is (None|missing)"),
    ],
)
def test_a_name_that_has_no_effect_on_a_loss(kind, name, options, message):
    with pytest.raises(AttributeError, match=message):
        ParameterScheduler({name: (build(kind, **options), lambda _: 0.5)})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("forward", "method"), ("separate_losses", "bool"), ("loss_critic_type", "str")],
)
def test_what_is_no_number_is_not_overwritten(name: str, kind: str):
    loss = build("fast")
    with pytest.raises(TypeError, match=f"'{name}' of this DualClipPPOLoss is a {kind}, and a sch"):
        ParameterScheduler({name: (loss, lambda _: 0.5)})
    losses_and_gradients(loss, make_minibatch(make_actor(), 8))


def test_all_heads_at_once_beside_one_of_them():
    heads = {"move": 0.1, "turn": 0.2}
    loss = DualClipPPOLoss(make_actor(), make_critic(), entropy_coeff=heads)
    with pytest.raises(ValueError, match=r"one entropy coefficient for each head, \['move', 'tu"):
        ParameterScheduler({"head_entropy_coeff": (loss, lambda _: 0.5)})


# -- the other blocks ------------------------------------------------------------


def rollout() -> TensorDict:
    torch.manual_seed(0)
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    done[0, 3] = True
    entries = {"done": done, "terminated": done, "reward": torch.randn(2, 6, 1)}
    batch = TensorDict({"observation": torch.randn(2, 6, 4)}, [2, 6], names=[None, "time"])
    batch["next"] = TensorDict(entries | {"observation": torch.randn(2, 6, 4)}, [2, 6])
    return batch


@pytest.mark.parametrize("gae_class", [GAE, TORCHRL_GAE])
@pytest.mark.parametrize("name", ["gamma", "lmbda"])
def test_the_discounts_of_gae(gae_class: Any, name: str):
    fixed: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "value_network": make_critic()}
    gae = gae_class(**fixed)
    gae(rollout())
    scheduler = ParameterScheduler({name: (gae, InterpSchedule.linear(0.5, 0.99, frames=END))})
    for frames in (0, 30, END):
        scheduler.step(frames)
        expected = gae_class(**fixed | {name: scheduler.values[name]})(rollout())
        assert torch.equal(gae(rollout())["advantage"], expected["advantage"])


def test_the_target_of_a_stopper():
    stopper = KLEarlyStopper(1.0, tolerance=1.0)
    scheduler = ParameterScheduler({"target_kl": (stopper, StepSchedule([(0, 0.02), (10, 0.01)]))})
    assert not stopper.update(0.015)
    scheduler.step(10)
    assert stopper.update(0.015)


def test_the_target_of_an_adaptive_coefficient():
    loss = build("fast", kl_coeff=1.0)
    adaptive = AdaptiveKLCoeff(loss, target_kl=1.0)
    scheduler = ParameterScheduler({"target_kl": (adaptive, StepSchedule([(0, 0.1), (10, 0.01)]))})
    assert adaptive.update(0.1) == 1.0
    scheduler.step(10)
    assert adaptive.update(0.1) == 1.5


def test_a_parameter_of_several_elements():
    """Such as the log of a standard deviation that does not depend on the state."""
    module = nn.Module()
    module.log_std = nn.Parameter(torch.zeros(3))
    ParameterScheduler({"log_std": (module, InterpSchedule.linear(0.0, -2.0, frames=END))}).step(50)
    assert module.log_std.tolist() == [-1.0] * 3
