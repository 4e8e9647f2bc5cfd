"""The loss is torchrl's without dual clip; with it, hand-written formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict.nn import set_composite_lp_aggregate
from torch import Tensor

from ppokit import DualClipPPOLoss
from tests.blocks import make_actor as make_simple_actor
from tests.blocks import make_critic
from tests.objectives.common import (
    KINDS,
    assert_same,
    log_ratio_of,
    make_actor,
    make_minibatch,
    make_pair,
    results,
)

# Others are drawn in test_differential.py.
OPTIONS: list[dict[str, Any]] = [
    {"functional": True},
    {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-1,)},
    {"clip_value": 0.5, "loss_critic_type": "l2"},
    {"separate_losses": True},
    {"delay_actor": True},
    {"delay_actor": True, "max_importance_ratio": 1.2},
]
PAIRS = [(kind, {}) for kind in KINDS]
PAIRS += [(kind, options) for options in OPTIONS for kind in ("tanh-normal", "categorical")]


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize(("kind", "options"), PAIRS, ids=str)
def test_without_additions_it_is_torchrls_loss(kind: str, options: dict):
    dtype = torch.float64
    theirs, ours = make_pair(kind, dtype, **options)
    batch = make_minibatch(make_actor(kind, dtype), 16, dtype=dtype)
    assert_same(theirs, ours, batch, tolerance=1e-12)
    names = [name.replace("_network_params.", "_network.") for name in theirs.state_dict()]
    assert names == [name.replace("_network_params.", "_network.") for name in ours.state_dict()]


@pytest.mark.parametrize("kind", ["tanh-normal", "categorical", "unknown normal"])
def test_in_bfloat16(kind: str):
    theirs, ours = make_pair(kind, torch.bfloat16, entropy_bonus=False)
    batch = make_minibatch(make_actor(kind, torch.bfloat16), 16, dtype=torch.bfloat16)
    assert_same(theirs, ours, batch, tolerance=0.02)


@pytest.mark.parametrize("kind", ["tanh-normal", "unknown normal"])
def test_under_autocast(kind: str):
    theirs, ours = make_pair(kind, functional=False)
    batch = make_minibatch(make_actor(kind), 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = results(theirs, batch), results(ours, batch)
    for name, value in expected[0].items():  # torchrl's are bfloat16, some of them
        torch.testing.assert_close(found[0][name].float(), value.float(), rtol=0.02, atol=0.02)
    for name, gradients in expected[1].items():
        torch.testing.assert_close(found[1][name], gradients, rtol=0.05, atol=0.02)


def test_float64_networks_with_coefficients_in_float32():
    actor, critic = make_actor("tanh-normal", torch.float64), make_critic(dtype=torch.float64)
    batch = make_minibatch(actor, 64, dtype=torch.float64, spread=2.0)
    batch["advantage"] = -batch["advantage"].abs()
    loss = DualClipPPOLoss(actor, critic, dual_clip=2.0, clip_epsilon=1.0)
    expected = dual_clipped(log_ratio_of(actor, batch), batch["advantage"], 2.0, 1.0, 1.0)
    torch.testing.assert_close(loss(batch)["loss_objective"], expected, rtol=1e-12, atol=1e-12)


def test_an_action_as_probabilities_is_the_choice_of_the_largest():
    theirs, ours = make_pair("one-hot")
    batch = make_minibatch(make_actor("one-hot"), 16)
    batch["action"] = batch["action"].float().softmax(-1)
    assert_same(theirs, ours, batch)


@pytest.mark.parametrize("options", [{"critic_coeff": 0}, {"critic_coeff": 0.5, "clip_value": 0.2}])
def test_networks_under_torchrls_other_names(options: dict):
    actor, critic = make_actor("normal"), make_critic()
    batch = make_minibatch(actor, 8)
    found = DualClipPPOLoss(actor=actor, critic=critic, **options)(batch)
    expected = DualClipPPOLoss(actor, critic, **options)(batch)
    assert found.keys() == expected.keys()
    assert ("loss_critic" in found.keys()) == bool(options["critic_coeff"])


def test_out_keys_end_with_the_new_diagnostics():
    theirs, ours = make_pair("normal", ours={"kl_coeff": 0.1})
    assert ours.out_keys == [*theirs.out_keys, "kl", "dual_clip_fraction", "loss_kl"]
    batch = make_minibatch(make_actor("normal"), 8)
    assert set(ours.out_keys) <= set(ours(batch).keys())


def test_called_with_entries_as_arguments():
    _, loss = make_pair("categorical")
    batch = make_minibatch(make_actor("categorical"), 8)
    loss.in_keys = ["observation", "action", "action_log_prob", "advantage", "value_target"]
    expected = loss(batch)
    loss.select_out_keys("loss_objective", "kl")
    objective, kl = loss(**{key: batch[key] for key in loss.in_keys})
    torch.testing.assert_close(objective, expected["loss_objective"])
    torch.testing.assert_close(kl, expected["kl"])


# -- dual clip -------------------------------------------------------------------


def dual_clipped(log_ratio: Tensor, advantage: Tensor, c: float, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    s = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return -torch.where(advantage < 0, torch.maximum(s, c * advantage), s).mean()


@pytest.mark.parametrize("epsilon", [0.2, (0.1, 0.3)], ids=str)
@pytest.mark.parametrize("c", [1.1, 5.0])
@pytest.mark.parametrize("kind", ["normal", "tanh_normal", "categorical", "composite"])
def test_dual_clip_equals_hand_written_in_loss_and_gradient(kind: str, c: float, epsilon: Any):
    with set_composite_lp_aggregate(False):
        actor = make_simple_actor(kind)
        loss = DualClipPPOLoss(actor, make_critic(), dual_clip=c, clip_epsilon=epsilon)
        batch = make_minibatch(actor, 64, spread=2.0)
        low, high = epsilon if isinstance(epsilon, tuple) else (epsilon, epsilon)
        log_ratio = log_ratio_of(actor, batch)
        expected = dual_clipped(log_ratio, batch["advantage"], c, low, high)
        out = loss(batch)
    parameters = list(actor.parameters())
    gradients = torch.autograd.grad(out["loss_objective"], parameters)
    torch.testing.assert_close(out["loss_objective"], expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, parameters))
    bounded = (batch["advantage"] < 0) & (log_ratio.exp() > c)
    assert bounded.any()
    torch.testing.assert_close(out["dual_clip_fraction"], bounded.float().mean())


def test_dual_clip_looks_at_the_sign_of_the_normalized_advantage():
    actor = make_actor("normal")
    batch = make_minibatch(actor, 64, spread=2.0)
    batch["advantage"] = batch["advantage"] + 100  # all positive before normalization
    loss = DualClipPPOLoss(actor, make_critic(), dual_clip=2.0, normalize_advantage=True)
    normalized = (batch["advantage"] - batch["advantage"].mean()) / batch["advantage"].std()
    out = loss(batch)
    expected = dual_clipped(log_ratio_of(actor, batch), normalized, 2.0, 0.2, 0.2)
    torch.testing.assert_close(out["loss_objective"], expected, rtol=1e-4, atol=1e-5)
    assert out["dual_clip_fraction"] > 0


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
def test_dual_clip_of_a_delayed_actor_bounds_the_ratio_to_the_policy_at_collection():
    actor = make_actor("normal")
    batch = make_minibatch(actor, 64, spread=2.0)
    loss = DualClipPPOLoss(actor, make_critic(), dual_clip=1.5, delay_actor=True, clip_epsilon=1.0)
    log_ratio = log_ratio_of(actor, batch)  # the delayed actor is the actor, at first
    bounded = (batch["advantage"] < 0) & (log_ratio.exp() > 1.5)
    expected = log_ratio.exp().where(~bounded, torch.tensor(1.5)) * batch["advantage"]
    out = loss(batch)
    torch.testing.assert_close(out["loss_objective"], -expected.mean())
    torch.testing.assert_close(out["dual_clip_fraction"], bounded.float().mean())


def test_diagnostics_are_those_of_the_unclamped_ratio():
    plain, dual = make_pair("normal", ours={"dual_clip": 1.5})
    batch = make_minibatch(make_actor("normal"), 64, spread=2.0)
    expected, out = results(plain, batch)[0], results(dual, batch)[0]
    assert out["loss_objective"] < expected["loss_objective"]
    for key in ("clip_fraction", "kl_approx", "ESS", "max_ratio", "mean_ratio"):
        torch.testing.assert_close(out[key], expected[key])
    log_ratio = log_ratio_of(make_actor("normal"), batch)
    torch.testing.assert_close(out["kl"], (log_ratio.exp() - 1 - log_ratio).mean().detach())


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_overflowing_ratio_leaves_gradients_finite(advantage: float):
    loss = DualClipPPOLoss(actor := make_actor("normal"), make_critic(), dual_clip=3.0)
    batch = make_minibatch(actor, 4)
    batch["action_log_prob"] = torch.full((4,), -1e4)
    batch["advantage"] = torch.full((4, 1), advantage)
    out, gradients = results(loss, batch)
    assert out["loss_objective"].item() == pytest.approx(3.0 if advantage < 0 else -1.2)
    assert all(x is None or x.isfinite().all() for x in gradients["loss_objective"])


@pytest.mark.parametrize(("size", "stored"), [(8, -math.inf), (1, -math.inf), (1, math.inf)])
def test_ratios_that_are_infinite_or_zero(size: int, stored: float):
    batch = make_minibatch(make_actor("normal"), size)
    batch["action_log_prob"][0] = stored
    _, loss = make_pair("normal", log_explained_variance=False)
    losses = loss(batch)
    assert losses["mean_ratio"] == (math.inf if stored < 0 else 0)
    assert "explained_variance" not in losses


@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_gradcheck(kind: str):
    actor, critic = make_actor(kind, dtype=torch.float64), make_critic(dtype=torch.float64)
    loss = DualClipPPOLoss(actor, critic, dual_clip=2.0, kl_coeff=0.5, clip_value=0.3).double()
    batch = make_minibatch(actor, 16, dtype=torch.float64)
    names = [name for name, _ in loss.named_parameters()]

    def total(*parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(loss, named, (batch,), tie_weights=False)
        return torch.stack([x for name, x in out.items() if name.startswith("loss_")]).sum()

    parameters = tuple(p.detach().clone().requires_grad_() for p in loss.parameters())
    assert torch.autograd.gradcheck(total, parameters)
    assert torch.autograd.gradgradcheck(total, parameters)


def test_a_coefficient_for_each_objective():
    theirs, ours = make_pair("normal")
    batch = make_minibatch(make_actor("normal"), 8)
    for coefficient in ([0.5], [0.5, 1.5]):
        theirs.critic_coeff = ours.critic_coeff = torch.tensor(coefficient)
        torch.testing.assert_close(ours(batch)["loss_critic"], theirs(batch)["loss_critic"])


def test_out_keys_of_a_term_that_is_switched_off_later():
    _, loss = make_pair("normal", clip_value=0.2)
    loss.entropy_bonus, loss.clip_value = False, None
    found = set(loss(make_minibatch(make_actor("normal"), 8)).keys())
    assert set(loss.out_keys) <= found  # torchrl does not list the explained variance


def test_an_ensemble_under_vmap():
    batch, losses = make_minibatch(make_actor("normal"), 8), [make_pair("normal")[1] for _ in "ab"]
    losses[1].entropy_coeff, losses[0].critic_coeff = 0.5, 0.0
    names = ("loss_objective", "loss_critic")
    parameters, buffers = torch.func.stack_module_state(losses)  # pyright: ignore[reportArgumentType]

    def total(parameters: Any, buffers: Any) -> Tensor:
        state = (parameters, buffers)
        out = torch.func.functional_call(losses[0], state, (batch,), tie_weights=False)
        return sum((out[name] for name in names), torch.zeros(()))

    found = torch.func.vmap(total)(parameters, buffers)
    expected = torch.stack([sum(loss(batch)[name] for name in names) for loss in losses])
    torch.testing.assert_close(found, expected)
