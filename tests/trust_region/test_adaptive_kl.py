"""AdaptiveKLCoeff; and the values, losses and weights that all blocks take which look at a KL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from ppokit import (
    AdaptiveKLCoeff,
    AdaptiveLearningRate,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
)
from tests.blocks import make_actor, make_critic


class Penalised(nn.Module):
    """The interface that a loss needs: a coefficient that is a buffer."""

    kl_coeff: torch.Tensor

    def __init__(self, kl_coeff: float = 0.2) -> None:
        super().__init__()
        self.register_buffer("kl_coeff", torch.tensor(kl_coeff, dtype=torch.float64))


def make_loss(kl_coeff: float | None = 0.2) -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic(), kl_coeff=kl_coeff)


SCHEDULE = InterpSchedule([(0, 0.2), (100, 0.1)])


# -- the rule ---------------------------------------------------------------------------


@given(st.lists(st.floats(-1, 1), max_size=30), st.floats(1e-4, 1), st.floats(0.01, 10))
def test_within_its_limits_it_is_rllibs_rule(kls: list[float], target: float, coefficient: float):
    loss = Penalised(coefficient)
    adaptive = AdaptiveKLCoeff(loss, target_kl=target)
    for kl in kls:
        if kl > 2.0 * target:
            coefficient *= 1.5
        elif kl < 0.5 * target:
            coefficient *= 0.5
        coefficient = min(max(coefficient, 1e-6), 1e3)
        assert adaptive.update(kl) == coefficient == loss.kl_coeff.item()


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0, 0.5), (0.0049, 0.5), (0.005, 1), (0.02, 1), (0.0201, 1.5), (9.0, 1.5)]
)
def test_thresholds_by_hand(kl: float, factor: float):
    assert AdaptiveKLCoeff(Penalised(0.2)).update(kl) == 0.2 * factor


def test_factors_and_limits_by_hand():
    adaptive = AdaptiveKLCoeff(Penalised(1.0), increase=2.0, decrease=0.5)
    assert [adaptive.update(kl) for kl in (1.0, 1.0, 0.0)] == [2.0, 4.0, 2.0]
    for kl, end in ((0.0, 1e-6), (1.0, 1e3)):
        loss = make_loss()
        adaptive = AdaptiveKLCoeff(loss)
        for _ in range(60):
            adaptive.update(kl)
        assert loss.kl_coeff == torch.tensor(end)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_changes_nothing_and_warns(kl: float):
    loss = Penalised()
    with pytest.warns(RuntimeWarning, match=r"divergence is (nan|inf|-inf): kl_coeff stays at 0.2"):
        assert AdaptiveKLCoeff(loss).update(torch.tensor(kl)) == 0.2
    assert loss.kl_coeff == 0.2


# -- the loss ---------------------------------------------------------------------------


def test_the_state_alone_holds_the_coefficient():
    adaptive, loss = AdaptiveKLCoeff(make_loss()), make_loss()
    assert repr(adaptive).startswith("AdaptiveKLCoeff(kl_coeff=0.2, target_kl=0.01, increase=1.5")
    adaptive.update(1.0)
    assert list(adaptive.state_dict()) == ["_extra_state"]  # the loss has a state of its own
    AdaptiveKLCoeff(loss).load_state_dict(adaptive.state_dict())
    assert loss.kl_coeff == adaptive.loss.kl_coeff != 0.2


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"target_kl": math.nan}, "target_kl must be positive and finite, got nan"),
        ({"increase": 1.0}, r"increase must be above 1 and finite, got 1\.0"),
        ({"decrease": 1.0}, r"decrease must be between 0 and 1, got 1\.0"),
    ],
)
def test_bad_options_raise(option: dict[str, Any], message: str):
    loss = Penalised()
    with pytest.raises(ValueError, match=message):
        AdaptiveKLCoeff(loss, **option)
    ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})


def test_losses_without_a_penalty_raise():
    for loss in (make_loss(None), make_loss(0.0), nn.Linear(1, 1)):
        with pytest.raises(AttributeError, match=r"no KL penalty.*Build a DualClip.*kl_coeff=0\.2"):
            AdaptiveKLCoeff(loss)


# -- what this block, the early stop and the adaptive learning rate take ----------------


def stops(value: Any, weight: Any = None, **options: Any) -> bool:
    return KLEarlyStopper(0.01, tolerance=2.0, **options).update(value, weight=weight)


def penalises_more(value: Any, weight: Any = None, **options: Any) -> bool:
    return AdaptiveKLCoeff(Penalised(), **options).update(value, weight=weight) == 0.2 * 1.5


def slows_down(value: Any, weight: Any = None, **options: Any) -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.5e-3)
    AdaptiveLearningRate(optimizer, **options).update(value, weight=weight)
    return optimizer.param_groups[0]["lr"] == 1e-3


every_block = pytest.mark.parametrize("is_high", [stops, penalises_more, slows_down])
VALUES = [
    (0.03, None, True),
    (torch.tensor(0.03, dtype=torch.bfloat16, requires_grad=True), None, True),
    (torch.tensor([0.0, 0.024]), None, False),
    (torch.tensor([0.0, 0.024]), torch.tensor([1, 9]), True),
    (torch.tensor([math.nan, 0.03]), torch.tensor([0, 9]), True),
    ({"kl": torch.tensor([0.03, 0.05]), "a/kl": 0.001, "note": "text"}, None, True),
    (TensorDict({"kl": torch.tensor(0.03)}), None, True),
]


@every_block
@pytest.mark.parametrize(("value", "weight", "expected"), VALUES, ids=str)
def test_a_number_a_tensor_or_losses(is_high: Any, value: Any, weight: Any, expected: bool):
    assert is_high(value, weight) == expected


@pytest.mark.parametrize("is_high", [stops, slows_down])
def test_the_key_of_the_kl(is_high: Any):
    assert is_high({"kl_approx": 0.03}, kl_key="kl_approx")
    assert is_high({"kl": 0.001, "a/kl": 0.03}, kl_key=("a", "kl"))  # of PPOUpdate
    losses = TensorDict({"kl": torch.tensor(0.001), "a": {"kl": torch.tensor(0.03)}})
    assert is_high(losses, kl_key=("a", "kl"))


@every_block
def test_bad_values_weights_and_groups_raise(is_high: Any):
    with pytest.raises(KeyError, match=r"no KL at 'kl' among .'kl_approx'.*kl_key='kl_approx'"):
        is_high({"kl_approx": 0.0, "note": ""})
    with pytest.raises(KeyError, match=r"'kl' is not in the batch.*kl_approx"):
        is_high(TensorDict({"kl_approx": 0.0}))
    for weight in (1.0, torch.tensor([1.0]), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"weight must be the number of valid frames.*\[2\]"):
            is_high(torch.zeros(2), weight)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        is_high(0.03, group="gloo")
