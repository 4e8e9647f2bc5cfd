"""Errors of the loss: shapes that would broadcast, missing entries, arguments out of range."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate

from ppokit import DualClipPPOLoss, InterpSchedule, ParameterScheduler
from tests.blocks import make_actor as make_simple_actor
from tests.blocks import make_critic
from tests.objectives.common import make_actor, make_minibatch


def build(kind: str = "normal", **options: Any) -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(kind), make_critic(), **options)


LOG_PROB = r"'action_log_prob' has shape \[\d, 1\].*squeeze"


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        *((kind, "action_log_prob", LOG_PROB) for kind in ("normal", "tanh-normal", "categorical")),
        ("categorical", "action", r"'action' has shape \[5, 1\].*have \[5\].*squeeze"),
    ],
)
def test_a_trailing_dimension(kind: str, key: str, message: str):
    loss = build(kind)
    batch = make_minibatch(loss.actor_network, 5)
    batch[key] = batch[key].unsqueeze(-1)
    with pytest.raises(ValueError, match=message):
        loss(batch)


@pytest.mark.parametrize("frames", [2, 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_one_hot_actions_of_a_policy_that_draws_indices(frames: int, dtype: torch.dtype):
    loss = build("categorical")
    batch = make_minibatch(loss.actor_network, frames)
    batch["action"] = torch.nn.functional.one_hot(batch["action"].long() % 2, 2).to(dtype)
    words = rf"'action' has shape \[{frames}, 2\].*have \[{frames}\].*categorical_action_encoding"
    with pytest.raises(ValueError, match=words):
        loss(batch)


@pytest.mark.parametrize("kind", ["normal", "tanh-normal"])
@pytest.mark.parametrize("key", ["action", "scale"])
def test_an_entry_with_one_number_for_several(kind: str, key: str):
    """torch would broadcast it, and the loss be that of other actions."""
    loss = build(kind, kl_coeff=0.1)
    batch = make_minibatch(loss.actor_network, 5)
    batch[key] = batch[key][..., :1]
    with pytest.raises(ValueError, match=rf"'{key}' has shape \[5, 1\].*would broadcast"):
        loss(batch)


def without(*keys: Any) -> Any:
    return lambda batch: batch.exclude(*keys)


def flat(key: str) -> Any:
    return lambda batch: batch.set(key, batch[key].squeeze(-1))


def numbers(*key: str) -> Any:
    return lambda batch: batch.set(key, torch.ones(5))


def grown(batch: TensorDict) -> TensorDict:
    return batch.set("action_log_prob", batch["action_log_prob"].clone().requires_grad_())


BATCHES: list[tuple[Any, type[Exception], str]] = [
    (without("action_log_prob"), KeyError, "'action_log_prob' is not in the batch"),
    (without("action"), KeyError, "'action' is not in the batch"),
    (without("value_target"), KeyError, "'value_target' is not in the batch"),
    (without("state_value"), KeyError, "clip_value needs the value at collection"),
    (without("advantage"), KeyError, "'advantage' is not in the batch.*Call GAE"),
    (flat("advantage"), ValueError, r"'advantage' has shape \[5\].*unsqueeze"),
    (flat("value_target"), ValueError, r"value_target.*\[5\].*\[5, 1\]"),
    (lambda batch: batch[:0], ValueError, r"The minibatch is empty: \[0\]"),
    (numbers("collector", "mask"), TypeError, r"'collector', 'mask'.* has dtype .*torch\.bool"),
    (numbers("sequence", "burn_in"), ValueError, r"frames of burn-in.*batcher\.refresh"),
    (grown, ValueError, r"'action_log_prob' of the batch requires a gradient; detach"),
]


@pytest.mark.parametrize(("change", "error", "message"), BATCHES)
def test_batches(change: Any, error: type[Exception], message: str):
    loss = build(clip_value=0.2)
    with pytest.raises(error, match=message):
        loss(change(make_minibatch(loss.actor_network, 5)))


def test_an_advantage_is_not_estimated_on_frames_that_may_be_shuffled():
    """Here GAE was forgotten; torchrl's default estimator would take the frames for a row."""
    loss = build("categorical")
    batch = make_minibatch(loss.actor_network, 8)
    batch = batch.exclude("advantage", "value_target", "state_value")
    flags = torch.zeros(8, 1, dtype=torch.bool)
    batch["next"] = {"observation": batch["observation"], "reward": torch.ones(8, 1)}
    batch["next"].update({"done": flags, "terminated": flags})
    message = r"^'advantage' is not in the batch\. Call GAE on .* before it is shuffled.* \[8\]"
    with pytest.raises(ValueError, match=message):
        loss(batch)
    expected = loss(batch.unsqueeze(0))["loss_objective"]
    batch.names = ["time"]
    torch.testing.assert_close(loss(batch)["loss_objective"], expected)


# -- arguments and coefficients ------------------------------------------------------


OPTIONS = {
    "dual_clip": 3.0,
    "kl_coeff": 0.1,
    "entropy_coeff": 0.1,
    "critic_coeff": 1.0,
    "clip_epsilon": 0.2,
    "clip_value": 0.2,
    "critic_loss_clip": 5.0,
}
OUT_OF_RANGE = [
    ("dual_clip", 1.0, "dual_clip must exceed 1, got 1.0"),
    ("kl_coeff", -0.1, r"kl_coeff must lie in .*, got -0.1"),
    ("entropy_coeff", -0.1, "entropy_coeff must lie in"),
    ("critic_coeff", -1.0, "critic_coeff must lie in"),
    ("clip_epsilon", 1.5, "clip_epsilon"),
    ("clip_value", -0.1, "clip_value must be positive"),
    ("critic_loss_clip", 0.0, "critic_loss_clip must be positive, got 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
def test_a_coefficient_out_of_range_raises_wherever_it_comes_from(name: str, value: Any, message):
    with pytest.raises(ValueError, match=message):
        build(**(OPTIONS | {name: value}))
    loss = build(**OPTIONS)
    before = copy.deepcopy(loss.state_dict())
    with pytest.raises(ValueError, match=message):
        setattr(loss, name, value)
    with pytest.raises(ValueError, match=name):
        ParameterScheduler({name: (loss, InterpSchedule([(0, OPTIONS[name]), (100, value)]))})
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=message):
            loss.load_state_dict(before | {name: torch.tensor(value)}, assign=assign)
    with pytest.raises(RuntimeError, match=name):
        loss.load_state_dict(before | {name: torch.tensor(math.nan)})
    after = loss.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"entropy_coeff": {"a": 0.1, "b": -1.0}}, ValueError, "entropy_coeff must lie in"),
    ({"clip_epsilon": (0.2, -0.1)}, ValueError, "clip_epsilon"),
    ({"clip_epsilon": (0.2,)}, ValueError, r"a number or two, \(low, high\), got \(0.2,\)"),
    ({"clip_epsilon": None}, ValueError, "clip_epsilon must be a number or two"),
    ({"entropy_coeff": "a"}, ValueError, "entropy_coeff must lie in"),
    ({"ent_coef": 0.1}, TypeError, "no argument 'ent_coef'.*Did you mean entropy_coeff"),
    ({"vf_coef": 0.1}, TypeError, "no argument 'vf_coef'.*Did you mean critic_coeff"),
    ({"clip_range": 0.1}, TypeError, "no argument 'clip_range'.*Did you mean clip_epsilon"),
    ({"target_kl": 0.1}, TypeError, r"no argument 'target_kl'.*KLEarlyStopper\(target_kl\)"),
    ({"dual_clipp": 2.0}, TypeError, "no argument 'dual_clipp'.*Did you mean dual_clip"),
    ({"dual_clip": torch.tensor(1)}, ValueError, "dual_clip must exceed 1, got 1"),
]


@pytest.mark.parametrize(("options", "error", "message"), ARGUMENTS, ids=repr)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build(**options)


@pytest.mark.parametrize("name", ["dual_clip", "critic_loss_clip", "kl_coeff", "clip_value"])
def test_setting_the_coefficient_of_an_absent_term(name: str):
    with pytest.raises(AttributeError, match=f"{name} was None .or 0. when the loss was built"):
        setattr(build(), name, 2.0)


def test_setting_the_coefficient_of_a_critic_built_with_0():
    for loss in (build(critic_coeff=0), DualClipPPOLoss(make_actor("normal"), None)):
        with pytest.raises(AttributeError, match="critic_coeff was None"):
            loss.critic_coeff = 1.0


def test_coefficients_of_heads():
    with set_composite_lp_aggregate(False):
        actor = make_simple_actor("composite")
        options: Any = {"entropy_coeff": {("action", "go"): 0.1}}
        loss = DualClipPPOLoss(actor, make_critic(), **options)
        with pytest.raises(KeyError, match=r"Give each head a coefficient"):
            loss(make_minibatch(actor, 4))
        with pytest.raises(AttributeError, match="one coefficient for each head"):
            loss.entropy_coeff = 0.1
