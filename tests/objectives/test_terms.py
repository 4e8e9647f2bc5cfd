"""Masks, critic loss, KL penalty, coefficients and states of the loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tensordict.nn import NormalParamExtractor, TensorDictModule, set_composite_lp_aggregate
from torch import distributions as d
from torch import nn
from torchrl.modules import IndependentNormal, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import DualClipPPOLoss
from ppokit.networks import actor_critic
from tests.blocks import actor_of, make_critic
from tests.blocks import make_actor as make_simple_actor
from tests.objectives.common import (
    assert_alike,
    assert_same,
    log_ratio_of,
    make_actor,
    make_minibatch,
    make_pair,
    results,
)

# -- masks -----------------------------------------------------------------------


def padded(batch: TensorDict, extra: int, key: Any, rubbish: float) -> TensorDict:
    """The batch as a row with padding at the end, full of rubbish."""
    row = TensorDict({}, [1, batch.numel() + extra])
    for name, value in batch.items(True, True):
        full = value.new_zeros(1, batch.numel() + extra, *value.shape[1:])
        full[0, : batch.numel()] = value
        if value.is_floating_point():
            full[0, batch.numel() :] = rubbish
        row[name] = full
    row[key] = (torch.arange(batch.numel() + extra) < batch.numel()).unsqueeze(0)
    return row


@given(
    n=st.integers(2, 9),
    extra=st.integers(1, 4),
    key=st.sampled_from([("collector", "mask"), "shifted_valid", "custom"]),
    rubbish=st.sampled_from([math.nan, math.inf, 0.0, -1e30]),
    kind=st.sampled_from(["normal", "tanh_normal", "categorical", "composite"]),
    normalize=st.booleans(),
    stored=st.booleans(),
    seed=st.integers(0, 100),
)
def test_padding_changes_no_loss_no_gradient_and_no_diagnostic(
    n, extra, key, rubbish, kind, normalize, stored, seed
):
    with set_composite_lp_aggregate(False):
        actor, critic = make_simple_actor(kind), make_critic()
        loss = DualClipPPOLoss(
            actor,
            critic,
            dual_clip=2.0,
            critic_loss_clip=3.0,
            clip_value=0.3,
            kl_coeff=0.1,
            normalize_advantage=normalize,
            entropy_bonus=kind != "tanh_normal",  # sampled: another shape draws other numbers
        )
        if key == "custom":
            loss.loss_mask_key = key
        batch = make_minibatch(actor, n, seed=seed).exclude("mask")
        batch = batch if stored else batch.exclude("loc", "scale", "logits")
        expected, found = results(loss, batch), results(loss, padded(batch, extra, key, rubbish))
    # one number a frame, as in torchrl
    expected[0].pop("composite_entropy", None)
    expected[0]["explained_variance"] = expected[0]["explained_variance"].squeeze()
    assert_alike(found, expected, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["normal", "tanh-normal", "categorical", "unknown normal"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_minibatch_of_padding_alone_has_losses_of_0(kind: str, normalize: bool):
    options = {"normalize_advantage": normalize, "clip_value": 0.2}
    _, loss = make_pair(kind, ours={"kl_coeff": 0.1}, **options)
    batch = make_minibatch(loss.actor_network, 8)
    batch["collector", "mask"] = torch.zeros(8, dtype=torch.bool)
    for key in ("observation", "advantage", "value_target", "state_value", "action_log_prob"):
        batch[key] = torch.full_like(batch[key], math.nan)
    out, gradients = results(loss, batch)
    assert all(value == 0 for name, value in out.items() if name.startswith("loss_"))
    assert all(x is None or not x.any() for of_loss in gradients.values() for x in of_loss)
    assert out["kl"] == 0
    assert all(value.isfinite().all() for value in out.values())


def test_padding_in_an_entry_that_a_network_reads_whole():
    class ReadsPart(nn.Linear):
        def forward(self, input: Any) -> torch.Tensor:
            return super().forward(input["x"])

    actor = make_actor("categorical")
    actor[0].module, actor[0].in_keys = ReadsPart(4, 4), ["goal"]
    critic = ValueOperator(nn.Linear(4, 1), in_keys=[("goal", "x")])
    loss = DualClipPPOLoss(actor, critic)
    batch = make_minibatch(make_actor("categorical"), 3, 8)
    batch["goal", "x"] = batch["observation"]
    valid = torch.arange(8) < torch.tensor([[8], [3], [1]])
    expected = loss(batch[valid])
    batch["collector", "mask"] = valid
    batch["goal", "x"][~valid] = math.nan
    for given_batch in (batch, lazy_stack(list(batch.unbind(1)), 1)):
        found = loss(given_batch)
        for name in ("loss_objective", "loss_entropy", "loss_critic", "kl"):
            torch.testing.assert_close(found[name], expected[name])


def test_one_valid_frame_is_not_normalized():
    actor = make_actor("normal")
    batch = make_minibatch(actor, 8)
    alone = TensorDict.cat([batch[2:3], batch[2:3]])
    alone["collector", "mask"] = torch.tensor([True, False])
    options = {"entropy_bonus": False, "log_explained_variance": False}
    loss = DualClipPPOLoss(actor, make_critic(), normalize_advantage=True, **options)
    expected = DualClipPPOLoss(actor, make_critic(), **options)(batch[2:3])
    torch.testing.assert_close(loss(alone)["loss_objective"], expected["loss_objective"])


# -- the other terms ---------------------------------------------------------------


def test_value_clip_of_a_stored_value_that_is_nan():
    _, loss = make_pair("normal", clip_value=0.1)
    batch = make_minibatch(make_actor("normal"), 8)
    batch["state_value"][2] = math.nan
    assert loss(batch)["loss_critic"].isnan()


def assert_penalty(loss: Any, batch: TensorDict, expected: torch.Tensor) -> None:
    parameters = list(loss.actor_network.parameters())
    out = loss(batch)
    torch.testing.assert_close(out["loss_kl"], expected, rtol=1e-4, atol=1e-6)
    found = torch.autograd.grad(out["loss_kl"], parameters)
    wanted = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


class Matrix(d.Independent):
    """A normal of two event dimensions that is not known to the loss."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(d.Normal(loc, scale), 2)


@pytest.mark.parametrize(
    ("distribution", "options"),
    [(IndependentNormal, {"event_dim": 2}), (TanhNormal, {"event_dims": 2}), (Matrix, {})],
)
def test_kl_penalty_of_several_event_dimensions(distribution: Any, options: dict):
    network = nn.Sequential(nn.Linear(4, 12), nn.Unflatten(-1, (3, 4)), NormalParamExtractor())
    module = TensorDictModule(network, ["observation"], ["loc", "scale"])
    actor = actor_of(module, distribution, distribution_kwargs=options)
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.2, entropy_bonus=False)
    batch = make_minibatch(actor, 32)
    with torch.no_grad():
        network[0].bias += 0.3
    old = d.Normal(batch["loc"], batch["scale"])
    new = d.Normal(*network(batch["observation"]))
    assert_penalty(loss, batch, 0.2 * d.kl_divergence(old, new).sum((-2, -1)).mean())


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize("options", [{}, {"delay_actor": True}], ids=str)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", ["normal", "tanh_normal", "categorical"])
def test_kl_penalty_is_exact_with_stored_parameters(kind: str, mask: bool, options: dict):
    actor = make_simple_actor(kind)
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.2, **options)
    batch = make_minibatch(actor, 32)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    old = actor.build_dist_from_params(batch)
    new = actor.get_dist(batch.select("observation"))
    valid = torch.arange(32) < (20 if mask else 32)
    if mask:
        batch["collector", "mask"] = valid
    assert_penalty(loss, batch, 0.2 * d.kl_divergence(old, new)[valid].mean())


def test_a_compiled_actor_keeps_the_stored_parameters_for_the_kl_penalty():
    actor = make_actor("categorical")
    loss = DualClipPPOLoss(torch.compile(actor, backend="eager"), make_critic(), kl_coeff=0.2)
    assert "logits" in loss.entries(make_minibatch(actor, 8))


@pytest.mark.parametrize("moved", [0.5, 0.0, -3.0])
def test_kl_penalty_of_bits_that_are_certain_is_finite(moved: float):
    """In float32 the probability of a bit with a logit of 17 is 1."""
    actor, _ = actor_critic((spaces.Box(-1, 1, (4,)), spaces.MultiBinary(4)), hidden=())
    (linear,) = (x for x in actor.modules() if isinstance(x, nn.Linear))
    logits = torch.tensor([16.4, 0.3, -40.0, 60.0])
    linear.weight.data.zero_()
    linear.bias.data = logits
    batch = actor(TensorDict({"observation": torch.zeros(3, 4)}, [3])).detach()
    batch["advantage"], batch["value_target"] = torch.ones(3, 1), torch.zeros(3, 1)
    linear.bias.data = logits + moved
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=1.0)(batch)["loss_kl"]
    old, new = (x.double() for x in (logits, logits + moved))
    p, log = old.sigmoid(), nn.functional.logsigmoid
    expected = p * (log(old) - log(new)) + (-old).sigmoid() * (log(-old) - log(-new))
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-4, abs=1e-9)
    loss.backward()
    assert linear.bias.grad is not None
    assert linear.bias.grad.isfinite().all()


def test_kl_penalty_of_an_impossible_choice_is_finite():
    actor = make_actor("categorical")
    batch = make_minibatch(actor, 8)
    batch["logits"][:, 0] = -torch.inf
    loss_kl = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.2)(batch)["loss_kl"]
    assert loss_kl > 0
    assert loss_kl.isfinite()


class Summed(d.Normal):
    """Its log-probability is one number a frame, and torch's divergence of it one a dimension."""

    deterministic_sample = d.Normal.mean

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return super().log_prob(value).sum(-1)


@pytest.mark.parametrize("stored", [False, True])
def test_kl_penalty_is_estimated_without_a_divergence_of_each_frame(stored: bool):
    """Without stored parameters, or if torch's divergence is not one number a frame."""
    actor = make_actor("normal")
    if stored:
        actor[-1].distribution_class = Summed
    batch = make_minibatch(actor, 32)
    batch = batch if stored else batch.exclude("loc", "scale")
    log_ratio = log_ratio_of(actor, batch)
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.2, entropy_bonus=False)
    assert_penalty(loss, batch, 0.2 * (log_ratio.exp() - 1 - log_ratio).mean())


@pytest.mark.parametrize("term", ["kl", "entropy", "critic"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_coefficient_set_to_0_masks_an_infinite_term(term: str, stored: bool):
    actor = make_actor("normal")
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.2)
    batch = make_minibatch(actor, 4)
    batch["loc"][0] = torch.inf
    batch = batch if stored else batch.exclude("loc")
    batch["value_target"][0] = torch.inf
    batch["action_log_prob"][0] = -1e4
    setattr(loss, f"{term}_coeff", 0.0)
    out = loss(batch)[f"loss_{term}"]
    assert out == 0
    for gradient in torch.autograd.grad(out, list(loss.parameters()), allow_unused=True):
        assert gradient is None or not gradient.any()


def test_an_advantage_that_is_missing_is_estimated():
    actor, critic = make_actor("normal"), make_critic()
    batch = make_minibatch(actor, 3, 5).exclude("advantage", "value_target", "state_value")
    done = torch.zeros(3, 5, 1, dtype=torch.bool)
    batch["next"] = {"observation": torch.randn(3, 5, 4), "reward": torch.randn(3, 5, 1)}
    batch["next"].update({"done": done, "terminated": done})
    loss = DualClipPPOLoss(actor, critic)
    loss.make_value_estimator(gamma=0.9, lmbda=0.8)
    expected = TorchRLGAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())
    assert_alike(results(loss, batch), results(loss, expected), tolerance=1e-6)


def test_an_advantage_of_several_objectives():
    theirs, ours = make_pair("normal", entropy_bonus=False, critic_coeff=0)
    batch = make_minibatch(make_actor("normal"), 8)
    batch["advantage"] = torch.randn(8, 3)
    assert_same(theirs, ours, batch)
    expected = ours(batch[:5])["loss_objective"]
    batch["collector", "mask"] = torch.arange(8) < 5
    torch.testing.assert_close(ours(batch)["loss_objective"], expected)


# -- states: of losses that hold their parameters apart from the networks, and of others ---


def make(kind: Any, *, scale: float = 1.0, **options: Any) -> nn.Module:
    loss = kind(make_simple_actor(), make_critic(), **options)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.mul_(scale)
    return loss


def outputs(loss: nn.Module) -> dict[str, torch.Tensor]:
    out = loss(make_minibatch(make_simple_actor(), 16))
    return {name: out[name].detach() for name in ("loss_objective", "loss_critic", "kl_approx")}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("kind", [ClipPPOLoss, DualClipPPOLoss])
def test_they_are_loaded_across_both(kind: Any, written: bool, functional: bool, assign: bool):
    source = make(kind, scale=0.5, functional=written)
    state = dict(source.state_dict())
    names = list(state)
    for nested in (False, True):
        loss: Any = make(DualClipPPOLoss, functional=functional)
        whole = nn.ModuleDict({"loss": loss}) if nested else loss
        given = {f"loss.{name}": x for name, x in state.items()} if nested else state
        whole.load_state_dict(given, assign=assign)
        expected, found = outputs(source), outputs(loss)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert len(list(loss.parameters())) == 4
    assert list(state) == names


def test_the_default_needs_no_second_set_of_parameters():
    actor, critic = make_simple_actor(), make_critic()
    loss = DualClipPPOLoss(actor, critic)
    assert not loss.functional
    assert [*map(id, loss.parameters())] == [*map(id, [*actor.parameters(), *critic.parameters()])]
    assert DualClipPPOLoss(actor, critic, delay_actor=True).functional
    assert DualClipPPOLoss(actor, critic, functional=True).functional


@pytest.mark.parametrize("functional", [False, True])
def test_a_state_of_other_networks_is_refused(functional: bool):
    state = make(ClipPPOLoss, functional=not functional).state_dict()
    loss = make(DualClipPPOLoss, functional=functional)
    before = [p.clone() for p in loss.parameters()]
    lacking = {name: x for name, x in state.items() if not name.endswith("0.bias")}
    with pytest.raises((KeyError, RuntimeError), match=r"0\.bias"):
        loss.load_state_dict(lacking)
    assert all(torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
