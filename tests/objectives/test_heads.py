"""The loss of an action with several heads, against torchrl's and against a loop over the heads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate
from torch import distributions as d
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from tests.mixed import make_mixed_actor
from tests.objectives.common import assert_alike, results

WARNS = "ignore:You are using a composite distribution, yet:UserWarning"  # torchrl's, if summed


@pytest.fixture(autouse=True)
def _each() -> Iterator[None]:
    with set_composite_lp_aggregate(False):
        yield


@pytest.fixture(params=[False, True], ids=["each", "summed"])
def summed(_each: None, request: Any) -> Iterator[bool]:
    with set_composite_lp_aggregate(request.param):
        yield request.param


def make_critic() -> ValueOperator:
    torch.manual_seed(1)
    return ValueOperator(nn.Linear(3, 1), ["observation"])


def minibatch(actor: Any, *, mask: bool = False) -> TensorDict:
    """Frames of a policy that has moved since."""
    frames = 12
    torch.manual_seed(2)
    batch = TensorDict({"observation": torch.randn(frames, 3)}, [frames])
    batch["action_mask"] = torch.arange(3).expand(frames, 3) < 2
    with torch.no_grad():
        actor(batch)
        for parameter in actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for key in ("advantage", "value_target", "state_value"):
        batch[key] = torch.randn(frames, 1)
    if mask:
        batch["collector", "mask"] = torch.arange(frames) < 9
    return batch


OPTIONS: list[dict[str, Any]] = [
    {},
    {"functional": False},
    {"delay_actor": True},
    {"max_importance_ratio": 1.05},
    {"clip_value": 0.2, "normalize_advantage": True, "reduction": "none"},
]


@pytest.mark.filterwarnings(WARNS, "ignore:No target network updater:UserWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("actions", ["nested", "deep", "one"])
def test_it_is_torchrls_loss(actions: str, options: dict[str, Any], summed: bool):
    actor = make_mixed_actor(actions)
    batch = minibatch(actor)
    theirs = ClipPPOLoss(copy.deepcopy(actor), make_critic(), **options)
    theirs.set_keys(action=actor.dist_sample_keys)
    expected = results(theirs, batch)
    found = results(DualClipPPOLoss(actor, make_critic(), **options), batch)
    assert_alike(found, expected, tolerance=3e-6)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("actions", ["nested", "deep"])
def test_the_kl_of_each_head(actions: str, mask: bool):
    actor = make_mixed_actor(actions)
    batch = minibatch(actor, mask=mask)
    losses, _ = results(DualClipPPOLoss(actor, make_critic(), dual_clip=3.0), batch)
    log_probs = actor.get_dist(batch.clone()).log_prob(batch.select(*actor.dist_sample_keys))
    valid = batch["collector", "mask"] if mask else torch.ones(12, dtype=torch.bool)
    total = torch.zeros(12)
    for key in actor.log_prob_keys:
        *parents, name = (key,) if isinstance(key, str) else key
        log_ratio = (log_probs[key] - batch[key]).reshape(12, -1).sum(-1)
        expected = (log_ratio.exp() - 1 - log_ratio)[valid].mean()
        found = losses[("composite_kl", *parents, name.replace("_log_prob", "_kl"))]
        torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-4)
        assert found > 0
        total += log_ratio.detach()
    whole = (total.exp() - 1 - total)[valid].mean()
    torch.testing.assert_close(losses["kl"], whole, atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings(WARNS)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("actions", ["nested", "masked"])
def test_the_kl_penalty_is_exact(actions: str, mask: bool, summed: bool):
    actor = make_mixed_actor(actions, categorical=True)
    batch = minibatch(actor, mask=mask)
    losses, gradients = results(DualClipPPOLoss(actor, make_critic(), kl_coeff=0.3), batch)
    old, new = list(actor.module)[-1].get_dist(batch), actor.get_dist(batch.clone())
    by_head = [d.kl_divergence(old.dists[key], new.dists[key]) for key in old.dists]
    each = sum(kl.reshape(12, -1).sum(-1) for kl in by_head)
    expected = 0.3 * (each[:9] if mask else each).mean()  # pyright: ignore
    torch.testing.assert_close(losses["loss_kl"], expected.detach(), atol=1e-6, rtol=1e-4)
    assert all(x is None or x.isfinite().all() for x in gradients["loss_kl"])


def test_a_head_without_closed_form_falls_back_on_the_estimate():
    actor = make_mixed_actor("deep")
    batch = minibatch(actor)
    losses, _ = results(DualClipPPOLoss(actor, make_critic(), kl_coeff=0.3), batch)
    torch.testing.assert_close(losses["loss_kl"], 0.3 * losses["kl"])


HEADS: dict[Any, float] = {"steer": 0.1, "gear": 0.3}


def test_coefficients_of_heads():
    actor = make_mixed_actor("dict")
    batch = minibatch(actor)
    losses, _ = results(DualClipPPOLoss(actor, make_critic(), entropy_coeff=HEADS), batch)
    entropies = losses["composite_entropy"]
    expected = -0.1 * entropies["steer_entropy"] - 0.3 * entropies["gear_entropy"]
    torch.testing.assert_close(losses["loss_entropy"], expected.mean())


# -- what does not fit ---------------------------------------------------------------------


def test_a_log_probability_with_a_trailing_dimension():
    actor = make_mixed_actor("dict")
    batch = minibatch(actor)
    batch["gear_log_prob"] = batch["gear_log_prob"].unsqueeze(-1)
    with pytest.raises(ValueError, match=r"'gear_log_prob' has shape \[12, 1\].* shape \[12\]"):
        DualClipPPOLoss(actor, make_critic())(batch)


@pytest.mark.filterwarnings(WARNS)
def test_coefficients_of_heads_need_entropies_of_heads():
    with set_composite_lp_aggregate(True):
        actor = make_mixed_actor("dict")
        loss = DualClipPPOLoss(actor, make_critic(), entropy_coeff=HEADS)
        message = r"the whole action.*set_composite_lp_aggregate\(False\)"
        with pytest.raises(KeyError, match=message):
            loss(minibatch(actor))
