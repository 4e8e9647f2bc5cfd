"""The adaptive KL coefficient: RLlib's rule, one writer, and nothing moved by looking."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import ClipPPOLoss, KLAdaptiveLR

from ppokit import AdaptiveKLCoeff, DualClipPPOLoss, InterpSchedule, ParameterScheduler
from tests.blocks import make_actor, make_critic, make_minibatch


class Penalised(nn.Module):
    """What is asked of a loss: a coefficient that is a buffer."""

    kl_coeff: torch.Tensor

    def __init__(self, kl_coeff: float = 0.2) -> None:
        super().__init__()
        self.register_buffer("kl_coeff", torch.tensor(kl_coeff, dtype=torch.float64))


def make_loss(kl_coeff: float | None = 0.2) -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic(), kl_coeff=kl_coeff)


SCHEDULE = InterpSchedule([(0, 0.2), (100, 0.1)])


# -- the rule -----------------------------------------------------------------------


class RLlib:
    """``update_kl`` of RLlib's PPO, in its own words."""

    def __init__(self, kl_coeff: float, kl_target: float) -> None:
        self.kl_coeff, self.kl_target = kl_coeff, kl_target

    def update_kl(self, sampled_kl: float) -> float:
        if sampled_kl > 2.0 * self.kl_target:
            self.kl_coeff *= 1.5
        elif sampled_kl < 0.5 * self.kl_target:
            self.kl_coeff *= 0.5
        return self.kl_coeff


@given(
    kls=st.lists(st.floats(-1, 1), max_size=30),
    target=st.floats(1e-4, 1),
    coefficient=st.floats(0.01, 10),
)
def test_without_bounds_it_is_rllibs_rule(kls: list[float], target: float, coefficient: float):
    loss = Penalised(coefficient)
    adaptive = AdaptiveKLCoeff(loss, target_kl=target, bounds=None)
    rllib = RLlib(coefficient, target)
    for kl in kls:
        assert adaptive.update(kl) == rllib.update_kl(kl) == loss.kl_coeff.item()


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.0, 0.5), (0.0049, 0.5), (0.005, 1), (0.01, 1), (0.02, 1), (0.0201, 1.5), (9.0, 1.5)],
)
def test_thresholds_by_hand(kl: float, factor: float):
    assert AdaptiveKLCoeff(Penalised(0.2)).update(kl) == 0.2 * factor


def test_schulmans_factors():
    adaptive = AdaptiveKLCoeff(Penalised(1.0), increase=2.0, decrease=0.5)
    assert [adaptive.update(kl) for kl in (1.0, 1.0, 0.0)] == [2.0, 4.0, 2.0]


def test_bounds_hold_it_within_reach():
    adaptive = AdaptiveKLCoeff(Penalised(1.0), bounds=(0.3, 2.0))
    moves = [adaptive.update(kl) for kl in (0, 0, 0, 1, 1)]
    assert moves == pytest.approx([0.5, 0.3, 0.3, 0.45, 0.675])
    assert [adaptive.update(1.0) for _ in range(4)][-2:] == [2.0, 2.0]


def test_by_default_it_neither_vanishes_nor_overflows():
    for kl, end in ((0.0, 1e-6), (1.0, 1e3)):
        loss = make_loss()
        adaptive = AdaptiveKLCoeff(loss)
        for _ in range(300):
            adaptive.update(kl)
        assert loss.kl_coeff == torch.tensor(end)
        del adaptive
        AdaptiveKLCoeff(loss)  # 1e-6 in float32 is a little less


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_leaves_it_alone(kl: float):
    loss = Penalised()
    with pytest.warns(RuntimeWarning, match=r"divergence is (nan|inf|-inf): kl_coeff stays at 0.2"):
        assert AdaptiveKLCoeff(loss).update(torch.tensor(kl)) == 0.2
    assert loss.kl_coeff == 0.2


def test_several_values_are_averaged_by_weight():
    kl = torch.tensor([0.0, 0.024])
    assert AdaptiveKLCoeff(Penalised()).update(kl) == 0.2
    weight = torch.tensor([1, 9])
    assert AdaptiveKLCoeff(Penalised()).update(kl, weight=weight) == 0.2 * 1.5


# -- the loss --------------------------------------------------------------------------


def test_the_loss_uses_it():
    loss = make_loss(0.5)
    batch = make_minibatch(make_actor(), 16)
    before = loss(batch.clone())["loss_kl"]
    AdaptiveKLCoeff(loss).update(1.0)
    torch.testing.assert_close(loss(batch.clone())["loss_kl"], 1.5 * before)


def test_a_forward_pass_moves_nothing():
    loss = make_loss()
    adaptive = AdaptiveKLCoeff(loss)
    for _ in range(3):
        loss(make_minibatch(make_actor(), 16))
    assert loss.kl_coeff == torch.tensor(0.2)
    assert adaptive.update(0.01) == loss.kl_coeff.item()


def test_it_is_written_in_place_and_nothing_recompiles():
    loss = make_loss()
    adaptive = AdaptiveKLCoeff(loss)
    buffer, address = loss.kl_coeff, loss.kl_coeff.data_ptr()
    penalty = torch.compile(lambda kl: loss.kl_coeff * kl, backend="aot_eager")
    penalty(torch.tensor(1.0))
    with torch.compiler.set_stance("fail_on_recompile"):
        for kl in (1.0, 0.0, 0.0):
            adaptive.update(kl)
            assert penalty(torch.tensor(1.0)) == loss.kl_coeff
    assert loss.kl_coeff is buffer
    assert buffer.data_ptr() == address


def test_it_follows_the_loss_to_another_dtype():
    loss = Penalised()
    adaptive = AdaptiveKLCoeff(loss)
    loss.float()
    assert adaptive.update(1.0) == loss.kl_coeff.item() == torch.tensor(0.3).item()


# -- state -----------------------------------------------------------------------------


def test_goes_on_from_a_checkpoint(tmp_path: Path):
    adaptive = AdaptiveKLCoeff(make_loss())
    adaptive.update(1.0)
    torch.save(adaptive.state_dict(), tmp_path / "state.pt")
    assert list(adaptive.state_dict()) == ["_extra_state"]  # the loss has a checkpoint of its own
    loss = make_loss()
    fresh = AdaptiveKLCoeff(loss)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert loss.kl_coeff == adaptive.loss.kl_coeff
    assert fresh.update(1.0) == adaptive.update(1.0)


def test_a_saved_state_does_not_move():
    adaptive = AdaptiveKLCoeff(make_loss())
    state = adaptive.state_dict()
    before = copy.deepcopy(state)
    adaptive.update(1.0)
    assert state == before


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_moves_a_copy_of_the_loss(clone):
    loss = Penalised()
    adaptive = AdaptiveKLCoeff(loss)
    twin = clone(adaptive)
    assert twin.update(1.0) == 0.2 * 1.5
    assert loss.kl_coeff == 0.2
    assert twin.update(1.0) == twin.loss.kl_coeff.item()


def test_repr_says_what_it_does():
    assert repr(AdaptiveKLCoeff(make_loss())) == (
        "AdaptiveKLCoeff(kl_coeff=0.2, target_kl=0.01, increase=1.5, decrease=0.5, "
        "bounds=(1e-06, 1000.0))"
    )


# -- one writer --------------------------------------------------------------------------


def test_a_schedule_beside_it_is_refused():
    loss = make_loss()
    adaptive = AdaptiveKLCoeff(loss)
    adaptive.update(1.0)
    with pytest.raises(ValueError, match=r"AdaptiveKLCoeff drives 'kl_coeff' of this DualClipPPO"):
        ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})
    assert loss.kl_coeff == torch.tensor(0.3)  # the refused schedule has written nothing


def test_it_is_refused_beside_a_schedule():
    loss = make_loss()
    scheduler = ParameterScheduler(
        {"entropy_coeff": (loss, SCHEDULE), "kl_coeff": (loss, SCHEDULE)}
    )
    with pytest.raises(ValueError, match=r"ParameterScheduler drives 'kl_coeff' of this DualClip"):
        AdaptiveKLCoeff(loss)
    scheduler.step(50)


def test_after_the_other_is_deleted_it_is_welcome():
    loss = make_loss()
    scheduler = ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})
    with pytest.raises(ValueError, match="drives 'kl_coeff'") as refusal:
        AdaptiveKLCoeff(loss)
    del scheduler
    adaptive = AdaptiveKLCoeff(loss)  # although the traceback is still there
    assert refusal
    adaptive.cycle = [adaptive]
    del adaptive
    gc.disable()
    try:
        ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})  # although a cycle keeps it alive
    finally:
        gc.enable()


def test_other_coefficients_and_other_losses_are_free():
    loss = make_loss()
    AdaptiveKLCoeff(loss)
    ParameterScheduler({"entropy_coeff": (loss, SCHEDULE), "clip_epsilon": (loss, SCHEDULE)})
    ParameterScheduler({"kl_coeff": (make_loss(), SCHEDULE)})


def test_a_second_one_raises_until_the_first_is_deleted():
    loss = make_loss()
    adaptive = AdaptiveKLCoeff(loss)
    with pytest.raises(ValueError, match=r"AdaptiveKLCoeff drives 'kl_coeff' .*`del`"):
        AdaptiveKLCoeff(loss, target_kl=0.02)
    del adaptive
    adaptive = AdaptiveKLCoeff(loss, target_kl=0.02)
    assert adaptive.update(0.03) == loss.kl_coeff.item()


# -- the learning rate instead -------------------------------------------------------------


def test_torchrls_adaptive_learning_rate_takes_our_kl():
    actor = make_actor()
    loss = DualClipPPOLoss(actor, make_critic())
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    adaptive = KLAdaptiveLR(optimizer, target_kl=0.01, factor=2.0)
    for spread, rate in ((1.0, 5e-4), (0.01, 1e-3), (0.01, 2e-3), (0.14, 2e-3)):
        adaptive.step(loss(make_minibatch(actor, 256, spread=spread))["kl"])
        assert optimizer.param_groups[0]["lr"] == rate


def test_torchrls_kl_would_not_let_the_learning_rate_rise():
    """Its estimate is negative near zero, which reads as an update that went nowhere."""
    actor = make_actor()
    ours, theirs = DualClipPPOLoss(actor, make_critic()), ClipPPOLoss(actor, make_critic())
    raised = {"kl": 0, "kl_approx": 0}
    for seed in range(20):
        batch = make_minibatch(actor, 64, spread=0.05, seed=seed)  # a KL of 0.00125
        for key, loss in (("kl", ours), ("kl_approx", theirs)):
            optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
            KLAdaptiveLR(optimizer, target_kl=0.01).step(loss(batch.clone())[key])
            raised[key] += optimizer.param_groups[0]["lr"] > 1e-3
    assert raised["kl"] == 20
    assert raised["kl_approx"] < 15


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [make_loss(None), make_loss(0.0), nn.Linear(1, 1)])
def test_a_loss_without_a_penalty_is_refused(loss: nn.Module):
    with pytest.raises(AttributeError, match=r"no KL penalty.*Build a DualClip.*kl_coeff=0\.2"):
        AdaptiveKLCoeff(loss)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"target_kl": 0.0}, r"target_kl must be positive and finite, got 0\.0"),
        ({"target_kl": math.nan}, "target_kl must be positive and finite, got nan"),
        ({"target_kl": math.inf}, "target_kl must be positive and finite, got inf"),
        ({"increase": 1.0}, r"increase must be above 1 and finite, got 1\.0"),
        ({"increase": math.inf}, "increase must be above 1 and finite, got inf"),
        ({"decrease": 1.0}, r"decrease must lie between 0 and 1, got 1\.0"),
        ({"decrease": 0.0}, r"decrease must lie between 0 and 1, got 0\.0"),
        ({"bounds": (0.0, 1.0)}, r"bounds must be 0 < low < high, got \(0\.0, 1\.0\)"),
        ({"bounds": (1.0, 0.1)}, r"bounds must be 0 < low < high, got \(1\.0, 0\.1\)"),
        ({"bounds": (0.3, 1.0)}, r"kl_coeff is 0\.2, outside of bounds \(0\.3, 1\.0\)"),
        ({"bounds": (0.01, 0.1)}, r"kl_coeff is 0\.2, outside of bounds"),
    ],
)
def test_bad_options(option: dict, message: str):
    loss = Penalised()
    with pytest.raises(ValueError, match=message):
        AdaptiveKLCoeff(loss, **option)
    ParameterScheduler({"kl_coeff": (loss, SCHEDULE)})  # what was refused drives nothing


def test_what_is_no_group():
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        AdaptiveKLCoeff(Penalised(), group="gloo")


@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_takes_losses(kind: Any):
    losses = kind({"kl": torch.tensor([0.03, 0.05]), "loss_kl": torch.tensor(1.0)})
    assert AdaptiveKLCoeff(Penalised()).update(losses) == 0.2 * 1.5


def test_bad_kls():
    adaptive = AdaptiveKLCoeff(Penalised())
    with pytest.raises(KeyError, match=r"no KL at 'kl' among .'kl_approx'"):
        adaptive.update({"kl_approx": 0.02})
    with pytest.raises(ValueError, match="empty"):
        adaptive.update(torch.zeros(0))
    with pytest.raises(ValueError, match="weight must be the number of valid frames"):
        adaptive.update(torch.zeros(2), weight=torch.zeros(3))


def test_a_penalty_that_was_taken_away_later_is_named():
    loss = Penalised()
    adaptive = AdaptiveKLCoeff(loss)
    loss.kl_coeff = None
    with pytest.raises(AttributeError, match="Penalised has no KL penalty"):
        adaptive.update(TensorDict({"kl": 0.0})["kl"])
