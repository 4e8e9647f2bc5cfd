"""AdaptiveKLCoeff: RLlib's rule, the coefficient of the loss, one writer, state and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from ppokit import AdaptiveKLCoeff, DualClipPPOLoss, InterpSchedule, ParameterScheduler
from tests.blocks import make_actor, make_critic, make_minibatch


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


@given(
    kls=st.lists(st.floats(-1, 1), max_size=30),
    target=st.floats(1e-4, 1),
    coefficient=st.floats(0.01, 10),
)
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


@pytest.mark.parametrize(
    ("value", "weight", "factor"),
    [
        (torch.tensor([0.0, 0.024]), None, 1),
        (torch.tensor([0.0, 0.024]), torch.tensor([1, 9]), 1.5),
        ({"kl": torch.tensor([0.03, 0.05]), "loss_kl": torch.tensor(1.0)}, None, 1.5),
        (TensorDict({"kl": torch.tensor(0.03)}), None, 1.5),
    ],
)
def test_takes_losses_and_averages_values_by_weight(value: Any, weight: Any, factor: float):
    assert AdaptiveKLCoeff(Penalised()).update(value, weight=weight) == 0.2 * factor


# -- the loss ---------------------------------------------------------------------------


def test_the_loss_uses_the_coefficient_and_a_forward_pass_does_not_move_it():
    loss = make_loss(0.5)
    batch = make_minibatch(make_actor(), 16)
    adaptive = AdaptiveKLCoeff(loss)
    before = loss(batch.clone())["loss_kl"]
    assert loss.kl_coeff == 0.5
    assert repr(adaptive).startswith("AdaptiveKLCoeff(kl_coeff=0.5, target_kl=0.01, increase=1.5")
    adaptive.update(1.0)
    torch.testing.assert_close(loss(batch.clone())["loss_kl"], 1.5 * before)


def test_the_state_alone_holds_the_coefficient():
    adaptive, loss = AdaptiveKLCoeff(make_loss()), make_loss()
    adaptive.update(1.0)
    assert list(adaptive.state_dict()) == ["_extra_state"]  # the loss has a state of its own
    AdaptiveKLCoeff(loss).load_state_dict(adaptive.state_dict())
    assert loss.kl_coeff == adaptive.loss.kl_coeff != 0.2


# -- one writer -------------------------------------------------------------------------


def test_a_second_writer_of_the_coefficient_raises_until_the_first_is_deleted():
    loss = make_loss()
    adaptive = AdaptiveKLCoeff(loss)
    with pytest.raises(ValueError, match=r"AdaptiveKLCoeff drives 'kl_coeff' .*`del`"):
        AdaptiveKLCoeff(loss, target_kl=0.02)
    with pytest.raises(ValueError, match=r"AdaptiveKLCoeff drives 'kl_coeff' of this DualClipPPO"):
        ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})
    other = ParameterScheduler(
        {"entropy_coeff": (loss, SCHEDULE), "clip_epsilon": (loss, SCHEDULE)}
    )
    ParameterScheduler({"kl_coeff": (make_loss(), SCHEDULE)})
    adaptive.cycle = [adaptive]
    del adaptive
    scheduler = ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})
    with pytest.raises(ValueError, match=r"ParameterScheduler drives 'kl_coeff' of this DualClip"):
        AdaptiveKLCoeff(loss)
    del scheduler
    AdaptiveKLCoeff(loss)
    other.step(50)


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"target_kl": 0.0}, r"target_kl must be positive, .* got 0\.0, 1\.5 and 0\.5"),
        ({"target_kl": math.nan}, "target_kl must be positive, .* got nan"),
        ({"increase": 1.0}, r"increase above 1 .* got 0\.01, 1\.0 and"),
        ({"decrease": 1.0}, r"decrease between 0 and 1.* and 1\.0"),
    ],
)
def test_bad_options_raise(option: dict[str, Any], message: str):
    loss = Penalised()
    with pytest.raises(ValueError, match=message):
        AdaptiveKLCoeff(loss, **option)
    ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})  # the failed constructor claims nothing


def test_bad_losses_groups_and_kls_raise():
    for loss in (make_loss(None), make_loss(0.0), nn.Linear(1, 1)):
        with pytest.raises(AttributeError, match=r"no KL penalty.*Build a DualClip.*kl_coeff=0\.2"):
            AdaptiveKLCoeff(loss)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        AdaptiveKLCoeff(Penalised(), group="gloo")  # pyright: ignore
    adaptive = AdaptiveKLCoeff(Penalised())
    with pytest.raises(KeyError, match=r"no KL at 'kl' among .'kl_approx'"):
        adaptive.update({"kl_approx": 0.02})
    with pytest.raises(ValueError, match="weight must be the number of valid frames"):
        adaptive.update(torch.zeros(2), weight=torch.zeros(3))
