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
from torch.nn.parallel import DistributedDataParallel

from ppokit import AdaptiveKLCoeff, DualClipPPOLoss, KLEarlyStopper, PPOUpdate
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.ranks import run_on_two_ranks

FRAMES, SIZE = 24, 4


class Odd(TensorDictModuleBase):
    """A loss whose value, or gradient, is that of the entry ``"odd"`` where that is not finite."""

    def __init__(self, of_gradient: bool = False, bounded: bool = False) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x", "odd"], ["loss_any"]
        self.weight, self.of_gradient = nn.Parameter(torch.ones(3)), of_gradient
        self.bounded = bounded

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        loss, odd = (self.weight * minibatch["x"]).sum(-1).mean(), minibatch["odd"].sum()
        if self.bounded:  # whose gradient is 0, also where it is multiplied by NaN
            loss = torch.relu(loss - odd.isnan() * 1e6)
        if not self.of_gradient:
            loss = loss + odd  # its gradient is finite
        elif not odd.isfinite():
            # the gradient of sqrt at 0 is infinite, and times 0 it is NaN
            loss = loss + (self.weight * 0.0).abs().sum().sqrt()
        return TensorDict({"loss_any": loss}, [])


def batch(at: int | None = None, odd: float = math.nan) -> TensorDict:
    """Frames of which one is odd."""
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
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_it_raises_and_keeps_parameters_and_minibatch(of_gradient: bool, odd: float):
    at = 2 * SIZE + 1  # in the third minibatch
    good, bad = make_update(Odd(of_gradient)), make_update(Odd(of_gradient))
    data = batch(at, odd)
    good_data = data[: 2 * SIZE].clone()
    good.epochs = 1
    good(good_data)
    with pytest.raises(FloatingPointError, match="are not finite") as error:
        bad(data)
    assert "finite: 'odd'" in str(error.value)
    assert torch.equal(bad.step.loss.weight, good.step.loss.weight)
    for own, other in zip(
        bad.step.optimizer.state_dict()["state"].values(),
        good.step.optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(own[name], other[name]) for name in other)
    kept = bad.nonfinite_minibatch
    assert kept is not None
    assert torch.equal(kept["x"], data["x"][2 * SIZE : 3 * SIZE])
    assert all(p.grad is None for p in bad.step.loss.parameters())
    bad(batch())  # it goes on
    assert bad.step.loss.weight.isfinite().all()


def test_it_names_the_losses():
    with pytest.raises(FloatingPointError, match=r"loss_any is inf.*nonfinite='skip'"):
        make_update()(batch(0, math.inf))


def test_skipped_steps_are_counted_and_the_others_taken():
    update, plain = make_update(nonfinite="skip"), make_update()
    data = batch(1)
    statistics = update(data)
    assert (statistics["skipped"], statistics["steps"]) == (2, 2 * (FRAMES // SIZE - 1))
    assert math.isfinite(statistics["grad_norm"])
    plain(data[SIZE:])
    assert torch.equal(update.step.loss.weight, plain.step.loss.weight)


def test_without_the_check_the_parameters_are_lost():
    update = make_update(Odd(of_gradient=True), nonfinite=None)
    statistics = update(batch(1))
    assert statistics["skipped"] == 0
    assert not update.step.loss.weight.isfinite().all()


def test_of_accumulated_gradients_the_epoch_is_kept():
    update = make_update(accumulate_grads=True, nonfinite="skip")
    before, data = update.step.loss.weight.detach().clone(), batch(1)
    statistics = update(data)
    assert (statistics["skipped"], statistics["steps"]) == (2, 0)
    assert torch.equal(update.step.loss.weight, before)
    assert update.nonfinite_minibatch is not None
    assert torch.equal(update.nonfinite_minibatch["x"], data["x"])


def test_what_was_kept_can_be_saved_and_read(tmp_path: Any):
    update = make_update(nonfinite="skip")
    update(batch(1))
    assert update.nonfinite_minibatch is not None
    torch.save(update.nonfinite_minibatch.to_dict(), tmp_path / "bad.pt")
    assert not torch.load(tmp_path / "bad.pt", weights_only=True)["odd"].isfinite().all()


@pytest.mark.parametrize("value", ["ignore", True, 0])
def test_an_unknown_choice_is_refused(value: Any):
    with pytest.raises(ValueError, match="nonfinite must be 'raise', 'skip' or None"):
        make_update(nonfinite=value)


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("bad", ["observation", "action_log_prob"])
def test_a_policy_whose_logits_are_no_numbers(stops: bool, bad: str):
    """Neither the loss nor the KL stop is before the check."""

    def make(nonfinite: str) -> PPOUpdate:
        loss = DualClipPPOLoss(make_actor("categorical"), make_critic())
        stopper = KLEarlyStopper(10.0) if stops else None
        return make_update(loss, nonfinite=nonfinite, stopper=stopper)

    data = make_minibatch(make_actor("categorical"), FRAMES)
    data[bad][1] = math.nan
    update = make("raise")
    with pytest.raises(FloatingPointError, match="are not finite"):
        update(data.clone())
    assert update.nonfinite_minibatch is not None
    statistics = make("skip")(data.clone())
    assert (statistics["skipped"], statistics["stopped"]) == (2, 0)
    not_finite = {name for name, value in statistics.items() if not math.isfinite(value)}
    # Of a batch without rewards, whose first minibatch was skipped.
    assert not_finite <= {"episode_return", "episode_length", "first_kl"}


def test_where_all_steps_are_skipped_nothing_stops():
    data = batch()
    data["odd"].fill_(math.nan)
    update = make_update(WithKL(), nonfinite="skip", stopper=KLEarlyStopper(0.1, when="epoch"))
    statistics = update(data)
    assert (statistics["skipped"], statistics["steps"], statistics["stopped"]) == (12, 0, 0)
    assert all(math.isnan(statistics[name]) for name in ("kl", "loss_any", "grad_norm"))


def test_a_kl_that_is_not_known_moves_no_coefficient():
    loss = DualClipPPOLoss(make_actor("categorical"), make_critic(), kl_coeff=0.5)
    update = make_update(loss, nonfinite="skip", adaptive_kl=AdaptiveKLCoeff(loss))
    data = make_minibatch(make_actor("categorical"), FRAMES)
    data["advantage"].fill_(math.nan)
    assert update(data)["steps"] == 0
    assert loss.kl_coeff == 0.5


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_stored_log_probability_of_minus_infinity(nonfinite: str, dual_clip: float | None):
    """Its ratio is infinite, and the clipped loss of a positive advantage is finite."""
    loss = DualClipPPOLoss(make_actor(), make_critic(), dual_clip=dual_clip)
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


class WithKL(Odd):
    """With the KL of a policy that has moved a little."""

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        losses = super().forward(minibatch)
        return losses.set("kl", 0.01 + losses["loss_any"].detach() * 0)


@pytest.mark.filterwarnings("ignore")  # torch's, of a scheduler that comes before a step
def test_steps_that_the_scaler_skips_are_counted():
    update = make_update(amp_dtype=torch.float16, epochs=1)
    data = batch(1)
    statistics = update(data)
    assert (statistics["skipped"], statistics["steps"]) == (1, FRAMES // SIZE - 1)
    assert math.isfinite(statistics["grad_norm"])
    assert update.nonfinite_minibatch is None


def test_a_gradient_whose_square_overflows_is_not_finite():
    """Adam would keep an infinite square for ever."""
    data = batch()
    data["x"].fill_(1e25)
    update = make_update()
    with pytest.raises(FloatingPointError):
        update(data)
    assert torch.equal(update.step.loss.weight, torch.ones(3))


def on_rank(rank: int) -> dict[str, Any]:
    """Only the second rank meets what is not finite."""
    found: dict[str, Any] = {}
    makes: dict[str, Any] = {
        "loss": Odd,
        "gradient": lambda: Odd(of_gradient=True),
        "ddp": lambda: DistributedDataParallel(Odd()),
        "bounded": lambda: Odd(bounded=True),
        "ddp, bounded": lambda: DistributedDataParallel(Odd(bounded=True)),
    }
    for name, make in makes.items():
        torch.manual_seed(rank)
        data = batch(1 if rank else None)
        skips, raises = make_update(make(), nonfinite="skip"), make_update(make())
        statistics = skips(data)
        (weight,) = skips.step.loss.parameters()
        found[name, "skip"] = (statistics["skipped"], weight.detach().clone())
        with pytest.raises(FloatingPointError, match="here or on another rank"):
            raises(data)
        (weight,) = raises.step.loss.parameters()
        found[name, "raise"] = (0.0, weight.detach().clone())
        raises(batch())  # and the ranks go on together
    found["KL stop"] = with_a_kl_stop(rank)
    return found


def with_a_kl_stop(rank: int | None) -> dict[str, float]:
    """The KL of the first half of the frames is above the limit, the second half has a NaN."""
    data = make_minibatch(make_actor("categorical"), 16, spread=0.0)
    data["action_log_prob"][:8] -= 0.5
    data["action_log_prob"][8] = math.nan
    data = data if rank is None else data[8 * rank :][:8]
    loss = DualClipPPOLoss(make_actor("categorical"), make_critic())
    options: dict[str, Any] = {"minibatch_size": None, "nonfinite": "skip"}
    return make_update(loss, stopper=KLEarlyStopper(0.05), **options)(data)


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
def test_all_ranks_skip_or_raise_together(tmp_path: Any):
    one, other = run_on_two_ranks(on_rank, tmp_path)
    alone = with_a_kl_stop(None)
    for found in (one.pop("KL stop"), other.pop("KL stop"), alone):
        assert (found["skipped"], found["stopped"], found["steps"]) == (2, 0, 0)
        assert found.keys() == alone.keys()
        assert all(math.isnan(found[name]) for name in ("kl", "loss_objective", "grad_norm"))
    for key, (skipped, weight) in one.items():
        assert skipped == other[key][0] == (2.0 if key[1] == "skip" else 0.0)
        assert weight.isfinite().all()
        assert torch.equal(weight, other[key][1])
        assert torch.equal(weight, torch.ones(3)) == (key[1] == "raise")
