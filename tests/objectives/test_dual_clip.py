"""The loss: ClipPPOLoss bit for bit without dual clip, a hand-written dual clip with it."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, set_composite_lp_aggregate
from torch import distributions as d
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import DualClipPPOLoss
from tests.blocks import loss_on_path, make_actor, make_critic, make_minibatch

KINDS = ["normal", "tanh_normal", "categorical", "composite"]
LOSSES = ("loss_objective", "loss_critic", "loss_entropy", "loss_kl")


@pytest.fixture(autouse=True)
def _one_log_prob_for_each_head():
    with set_composite_lp_aggregate(False):
        yield


def run(loss: nn.Module, batch: TensorDict, *, seed: int = 0) -> tuple[TensorDict, list]:
    """Losses, and gradients of their sum."""
    torch.manual_seed(seed)
    loss.zero_grad()
    out = loss(batch)
    sum(out[k].sum() for k in LOSSES if k in out).backward()
    gradients = [p.grad for p in loss.parameters() if p.requires_grad]
    return out.detach(), gradients


def make_pair(kind: str, *, ours: dict | None = None, **kwargs):
    actor, critic = make_actor(kind), make_critic()
    theirs = ClipPPOLoss(copy.deepcopy(actor), copy.deepcopy(critic), **kwargs)
    own = {"fast": False} | (ours or {})
    mine = loss_on_path(copy.deepcopy(actor), copy.deepcopy(critic), **kwargs, **own)
    return actor, theirs, mine


OPTIONS = [
    {},
    {"functional": False},
    {"clip_epsilon": (0.1, 0.3)},
    {"normalize_advantage": True},
    {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-1,)},
    {"clip_value": True},
    {"clip_value": 0.5, "loss_critic_type": "l2"},
    {"loss_critic_type": "l1", "critic_coeff": 0.5},
    {"entropy_bonus": False},
    {"samples_mc_entropy": 4, "entropy_coeff": 0.1},
    {"separate_losses": True},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"max_importance_ratio": 1.5},
    {"delay_actor": True},
    {"log_explained_variance": False},
    {"critic_coeff": 0},
]


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_dual_clip_it_is_clip_ppo_bit_for_bit(kind: str, options: dict):
    actor, theirs, mine = make_pair(kind, **options)
    batch = make_minibatch(actor, 16)
    expected, expected_grads = run(theirs, batch.clone())
    result, grads = run(mine, batch.clone())
    for key in expected.keys():
        a, b = expected[key], result[key]
        assert (a == b).all(), f"{key}: {a} != {b}"
    for a, b in zip(expected_grads, grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    names = [name.replace("_network_params.", "_network.") for name in theirs.state_dict()]
    assert names == [name.replace("_network_params.", "_network.") for name in mine.state_dict()]


def test_out_keys_end_with_ours():
    _, theirs, mine = make_pair("normal", ours={"kl_coeff": 0.1})
    before = list(theirs.out_keys or [])
    assert mine.out_keys == [*before, "kl", "dual_clip_fraction", "loss_kl"]


def test_called_by_keyword():
    actor, _, mine = make_pair("categorical")
    batch = make_minibatch(actor, 8)
    wanted = [k for k in mine.in_keys or [] if isinstance(k, str)]
    named = {key: batch[key] for key in [*wanted, "advantage", "value_target"]}
    mine.set_keys(advantage="advantage")
    values = mine(TensorDict(named, [8]))
    assert set(mine.out_keys) <= set(values.keys())


# -- dual clip -------------------------------------------------------------------


def hand_written(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    c: float,
    low: float,
    high: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    ratio = log_ratio.exp()
    s = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    s = torch.where(advantage < 0, torch.maximum(s, c * advantage), s)
    return -s.mean() if mask is None else -s[mask].mean()


def log_ratio_of(actor: ProbabilisticActor, batch: TensorDict) -> torch.Tensor:
    dist = actor.get_dist(batch)
    if isinstance(batch["action"], TensorDict):
        new = dist.log_prob(batch)
        total = sum(new[k] - batch[k] for k in actor.log_prob_keys)
    else:
        total = dist.log_prob(batch["action"]) - batch["action_log_prob"]
    return total.unsqueeze(-1)


@pytest.mark.parametrize("epsilon", [0.2, (0.1, 0.3)], ids=str)
@pytest.mark.parametrize("c", [1.1, 2.0, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_dual_clip_equals_hand_written_in_loss_and_gradient(kind: str, c: float, epsilon):
    actor = make_actor(kind)
    loss = DualClipPPOLoss(
        actor, make_critic(), dual_clip=c, clip_epsilon=epsilon, functional=False
    )
    batch = make_minibatch(actor, 64, spread=2.0)
    low, high = epsilon if isinstance(epsilon, tuple) else (epsilon, epsilon)
    expected = hand_written(log_ratio_of(actor, batch), batch["advantage"], c, low, high)
    parameters = list(actor.parameters())
    expected_grads = torch.autograd.grad(expected, parameters)
    out = loss(batch)
    grads = torch.autograd.grad(out["loss_objective"], parameters)
    torch.testing.assert_close(out["loss_objective"], expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)
    bounded = (batch["advantage"] < 0) & (log_ratio_of(actor, batch).exp() > c)
    assert bounded.any()
    torch.testing.assert_close(out["dual_clip_fraction"], bounded.float().mean())


def test_the_sign_is_that_of_the_normalised_advantage():
    actor = make_actor()
    batch = make_minibatch(actor, 64, spread=2.0)
    batch["advantage"] = batch["advantage"] + 100  # all positive before normalisation
    loss = DualClipPPOLoss(actor, make_critic(), dual_clip=2.0, normalize_advantage=True)
    normalised = (batch["advantage"] - batch["advantage"].mean()) / batch["advantage"].std()
    expected = hand_written(log_ratio_of(actor, batch), normalised, 2.0, 0.2, 0.2)
    out = loss(batch)
    torch.testing.assert_close(out["loss_objective"], expected, rtol=1e-4, atol=1e-5)
    assert out["dual_clip_fraction"] > 0


def test_diagnostics_are_those_of_the_unclamped_ratio():
    actor, _, plain = make_pair("normal")
    dual = DualClipPPOLoss(actor, make_critic(), dual_clip=1.5)
    batch = make_minibatch(actor, 64, spread=2.0)
    torch.manual_seed(0)
    expected = plain(batch)
    torch.manual_seed(0)
    out = dual(batch)
    assert out["loss_objective"] < expected["loss_objective"]
    for key in ("clip_fraction", "kl_approx", "ESS", "max_ratio", "mean_ratio", "kl"):
        torch.testing.assert_close(out[key], expected[key])


def test_kl_is_k3():
    actor, _, mine = make_pair("normal")
    batch = make_minibatch(actor, 32)
    log_ratio = log_ratio_of(actor, batch)
    expected = (log_ratio.exp() - 1 - log_ratio).mean()
    torch.testing.assert_close(mine(batch)["kl"], expected)


@pytest.mark.filterwarnings("ignore:The KL divergence is inf")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_overflowing_ratio_leaves_gradients_finite(advantage: float, fast: bool):
    actor = make_actor()
    loss = loss_on_path(actor, make_critic(), dual_clip=3.0, fast=fast)
    batch = make_minibatch(actor, 4)
    batch["action_log_prob"] = torch.full((4,), -1e4)
    batch["advantage"] = torch.full((4, 1), advantage)
    out, grads = run(loss, batch)
    assert out["loss_objective"].item() == pytest.approx(3.0 if advantage < 0 else -1.2)
    assert all(g.isfinite().all() for g in grads)


# -- masks -----------------------------------------------------------------------

MASKS = [("collector", "mask"), "shifted_valid", "custom"]


def padded(batch: TensorDict, extra: int, key, rubbish: float) -> TensorDict:
    """The batch as a row with padding at the end, full of rubbish."""
    row = TensorDict({}, [1, batch.numel() + extra])
    for name, value in batch.items(True, True):
        full = value.new_zeros(1, batch.numel() + extra, *value.shape[1:])
        full[0, : batch.numel()] = value
        if value.is_floating_point():
            full[0, batch.numel() :] = rubbish
        row[name] = full
    mask = torch.zeros(1, batch.numel() + extra, dtype=torch.bool)
    mask[0, : batch.numel()] = True
    row[key] = mask
    return row


@pytest.mark.parametrize("fast", [False, True])
@given(
    n=st.integers(2, 9),
    extra=st.integers(1, 4),
    key=st.sampled_from(MASKS),
    rubbish=st.sampled_from([float("nan"), float("inf"), 0.0, -1e30]),
    kind=st.sampled_from(["normal", "tanh_normal", "categorical", "composite"]),
    normalize=st.booleans(),
    stored=st.booleans(),
    seed=st.integers(0, 100),
)
def test_padding_changes_no_loss_no_gradient_and_no_diagnostic(
    fast: bool,
    n: int,
    extra: int,
    key,
    rubbish: float,
    kind: str,
    normalize: bool,
    stored: bool,
    seed: int,
):
    with set_composite_lp_aggregate(False):
        actor, critic = make_actor(kind), make_critic()
        loss = loss_on_path(
            actor,
            critic,
            dual_clip=2.0,
            critic_loss_clip=3.0,
            clip_value=0.3,
            kl_coeff=0.1,
            normalize_advantage=normalize,
            entropy_bonus=kind != "tanh_normal",  # sampled, so another with other shapes
            fast=fast,
        )
        if key == "custom":
            loss.loss_mask_key = key
        batch = make_minibatch(actor, n, seed=seed)
        batch = batch if stored else batch.exclude("loc", "scale", "logits")
        row = padded(batch, extra, key, rubbish)
        expected, expected_grads = run(loss, batch)
        result, grads = run(loss, row)
    for name in expected.keys():
        if name == "composite_entropy":
            continue  # per frame, as torchrl reports it
        a = result[name]
        assert a.ndim == 0, f"{name} has shape {a.shape}"
        b = expected[name].reshape(())
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- the other terms ---------------------------------------------------------------


def test_critic_loss_clip_clamps_the_loss():
    actor, critic = make_actor(), make_critic()
    batch = make_minibatch(actor, 32)
    batch["value_target"] *= 10
    loss = DualClipPPOLoss(actor, critic, critic_loss_clip=5.0, critic_coeff=0.5)
    value = critic(batch.clone())["state_value"]
    expected = F.smooth_l1_loss(value, batch["value_target"], reduction="none").clamp(max=5)
    assert (expected == 5).any()
    torch.testing.assert_close(loss(batch)["loss_critic"], 0.5 * expected.mean())


def assert_penalty(loss: nn.Module, batch: TensorDict, expected: torch.Tensor) -> None:
    parameters = list(loss.actor_network.parameters())
    out = loss(batch)
    torch.testing.assert_close(out["loss_kl"], expected, rtol=1e-4, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(out["loss_kl"], parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fast", [False, True])
def test_kl_penalty_is_summed_like_every_loss(fast: bool):
    actor = make_actor()
    loss = loss_on_path(actor, make_critic(), kl_coeff=0.2, functional=False, fast=fast)
    batch = make_minibatch(actor, 32).exclude("loc", "scale")
    log_ratio = log_ratio_of(actor, batch.copy())
    assert_penalty(loss, batch, 0.2 * (log_ratio.exp() - 1 - log_ratio).mean())


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize(
    "options", [{"fast": False}, {"fast": True}, {"delay_actor": True}], ids=str
)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", ["normal", "tanh_normal", "categorical"])
def test_kl_penalty_is_exact_where_the_old_policy_is_stored(kind: str, mask: bool, options: dict):
    actor = make_actor(kind)
    loss = loss_on_path(actor, make_critic(), kl_coeff=0.2, **options)
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


class Matrix(d.Independent):
    """A normal of two event dimensions that is not known to the loss."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(d.Normal(loc, scale), 2)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("distribution", "options"),
    [(IndependentNormal, {"event_dim": 2}), (TanhNormal, {"event_dims": 2}), (Matrix, {})],
)
def test_kl_penalty_of_several_event_dimensions(distribution: type, options: dict, fast: bool):
    network = nn.Sequential(nn.Linear(4, 12), nn.Unflatten(-1, (3, 4)), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )
    options = {"entropy_bonus": False, "functional": False, "fast": fast}
    loss = loss_on_path(actor, make_critic(), kl_coeff=0.2, **options)
    batch = make_minibatch(actor, 32)
    with torch.no_grad():
        network[0].bias += 0.3
    old = d.Normal(batch["loc"], batch["scale"])
    new = d.Normal(*network(batch["observation"]))
    assert_penalty(loss, batch, 0.2 * d.kl_divergence(old, new).sum((-2, -1)).mean())


class Summed(d.Normal):
    """Its log-probability is one number a frame, and torch's divergence of it one a dimension."""

    deterministic_sample = d.Normal.mean

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return super().log_prob(value).sum(-1)


def test_kl_penalty_is_estimated_where_the_divergence_is_not_one_number_a_frame():
    actor = make_actor()
    actor[-1].distribution_class = Summed
    batch = make_minibatch(actor, 32)
    options = {"kl_coeff": 0.2, "entropy_bonus": False, "functional": False}
    log_ratio = log_ratio_of(actor, batch.copy())
    loss = loss_on_path(actor, make_critic(), **options)
    assert_penalty(loss, batch, 0.2 * (log_ratio.exp() - 1 - log_ratio).mean())


def test_kl_penalty_of_an_impossible_choice_is_no_nan():
    actor = make_actor("categorical")
    batch = make_minibatch(actor, 8)
    batch["logits"][:, 0] = -torch.inf
    for fast in (False, True):
        loss = loss_on_path(actor, make_critic(), kl_coeff=0.2, functional=False, fast=fast)
        loss_kl = loss(batch)["loss_kl"]
        assert loss_kl > 0
        assert loss_kl.isfinite()


@pytest.mark.parametrize(
    ("name", "options"),
    [("kl_coeff", {"kl_coeff": 0.2}), ("entropy_coeff", {}), ("critic_coeff", {})],
)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.filterwarnings("ignore:The KL divergence is inf")
def test_a_term_scheduled_to_0_is_masked(name: str, options: dict, fast: bool, stored: bool):
    actor = make_actor()
    loss = loss_on_path(actor, make_critic(), fast=fast, **options)
    batch = make_minibatch(actor, 4)
    batch["loc"] = batch["loc"].clone()  # it is the action, too
    batch["loc"][0] = torch.inf
    if not stored:
        del batch["loc"]
    batch["value_target"][0] = torch.inf
    batch["action_log_prob"][0] = -1e4
    setattr(loss, name, 0.0)
    term = {"kl_coeff": "loss_kl", "entropy_coeff": "loss_entropy", "critic_coeff": "loss_critic"}
    out = loss(batch)[term[name]]
    assert out == 0
    for gradient in torch.autograd.grad(out, list(loss.parameters()), allow_unused=True):
        assert gradient is None or not gradient.any()


def test_coefficients_change_in_place_and_are_state(tmp_path: Path):
    arguments = {"dual_clip": 3.0, "critic_loss_clip": 5.0, "kl_coeff": 0.2}
    loss = DualClipPPOLoss(make_actor(), make_critic(), **arguments)
    values = {"dual_clip": 2.0, "critic_loss_clip": 4.0, "kl_coeff": 0.1, "entropy_coeff": 0.5}
    for name, value in values.items():
        buffer = getattr(loss, name)
        setattr(loss, name, value)
        assert getattr(loss, name) is buffer
    torch.save(loss.state_dict(), tmp_path / "state.pt")
    fresh = DualClipPPOLoss(make_actor(), make_critic(), **arguments)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for name, value in values.items():
        assert getattr(fresh, name).item() == pytest.approx(value)


def test_head_coefficients_are_one_buffer():
    actor = make_actor("composite")
    entropy_keys = {("action", "go_entropy"): 0.1, ("action", "turn_entropy"): 0.3}
    _, theirs, mine = make_pair("composite", entropy_coeff=entropy_keys)
    batch = make_minibatch(actor, 16)
    expected, _ = run(theirs, batch.clone())
    result, _ = run(mine, batch.clone())
    torch.testing.assert_close(result["loss_entropy"], expected["loss_entropy"])
    heads = {("action", "go"): 0.1, ("action", "turn"): 0.3}
    by_head, _ = run(make_pair("composite", entropy_coeff=heads)[2], batch.clone())
    assert torch.equal(by_head["loss_entropy"], result["loss_entropy"])
    assert "head_entropy_coeff" in mine.state_dict()
    mine.head_entropy_coeff.zero_()
    assert run(mine, batch)[0]["loss_entropy"] == 0
    with pytest.raises(AttributeError, match="one coefficient for each head"):
        mine.entropy_coeff = 0.1


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_alike(copier):
    actor = make_actor("composite")
    heads = {("action", "go"): 0.1, ("action", "turn"): 0.3}
    loss = DualClipPPOLoss(actor, make_critic(), dual_clip=2.0, entropy_coeff=heads)
    batch = make_minibatch(actor, 8)
    expected, grads = run(loss, batch)
    result, other = run(copier(loss), batch)
    assert (expected == result).all()
    assert all(torch.equal(a, b) for a, b in zip(grads, other, strict=True))


def test_an_advantage_that_is_missing_is_computed():
    actor, critic = make_actor(), make_critic()
    batch = make_minibatch(actor, 3, 5).exclude("advantage", "value_target", "state_value")
    done = torch.zeros(3, 5, 1, dtype=torch.bool)
    batch["next"] = TensorDict(
        {
            "observation": torch.randn(3, 5, 4),
            "reward": torch.randn(3, 5, 1),
            "done": done,
            "terminated": done,
        },
        [3, 5],
    )
    loss = DualClipPPOLoss(actor, critic)
    loss.make_value_estimator(gamma=0.9, lmbda=0.8)
    expected = TorchRLGAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())
    torch.testing.assert_close(
        run(loss, batch.clone())[0]["loss_objective"], run(loss, expected)[0]["loss_objective"]
    )


def test_float64_half_and_renamed_keys():
    actor, critic = make_actor(dtype=torch.float64), make_critic(dtype=torch.float64)
    batch = make_minibatch(actor, 8, dtype=torch.float64)
    loss = DualClipPPOLoss(actor, critic, dual_clip=2.0)
    out = loss(batch)
    assert out["loss_objective"].dtype is torch.float64
    batch["data", "adv"] = batch.pop("advantage")
    loss.set_keys(advantage=("data", "adv"))
    assert torch.equal(loss(batch)["loss_objective"], out["loss_objective"])


def test_float64_dual_clip_to_1e_12():
    actor, critic = make_actor(dtype=torch.float64), make_critic(dtype=torch.float64)
    batch = make_minibatch(actor, 64, dtype=torch.float64, spread=2.0)
    batch["advantage"] = -batch["advantage"].abs()  # torchrl's clip_epsilon is a float32 buffer
    loss = DualClipPPOLoss(actor, critic, dual_clip=2.0, clip_epsilon=1.0)
    expected = hand_written(log_ratio_of(actor, batch), batch["advantage"], 2.0, 1.0, 1.0)
    torch.testing.assert_close(loss(batch)["loss_objective"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_gradcheck(kind: str):
    actor, critic = make_actor(kind, dtype=torch.float64), make_critic(dtype=torch.float64)
    loss = DualClipPPOLoss(
        actor, critic, dual_clip=2.0, kl_coeff=0.5, clip_value=0.3, functional=False
    ).double()
    batch = make_minibatch(actor, 16, dtype=torch.float64)
    names = [name for name, _ in loss.named_parameters()]

    def total(*parameters: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(loss, named, (batch,), tie_weights=False)
        return torch.stack([out[key] for key in LOSSES]).sum()

    parameters = tuple(p.detach().clone().requires_grad_() for p in loss.parameters())
    assert torch.autograd.gradcheck(total, parameters)


@given(seed=st.integers(0, 1000))
def test_order_of_samples_does_not_matter(seed: int):
    actor = make_actor()
    loss = DualClipPPOLoss(actor, make_critic(), dual_clip=2.0)
    batch = make_minibatch(actor, 12, seed=seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    a, b = run(loss, batch)[0], run(loss, batch[order])[0]
    for key in ("loss_objective", "loss_critic", "kl", "clip_fraction", "dual_clip_fraction"):
        torch.testing.assert_close(a[key], b[key])


# -- rl8's figures -----------------------------------------------------------------

CASES = json.loads((Path(__file__).parents[1] / "data" / "rl8.json").read_text())["ppo_losses"]


class Recorded(nn.Module):
    """What the golden file gives the loss in place of a network: parameters that are the output."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        super().__init__()
        self.outputs = nn.ParameterList(outputs)

    def forward(self, _: torch.Tensor):
        outputs = [p * 1 for p in self.outputs]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


DEFAULTS = {
    "clip_param": 0.2,
    "dual_clip_param": 5.0,
    "entropy_coeff": 0.0,
    "vf_clip_param": 1.0,
    "vf_coeff": 1.0,
}


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["distribution"] in ("categorical", "normal")],
    ids=lambda c: c["name"],
)
def test_rl8s_losses_and_gradients(case: dict):
    dtype = getattr(torch, case["dtype"])
    tensor = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
    names = {"categorical": ["logits"], "normal": ["mean", "log_std"]}[case["distribution"]]
    features = [tensor(case["features"][name]) for name in names]
    make = {"categorical": RecordedCategorical, "normal": RecordedNormal}[case["distribution"]]
    network = Recorded(*features)
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], names),
        in_keys={"logits": "logits"} if len(names) == 1 else {"mean": "mean", "log_std": "log_std"},
        distribution_class=make,
        return_log_prob=True,
    )
    critic = ValueOperator(Recorded(tensor(case["values"]).unsqueeze(-1)), ["observation"])
    params = DEFAULTS | case["params"]
    loss = DualClipPPOLoss(
        actor,
        critic,
        clip_epsilon=params["clip_param"],
        dual_clip=params["dual_clip_param"],
        critic_loss_clip=params["vf_clip_param"],
        critic_coeff=params["vf_coeff"],
        entropy_coeff=params["entropy_coeff"],
        functional=False,
    )
    for buffer in ("clip_epsilon", "critic_coeff", "entropy_coeff", "dual_clip"):
        if getattr(loss, buffer) is not None:
            setattr(loss, buffer, getattr(loss, buffer).to(dtype))
    n = len(case["advantages"])
    actions = torch.tensor(case["actions"])
    batch = TensorDict(
        {
            "observation": torch.zeros(n, 1, dtype=dtype),
            "action": actions if names == ["logits"] else actions.to(dtype),
            "action_log_prob": tensor(case["old_logp"]),
            "advantage": tensor(case["advantages"]).unsqueeze(-1),
            "value_target": tensor(case["returns"]).unsqueeze(-1),
        },
        [n],
    )
    out = loss(batch)
    close = {"rtol": 1e-6, "atol": 1e-7}
    recorded = case["out"]
    torch.testing.assert_close(-out["loss_objective"], tensor(recorded["policy"]), **close)
    vf = out["loss_critic"] / params["vf_coeff"]
    torch.testing.assert_close(vf, tensor(recorded["vf"]), **close)
    torch.testing.assert_close(out["kl"], tensor(case["kl_k3"]), **close)
    total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
    torch.testing.assert_close(total, tensor(recorded["total"]), **close)
    total.backward()
    torch.testing.assert_close(
        critic.module.outputs[0].grad.squeeze(-1), tensor(case["grad_values"]), **close
    )
    for name, output in zip(names, network.outputs, strict=True):
        torch.testing.assert_close(output.grad, tensor(case["grad_features"][name]), **close)


class RecordedCategorical(d.Categorical):
    """rl8's logits are [N, actions, classes] with one action here."""

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return super().log_prob(value).sum(-1)

    def entropy(self) -> torch.Tensor:
        return super().entropy().sum(-1)


class RecordedNormal(d.Independent):
    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor) -> None:
        super().__init__(d.Normal(mean, log_std.exp()), 1)


# -- bad input ----------------------------------------------------------------------


def build(**kwargs) -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic(), **kwargs)


@pytest.mark.parametrize("value", [1.0, 0.5, -3.0])
def test_dual_clip_must_exceed_1(value: float):
    with pytest.raises(ValueError, match=f"dual_clip must exceed 1, got {value}"):
        build(dual_clip=value)


@pytest.mark.parametrize("name", ["entropy_coeff", "critic_coeff", "kl_coeff"])
def test_negative_coefficients(name: str):
    with pytest.raises(ValueError, match=rf"{name} must lie in \[0, inf\), got -0.1"):
        build(**{name: -0.1})


def test_negative_head_coefficient():
    with pytest.raises(ValueError, match="entropy_coeff must lie in"):
        build(entropy_coeff={"a": 0.1, "b": -1.0})


@pytest.mark.parametrize("value", [-0.1, 1.5, (0.2, -0.1)], ids=str)
def test_clip_epsilon_out_of_range(value):
    with pytest.raises(ValueError, match="clip_epsilon"):
        build(clip_epsilon=value)


def test_critic_loss_clip_must_be_positive():
    with pytest.raises(ValueError, match="critic_loss_clip must be positive, got 0"):
        build(critic_loss_clip=0.0)


@pytest.mark.parametrize("name", ["dual_clip", "critic_loss_clip", "kl_coeff", "clip_value"])
def test_scheduling_an_absent_term(name: str):
    with pytest.raises(AttributeError, match=f"{name} was None .or 0. when the loss was built"):
        setattr(build(), name, 2.0)


def test_scheduling_a_critic_built_with_0():
    with pytest.raises(AttributeError, match="critic_coeff was None"):
        build(critic_coeff=0).critic_coeff = 1.0
    with pytest.raises(AttributeError, match="critic_coeff was None"):
        DualClipPPOLoss(make_actor(), None, critic_coeff=0).critic_coeff = 1.0


@pytest.mark.parametrize("key", ["action_log_prob", "value_target"])
def test_missing_keys(key: str):
    batch = make_minibatch(make_actor(), 4).exclude(key)
    with pytest.raises(KeyError, match=key):
        build()(batch)


def test_missing_old_value():
    batch = make_minibatch(make_actor(), 4).exclude("state_value")
    with pytest.raises(
        KeyError, match=r"clip_value is set to 0\.2.*the key state_value was not found"
    ):
        build(clip_value=0.2)(batch)


def test_flat_advantage():
    batch = make_minibatch(make_actor(), 4)
    batch["advantage"] = batch["advantage"].squeeze(-1)
    with pytest.raises(ValueError, match=r"'advantage' has shape \[4\].*unsqueeze"):
        build()(batch)


def test_flat_value_target():
    batch = make_minibatch(make_actor(), 4)
    batch["value_target"] = batch["value_target"].squeeze(-1)
    with pytest.raises(ValueError, match=r"value_target.*\[4\].*\[4, 1\]"):
        build()(batch)


def test_missing_head_coefficient():
    actor = make_actor("composite")
    loss = DualClipPPOLoss(actor, make_critic(), entropy_coeff={("action", "go"): 0.1})
    with pytest.raises(KeyError, match=r"no entry for the action head.*turn"):
        loss(make_minibatch(actor, 4))


def test_the_batch_is_not_modified():
    actor = make_actor()
    batch = make_minibatch(actor, 4)
    batch["collector", "mask"] = torch.tensor([True, True, False, True])
    before = batch.clone()
    DualClipPPOLoss(actor, make_critic(), normalize_advantage=True)(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()
