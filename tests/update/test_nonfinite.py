"""Losses and gradients that are not finite: no step is taken, and the minibatch is kept."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from ppokit import AdaptiveKLCoeff, DualClipPPOLoss, KLEarlyStopper, PPOUpdate
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.update.parts import make_loss

FRAMES, SIZE = 24, 4
NAN = math.nan


class Odd(TensorDictModuleBase):
    """A loss whose value, or gradient, is that of the entry ``"odd"`` where that is not finite."""

    def __init__(self, of_gradient: bool = False, bounded: bool = False) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x", "odd"], ["loss_any"]
        self.weight, self.of_gradient = nn.Parameter(torch.ones(3)), of_gradient
        self.bounded = bounded

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        loss, odd = (self.weight * minibatch["x"]).sum(-1).mean(), minibatch["odd"].sum()
        if self.bounded:  # its gradient is 0, also where it is multiplied by NaN
            loss = torch.relu(loss - odd.isnan() * 1e6)
        if not self.of_gradient:
            loss = loss + odd  # its gradient is finite
        elif not odd.isfinite():
            # the gradient of sqrt at 0 is infinite, and times 0 it is NaN
            loss = loss + (self.weight * 0.0).abs().sum().sqrt()
        return TensorDict({"loss_any": loss, "kl": 0.01 + loss.detach() * 0}, [])


def batch(at: int | None = None, odd: float = NAN) -> TensorDict:
    """Return frames of which one is odd."""
    found = TensorDict({"x": torch.randn(FRAMES, 3), "odd": torch.zeros(FRAMES)}, [FRAMES])
    if at is not None:
        found["odd"][at] = odd
    return found


def make_update(loss: nn.Module | None = None, **options: Any) -> PPOUpdate:
    loss = loss or Odd()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    defaults: dict[str, Any] = {"minibatch_size": SIZE, "epochs": 2, "shuffle": False}
    return ppo_update(loss, optimizer, **defaults | options)


@pytest.mark.parametrize("of_gradient", [False, True], ids=["loss", "gradient"])
@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_it_raises_and_keeps_parameters_and_minibatch(of_gradient: bool, odd: float, tmp_path: Any):
    good, bad = make_update(Odd(of_gradient), epochs=1), make_update(Odd(of_gradient))
    data = batch(2 * SIZE + 1, odd)  # in the third minibatch
    good(data[: 2 * SIZE].clone())
    with pytest.raises(FloatingPointError, match=r"finite: 'odd'.*nonfinite='skip'"):
        bad(data)
    assert torch.equal(bad.step.loss.weight, good.step.loss.weight)
    states = [x.step.optimizer.state_dict()["state"][0] for x in (good, bad)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(p.grad is None for p in bad.step.loss.parameters())
    assert bad.step.nonfinite_minibatch is not None
    torch.save(bad.step.nonfinite_minibatch.to_dict(), tmp_path / "bad.pt")
    kept = torch.load(tmp_path / "bad.pt", weights_only=True)
    assert torch.equal(kept["x"], data["x"][2 * SIZE : 3 * SIZE])
    bad(batch())  # training continues
    assert bad.step.loss.weight.isfinite().all()


def test_skipped_steps_are_counted_and_the_others_taken():
    update, plain, data = make_update(nonfinite="skip"), make_update(), batch(1)
    statistics = update(data)
    assert (statistics["skipped"], statistics["steps"]) == (2, 2 * (FRAMES // SIZE - 1))
    assert math.isfinite(statistics["grad_norm"])
    plain(data[SIZE:])
    assert torch.equal(update.step.loss.weight, plain.step.loss.weight)
    update = make_update(accumulate_grads=True, nonfinite="skip")
    statistics = update(data)
    assert (statistics["skipped"], statistics["steps"]) == (2, 0)
    assert torch.equal(update.step.loss.weight, torch.ones(3))
    kept: Any = update.step.nonfinite_minibatch
    assert torch.equal(kept["x"], data["x"])


def test_without_the_check_the_parameters_are_lost():
    update = make_update(Odd(of_gradient=True), nonfinite=None)
    assert update(batch(1))["skipped"] == 0
    assert not update.step.loss.weight.isfinite().all()


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("bad", ["observation", "action_log_prob"])
def test_a_policy_whose_logits_are_not_finite(stops: bool, bad: str):
    """The check comes before errors of the loss and before the KL stop."""
    data = make_minibatch(make_actor("categorical"), FRAMES)
    data[bad][1] = NAN
    for nonfinite in ("raise", "skip"):
        loss = DualClipPPOLoss(make_actor("categorical"), make_critic())
        stopper = KLEarlyStopper(10.0) if stops else None
        update = make_update(loss, nonfinite=nonfinite, stopper=stopper)
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match="are not finite"):
                update(data.clone())
            assert update.step.nonfinite_minibatch is not None
        else:
            statistics = update(data.clone())
            assert (statistics["skipped"], statistics["stopped"]) == (2, 0)


def test_if_all_steps_are_skipped_no_stop_and_no_coefficient_moves():
    update = make_update(nonfinite="skip", stopper=KLEarlyStopper(0.1, when="epoch"))
    data = batch()
    data["odd"].fill_(NAN)
    statistics = update(data)
    assert [statistics[name] for name in ("skipped", "steps", "stopped")] == [12, 0, 0]
    assert all(math.isnan(statistics[name]) for name in ("kl", "loss_any", "grad_norm"))
    loss = DualClipPPOLoss(make_actor("categorical"), make_critic(), kl_coeff=0.5)
    update = make_update(loss, nonfinite="skip", adaptive_kl=AdaptiveKLCoeff(loss))
    data = make_minibatch(make_actor("categorical"), FRAMES)
    data["advantage"].fill_(NAN)
    assert update(data)["steps"] == 0
    assert loss.kl_coeff == 0.5


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_stored_log_probability_of_minus_infinity(nonfinite: str, dual_clip: float | None):
    """Its ratio is infinite, and the clipped loss of a positive advantage is finite."""
    loss = make_loss(dual_clip=dual_clip)
    update = make_update(loss, nonfinite=nonfinite, epochs=1)
    minibatch = make_minibatch(make_actor(), FRAMES)
    minibatch["action_log_prob"][1], minibatch["advantage"][1] = -math.inf, 1.0
    before = [parameter.clone() for parameter in loss.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"kl is .*finite: 'action_log_prob'"):
                update(minibatch)
            assert all(map(torch.equal, before, loss.parameters()))
        else:
            statistics = update(minibatch)
            assert (statistics["steps"], statistics["skipped"]) == (FRAMES / SIZE - 1, 1)
            assert math.isfinite(statistics["kl"])


@pytest.mark.filterwarnings("ignore")  # torch's, of a scheduler that comes before a step
def test_steps_that_the_scaler_skips_are_counted():
    update = make_update(Odd(of_gradient=True), amp_dtype=torch.float16, epochs=1)
    statistics = update(batch(1))
    assert (statistics["skipped"], statistics["steps"]) == (1, FRAMES // SIZE - 1)
    assert math.isfinite(statistics["grad_norm"])
    assert update.step.nonfinite_minibatch is None


@pytest.mark.filterwarnings("ignore")  # torch's, of a scheduler that comes before a step
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_loss_that_is_not_finite_is_no_overflow(accumulates: bool):
    """With float16 it raises as with float32, and the scale does not fall for it."""
    options = {"amp_dtype": torch.float16, "accumulate_grads": accumulates}
    update = make_update(**options)
    with pytest.raises(FloatingPointError, match=r"finite: 'odd'"):
        update(batch(1))
    assert update.step.nonfinite_minibatch is not None
    update = make_update(**options, nonfinite="skip")
    data = batch()
    data["odd"].fill_(NAN)
    for _ in range(10):
        assert update(data)["steps"] == 0
    assert update.step.scaler.get_scale() == 2.0**16
    before = update.step.loss.weight.detach().clone()
    assert update(batch())["steps"] > 0
    assert not torch.equal(update.step.loss.weight, before)


@pytest.mark.filterwarnings("ignore")  # torch's, of a scheduler that comes before a step
def test_gradients_that_stay_infinite_at_a_scale_of_1_raise():
    """The scale would fall to 0, and nothing would be trained from then on."""
    update = make_update(Odd(of_gradient=True), amp_dtype=torch.float16)
    data = batch()
    data["odd"].fill_(NAN)
    assert update(data)["skipped"] == 12
    with pytest.raises(FloatingPointError):
        update(data)
    assert update.step.scaler.get_scale() == 1.0
    before = update.step.loss.weight.detach().clone()
    assert update(batch())["steps"] > 0
    assert not torch.equal(update.step.loss.weight, before)


def test_a_gradient_whose_square_overflows_is_not_finite():
    """Adam would keep an infinite square for ever."""
    update, data = make_update(), batch()
    data["x"].fill_(1e25)
    with pytest.raises(FloatingPointError):
        update(data)
    assert torch.equal(update.step.loss.weight, torch.ones(3))
