"""The loss on its fast path: torchrl's results, in C and in torch, or torchrl's own path."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import distributions as d
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    IndependentNormal,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)

from ppokit import DualClipPPOLoss, TensorActor
from tests.blocks import IndependentNormal as OtherNormal
from tests.blocks import loss_on_path, make_critic, make_minibatch

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tanh-normal": (TanhNormal, {}),
    "tanh-normal, bounded": (TanhNormal, {"low": -2.0, "high": 0.5}),
    "tanh-normal, tensor bounds": (TanhNormal, {"low": torch.tensor(-1), "high": torch.tensor(3)}),
    "tanh-normal, bounds of their own": (TanhNormal, {"high": torch.tensor([1.0, 2.0])}),
    "tanh-normal, the same bounds": (
        TanhNormal,
        {"low": -2 * torch.ones(2), "high": torch.ones(2)},
    ),
    "tanh-normal, tanh_loc": (TanhNormal, {"tanh_loc": True}),
    "normal": (IndependentNormal, {}),
    "another normal": (OtherNormal, {}),
    "categorical": (d.Categorical, {}),
    "one-hot": (OneHotCategorical, {}),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dual_clip": 1.5},
    {"functional": False, "clip_epsilon": (0.1, 0.3)},
    {"normalize_advantage": True},
    {"clip_value": True},
    {"clip_value": 0.5, "loss_critic_type": "l2", "critic_loss_clip": 0.7},
    {"clip_value": 0.5, "loss_critic_type": "l1", "critic_coeff": 0.5},
    {"entropy_bonus": False},
    {"samples_mc_entropy": 4, "entropy_coeff": 0.1},
    {"separate_losses": True},
    {"reduction": "sum", "kl_coeff": 0.3},
    {"log_explained_variance": False},
    {"critic_coeff": 0},
]


def make_actor(kind: str, dtype: torch.dtype = torch.float32) -> ProbabilisticActor:
    """A policy from 4 observations to 2 actions, or to a choice of 4."""
    torch.manual_seed(0)
    distribution, options = KINDS[kind]
    network: nn.Module = nn.Linear(4, 4, dtype=dtype)
    keys = ["logits"]
    if distribution not in (d.Categorical, OneHotCategorical):
        network, keys = nn.Sequential(network, NormalParamExtractor()), ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )


def losses_and_gradients(
    loss: nn.Module, batch: TensorDict, *, seed: int = 0
) -> tuple[TensorDict, dict[str, Any]]:
    """What the loss returns, and each loss's own gradients."""
    torch.manual_seed(seed)
    out = loss(batch)
    parameters = [p for p in loss.parameters() if p.requires_grad]
    names = [name for name in out.keys() if name.startswith("loss_")]
    gradients = {
        name: torch.autograd.grad(out[name].sum(), parameters, retain_graph=True, allow_unused=True)
        for name in names
    }
    return out.detach(), gradients


def assert_same(a: nn.Module, b: nn.Module, batch: TensorDict, *, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    before = batch.clone()
    expected, their_gradients = losses_and_gradients(a, batch)
    result, gradients = losses_and_gradients(b, batch)
    assert set(result.keys()) == set(expected.keys())
    for name, value in expected.items():
        assert result[name].shape == value.shape, name
        assert result[name].dtype == value.dtype, name
        torch.testing.assert_close(result[name], value, **close, msg=lambda m, n=name: f"{n}: {m}")
    for name, theirs in their_gradients.items():
        for one, other in zip(gradients[name], theirs, strict=True):
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, **close, msg=lambda m, n=name: f"{n}: {m}")
    assert (batch == before).all()


def make_pair(kind: str, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, nn.Module]:
    actor, critic = make_actor(kind, dtype), make_critic(dtype=dtype)
    slow = loss_on_path(copy.deepcopy(actor), copy.deepcopy(critic), fast=False, **options)
    return slow.to(dtype), loss_on_path(actor, critic, **options).to(dtype)


def takes_tensors(loss: nn.Module) -> bool:
    """Whether the last forward took the fast path."""
    return "path=tensors" in repr(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_fast_path_is_torchrls(kind: str, options: dict, dtype: torch.dtype):
    slow, fast = make_pair(kind, dtype, **options)
    batch = make_minibatch(make_actor(kind, dtype), 16, dtype=dtype)
    assert_same(slow, fast, batch, tolerance=3e-6 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_choice_of_a_relaxed_action_is_its_largest(dtype: torch.dtype):
    slow, fast = make_pair("one-hot", torch.float32)
    batch = make_minibatch(make_actor("one-hot"), 16)
    batch["action"] = batch["action"].to(dtype).softmax(-1)
    assert_same(slow, fast, batch, tolerance=3e-6)
    assert takes_tensors(fast)


@pytest.mark.parametrize("dual_clip", [None, 1.1])
def test_float64_networks_with_coefficients_in_float32(dual_clip: float | None):
    actor, critic = make_actor("tanh-normal", torch.float64), make_critic(dtype=torch.float64)
    slow, fast = (
        loss_on_path(actor, critic, functional=False, dual_clip=dual_clip, fast=fast)
        for fast in (False, True)
    )
    batch = make_minibatch(actor, 64, dtype=torch.float64)
    assert_same(slow, fast, batch, tolerance=1e-12)


# -- what else the fast path meets ---------------------------------------------------


@pytest.mark.parametrize("kind", ["tanh-normal", "categorical", "another normal"])
def test_batches_may_have_several_dimensions(kind: str):
    slow, fast = make_pair(kind, torch.float64)
    batch = make_minibatch(make_actor(kind, torch.float64), 16, dtype=torch.float64)
    assert_same(slow, fast, batch.reshape(2, 8), tolerance=1e-12)
    assert_same(slow, fast, batch[:1], tolerance=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["tanh-normal", "categorical", "another normal"])
def test_under_a_mask(kind: str, reduction: str):
    slow, fast = make_pair(
        kind, torch.float64, reduction=reduction, clip_value=0.3, normalize_advantage=True
    )
    batch = make_minibatch(make_actor(kind, torch.float64), 3, 8, dtype=torch.float64)
    batch["collector", "mask"] = torch.arange(8) < torch.tensor([[8], [3], [1]])
    assert_same(slow, fast, batch, tolerance=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_stacks(dim: int, masked: bool):
    slow, fast = make_pair("normal", torch.float64, normalize_advantage=True, clip_value=0.3)
    # As many rows as steps: a transposed entry has the right shape.
    batch = make_minibatch(make_actor("normal", torch.float64), 8, 8, dtype=torch.float64)
    if masked:
        batch["collector", "mask"] = torch.arange(8) < torch.arange(1, 9).unsqueeze(1)
        batch["observation"][0, 1:] = math.nan
    expected, their_gradients = losses_and_gradients(fast, batch)
    for loss in (slow, fast):
        result, gradients = losses_and_gradients(loss, lazy_stack(list(batch.unbind(dim)), dim))
        torch.testing.assert_close(result.to_dict(), expected.to_dict())
        torch.testing.assert_close(gradients, their_gradients)
    assert takes_tensors(fast)


def shared_pair(
    extra: nn.Module | None = None,
    *,
    actor: nn.Module | None = None,
    critic: nn.Module | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Slow and fast losses over actor and critic that share an encoder.

    Args:
        extra: after its first layer.
        actor: before the actor's head.
        critic: before the critic's.
        **options: of the losses.
    """
    torch.manual_seed(0)
    layer = nn.Linear(4, 5)
    body = TensorDictModule(nn.Sequential(layer, extra or nn.Tanh()), ["observation"], ["hidden"])
    network = nn.Sequential(actor or nn.Identity(), nn.Linear(5, 4), NormalParamExtractor())
    policy = ProbabilisticActor(
        TensorDictSequential(body, TensorDictModule(network, ["hidden"], ["loc", "scale"])),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    head = nn.Sequential(critic or nn.Identity(), nn.Linear(5, 1))
    value = TensorDictSequential(body, ValueOperator(head, in_keys=["hidden"]))
    options = {"functional": False} | options
    slow, fast = (loss_on_path(policy, value, fast=fast, **options) for fast in (False, True))
    return slow, fast


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("functional", [False, True])
def test_a_separate_critic_loss_leaves_the_shared_encoder_alone(functional: bool, fast: bool):
    slow, loss = shared_pair(separate_losses=True, functional=functional)
    loss = loss if fast else slow
    batch = make_minibatch(loss.actor_network, 16)
    out = loss(batch)
    out["loss_critic"].backward(retain_graph=True)
    assert all(p.grad is None for p in loss.parameters() if p.shape in ((5, 4), (5,)))
    (out["loss_objective"] + out["loss_entropy"]).backward()
    weights = [p for p in loss.parameters() if p.shape == (5, 4) and p.requires_grad]
    assert weights
    assert all(p.grad.abs().sum() > 0 for p in weights)


def test_losses_of_separate_networks_run_backward_one_after_the_other():
    slow, fast = make_pair("normal", torch.float32, functional=False)
    batch = make_minibatch(make_actor("normal"), 16)
    _, expected = losses_and_gradients(slow, batch)
    torch.manual_seed(0)
    out = fast(batch)
    out["loss_critic"].backward()  # and frees no more than the critic's graph
    (out["loss_objective"] + out["loss_entropy"]).backward()
    sums = zip(*expected.values(), strict=True)
    for parameter, parts in zip(fast.parameters(), sums, strict=True):
        torch.testing.assert_close(parameter.grad, sum(part for part in parts if part is not None))


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("of", ["actor", "critic"])
def test_a_head_that_writes_over_the_shared_encoders_output(of: str, functional: bool):
    first = nn.ReLU(inplace=True)
    slow, fast = shared_pair(nn.Identity(), functional=functional, **{of: first})
    assert_same(slow, fast, make_minibatch(slow.actor_network, 16), tolerance=3e-6)


def test_hooks_on_the_modules_are_called():
    slow, fast = shared_pair()
    batch = make_minibatch(slow.actor_network, 16)
    head = slow.actor_network[0][1]
    called = []
    head.register_forward_hook(lambda *_: called.append(True))
    assert_same(slow, fast, batch, tolerance=3e-6)
    assert len(called) == 2


def test_a_recurrent_policy():
    torch.manual_seed(0)
    lstm = LSTMModule(input_size=4, hidden_size=5, in_key="observation", out_key="hidden")
    head = TensorDictModule(
        nn.Sequential(nn.Linear(5, 4), NormalParamExtractor()), ["hidden"], ["loc", "scale"]
    )
    actor = ProbabilisticActor(
        TensorDictSequential(lstm, head),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    slow, fast = (
        loss_on_path(actor, critic, functional=False, fast=fast) for fast in (False, True)
    )
    states = {name: torch.zeros(3, 6, 1, 5) for name in ("recurrent_state_h", "recurrent_state_c")}
    batch = TensorDict({"observation": torch.randn(3, 6, 4), **states}, [3, 6])
    batch["is_init"] = torch.zeros(3, 6, 1, dtype=torch.bool)
    with set_recurrent_mode(True), torch.no_grad():
        batch = actor(batch).detach()
    for name in ("advantage", "value_target"):
        batch[name] = torch.randn(3, 6, 1)
    assert_same(slow, fast, batch, tolerance=3e-6)


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{"reduction": "none"}, {"max_importance_ratio": 1.5}, {"delay_actor": True}],
    ids=str,
)
def test_what_an_option_forbids_takes_torchrls_path(options: dict):
    slow, fast = make_pair("tanh-normal", torch.float32, **options)
    batch = make_minibatch(make_actor("tanh-normal"), 16)
    assert_same(slow, fast, batch, tolerance=0.0)


class Parts(CompositeDistribution):
    """An action in parts, by a class of the user's own."""


@pytest.mark.filterwarnings("ignore:You are using a composite distribution, yet:UserWarning")
@pytest.mark.parametrize(
    "distribution",
    [
        functools.partial(CompositeDistribution, distribution_map={"action": OtherNormal}),
        functools.partial(Parts, distribution_map={"action": OtherNormal}),
    ],
    ids=["partial", "subclass"],
)
def test_the_networks_of_an_action_in_parts_are_called_once(distribution: Any):
    norm = nn.BatchNorm1d(4)
    network = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(), NormalParamExtractor())
    keys: Any = [("params", "action", "loc"), ("params", "action", "scale")]
    with set_composite_lp_aggregate(True):
        actor = ProbabilisticActor(
            TensorDictModule(network, ["observation"], keys),
            in_keys=["params"],
            distribution_class=distribution,
            return_log_prob=True,
        )
        batch = make_minibatch(actor.eval(), 16)
        actor.train()
        DualClipPPOLoss(actor, make_critic(), functional=False)(batch)
    assert norm.num_batches_tracked == 1


def test_what_a_subclass_overrides_is_not_passed_over():
    class Halved(DualClipPPOLoss):
        def _critic_loss_inputs(self, target_return, state_value, old_state_value):
            return target_return / 2, state_value / 2, old_state_value

    class Named(DualClipPPOLoss):
        pass

    actor, critic = make_actor("tanh-normal"), make_critic()
    batch = make_minibatch(actor, 16)
    halved = Halved(actor, critic, functional=False)
    usual = DualClipPPOLoss(actor, critic, functional=False)
    assert halved(batch)["loss_critic"] < usual(batch)["loss_critic"]
    assert "because Halved has a _critic_loss_inputs of its own" in repr(halved)
    named = Named(actor, critic, functional=False)
    named(batch)
    assert takes_tensors(named)


def test_what_an_instance_overrides_is_not_passed_over():
    def replaced(part: Any, name: str, replacement: Any) -> None:
        batch = make_minibatch(make_actor("normal"), 16)
        slow, fast = make_pair("normal", torch.float32, functional=False)
        before = fast(batch)
        for loss in (slow, fast):
            setattr(part(loss), name, replacement(part(loss)))
        assert_same(slow, fast, batch, tolerance=3e-6)
        assert fast(batch)["entropy"] != before["entropy"]

    def widened(head: Any) -> Any:
        return lambda tensordict: OtherNormal(tensordict["loc"], 2 * tensordict["scale"])

    def shrunk(actor: Any) -> Any:
        def parameters(*args: Any, **kwargs: Any) -> Any:
            tensordict = type(actor).get_dist_params(actor, *args, **kwargs)
            return tensordict.set("scale", tensordict["scale"] / 2)

        return parameters

    def doubled(loss: Any) -> Any:
        return lambda *args, **kwargs: 2 * type(loss)._get_entropy(loss, *args, **kwargs)

    replaced(lambda loss: loss.actor_network[-1], "get_dist", widened)
    replaced(lambda loss: loss.actor_network, "get_dist_params", shrunk)
    replaced(lambda loss: loss, "_get_entropy", doubled)


def test_without_an_advantage_the_loss_computes_it():
    slow, fast = make_pair("normal", torch.float32)
    batch = make_minibatch(make_actor("normal"), 2, 8).select(
        "observation", "action", "action_log_prob"
    )
    batch["next"] = {
        "observation": torch.randn(2, 8, 4),
        "reward": torch.randn(2, 8, 1),
        "done": torch.zeros(2, 8, 1, dtype=torch.bool),
        "terminated": torch.zeros(2, 8, 1, dtype=torch.bool),
    }
    assert_same(slow, fast, batch, tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
def test_parameters_that_are_not_numbers_give_what_torchrl_gives():
    for kind in ("tanh-normal", "categorical"):
        for loss in make_pair(kind, torch.float32, functional=False):
            batch = make_minibatch(make_actor(kind), 8)
            with torch.no_grad():
                next(loss.actor_network.parameters()).fill_(math.nan)
            if kind == "tanh-normal" or type(loss) is DualClipPPOLoss:
                losses = loss(batch)
                assert losses["kl"].isnan()
                assert losses["loss_objective"].isnan()
            else:
                with pytest.raises(RuntimeError, match="tensor contains"):
                    loss(batch)


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
def test_of_logits_of_which_none_is_possible_the_loss_is_no_number():
    loss = make_pair("categorical", torch.float32, functional=False)[1]
    network = loss.actor_network[0]
    network.module = nn.Sequential(network.module, nn.Threshold(math.inf, -math.inf))
    assert loss(make_minibatch(make_actor("categorical"), 8))["loss_objective"].isnan()


def test_what_is_returned_may_be_written_to():
    _, fast = make_pair("tanh-normal", torch.float32)
    batch = make_minibatch(make_actor("tanh-normal"), 16)
    parameters = list(fast.parameters())
    out = fast(batch)
    expected = torch.autograd.grad(2 * out["loss_critic"], parameters, allow_unused=True)
    out = fast(batch)
    out["kl"].fill_(0)
    out["loss_critic"].mul_(2)
    found = torch.autograd.grad(out["loss_critic"], parameters, allow_unused=True)
    torch.testing.assert_close(found, expected)


def test_impossible_actions_are_told_as_torchrl_tells_them():
    slow, fast = make_pair("categorical", torch.float32)
    batch = make_minibatch(make_actor("categorical"), 8)
    batch["action"][3] = 4
    with pytest.raises((ValueError, RuntimeError)) as expected:
        slow(batch)
    with pytest.raises(expected.type):
        fast(batch)


@pytest.mark.parametrize("kind", ["tanh-normal", "categorical", "another normal"])
def test_bfloat16_is_torchrls(kind: str):
    slow, fast = make_pair(kind, torch.bfloat16, entropy_bonus=False)
    batch = make_minibatch(make_actor(kind, torch.bfloat16), 16, dtype=torch.bfloat16)
    assert_same(slow, fast, batch, tolerance=0.02)


# torch._dynamo makes an instance of each autograd function that it traces, and torch warns of that.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        "tanh-normal",
        "categorical",
        pytest.param("tanh-normal, bounds of their own", marks=pytest.mark.slow),
        pytest.param("another normal", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_whole_and_once(kind: str):
    torch._dynamo.reset()
    options = {"dual_clip": 5.0, "clip_value": 0.2, "critic_loss_clip": 9.0, "kl_coeff": 0.1}
    actor = make_actor(kind)
    loss = loss_on_path(actor, make_critic(), functional=False, entropy_coeff=0.0, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    batch = make_minibatch(actor, 16)
    out = compiled(batch)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(20):
            loss.clip_epsilon = 0.2 - seed * 1e-3
            loss.critic_coeff = 1 + seed * 0.01
            loss.dual_clip, loss.kl_coeff, loss.clip_value = 5.0 - seed * 0.01, seed * 0.1, 0.3
            batch = make_minibatch(actor, 16, seed=seed)
            out = compiled(batch)
    expected, gradients = losses_and_gradients(loss, batch)
    for name, value in expected.items():
        if "entropy" not in name:  # sampled from another stream of random numbers
            torch.testing.assert_close(out[name], value)
    parameters = list(loss.parameters())
    for name in ("loss_objective", "loss_critic", "loss_kl"):
        own = torch.autograd.grad(out[name], parameters, retain_graph=True, allow_unused=True)
        for one, other in zip(own, gradients[name], strict=True):
            other = torch.zeros_like(one) if other is None and one is not None else other
            torch.testing.assert_close(one, other)


def test_torch_func_and_forward_mode_take_torchrls_path():
    slow, fast = make_pair("normal", torch.float64, functional=True)
    batch = make_minibatch(make_actor("normal", torch.float64), 16, dtype=torch.float64)
    found = []
    for loss in (slow, fast):
        parameters = loss.actor_network_params.data

        def objective(values, loss=loss):
            with values.to_module(loss.actor_network_params):
                return loss(batch)["loss_objective"]

        gradients = torch.func.grad(objective)(parameters)
        found.append(dict(gradients.items(True, True)))
    torch.testing.assert_close(found[1], found[0])


def test_second_derivatives():
    batch = make_minibatch(make_actor("normal", torch.float64), 16, dtype=torch.float64)
    found = []
    for loss in make_pair("normal", torch.float64):
        objective, parameters = loss(batch)["loss_objective"], list(loss.parameters())
        first = torch.autograd.grad(objective, parameters, create_graph=True, allow_unused=True)
        total = sum(x.square().sum() for x in first if x is not None)
        found.append(torch.autograd.grad(total, parameters, allow_unused=True))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["tanh-normal", "categorical", "another normal"])
def test_under_autocast(kind: str):
    slow, fast = make_pair(kind, torch.float32)
    batch = make_minibatch(make_actor(kind), 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, their_gradients = losses_and_gradients(slow, batch)
        result, gradients = losses_and_gradients(fast, batch)
    for name, value in expected.items():  # torchrl's are bfloat16, some of them
        torch.testing.assert_close(result[name].float(), value.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradients, their_gradients, rtol=0.05, atol=0.02)


# -- wirings that keys alone do not tell -------------------------------------------------


class Feature(nn.Module):
    """Returns a dict, which torchrl writes as a TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.layer(x).tanh()}


def choice_of(*modules: Any) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictSequential(*modules),
        in_keys=["logits"],
        distribution_class=d.Categorical,
        return_log_prob=True,
    )


def compare(actor: Any, critic: Any, *shape: int, **options: Any) -> None:
    """Fast and slow agree, also where the batch holds what was written at collection."""
    batch = TensorDict({"observation": torch.randn(*shape, 4)}, shape)
    with torch.no_grad():
        batch.update(actor(batch.clone()).detach().clone())
    for name in ("advantage", "value_target", "state_value"):
        batch[name] = torch.randn(*shape, 1)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    options = {"functional": False} | options
    slow, fast = (loss_on_path(actor, critic, fast=fast, **options) for fast in (False, True))
    assert_same(slow, fast, batch, tolerance=3e-6)
    assert takes_tensors(fast)


def test_a_module_that_reads_a_part_of_what_another_wrote():
    feature = TensorDictModule(Feature(), ["observation"], ["feature"])
    head = TensorDictModule(nn.Linear(6, 5), [("feature", "a")], ["logits"])
    compare(choice_of(feature, head), make_critic(), 8)


def test_a_module_that_returns_another_tensordict():
    network = TensorDictModule(nn.Linear(4, 5), ["observation"], ["logits"], inplace="empty")
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    compare(choice_of(network), critic, 8)


@pytest.mark.parametrize("of", ["actor", "critic"])
def test_a_function_that_writes_over_a_shared_encoders_output(of: str):
    body = TensorDictModule(nn.Linear(4, 6), ["observation"], ["hidden"])
    doubled = TensorDictModule(lambda x: x.mul_(2), ["hidden"], ["twice"])
    keys = {name: "twice" if of == name else "hidden" for name in ("actor", "critic")}
    first = [doubled] if of == "actor" else []
    actor = choice_of(body, *first, TensorDictModule(nn.Linear(6, 5), [keys["actor"]], ["logits"]))
    second = [doubled] if of == "critic" else []
    value = ValueOperator(nn.Linear(6, 1), in_keys=[keys["critic"]])
    compare(actor, TensorDictSequential(body, *second, value), 8)


def test_an_output_that_is_not_written():
    class Two(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input), torch.zeros(3)

    network = TensorDictModule(Two(4, 5), ["observation"], ["logits", "_"])
    compare(choice_of(network), make_critic(), 8, separate_losses=True)


@pytest.mark.parametrize("distribution", [IndependentNormal, OtherNormal])
@pytest.mark.parametrize("kl_coeff", [None, 0.3])
def test_one_entry_for_two_parameters(distribution: Any, kl_coeff: float | None):
    network = nn.Sequential(nn.Linear(4, 2), nn.Softplus())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["x"]),
        in_keys={"loc": "x", "scale": "x"},
        distribution_class=distribution,
        return_log_prob=True,
    )
    compare(actor, make_critic(), 8, entropy_bonus=False, kl_coeff=kl_coeff)


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("fast", [False, True])
def test_padding_in_an_entry_that_a_network_reads_whole(dim: int | None, fast: bool):
    class ReadsPart(nn.Linear):
        def forward(self, input: Any) -> torch.Tensor:
            return super().forward(input["x"])

    actor = choice_of(TensorDictModule(ReadsPart(4, 5), ["goal"], ["logits"]))
    critic = ValueOperator(nn.Linear(4, 1), in_keys=[("goal", "x")])
    loss = loss_on_path(actor, critic, functional=False, fast=fast)
    batch = make_minibatch(make_actor("categorical"), 3, 8)
    batch["goal", "x"] = batch["observation"]
    valid = torch.arange(8) < torch.tensor([[8], [3], [1]])
    expected = loss(batch[valid])
    batch["collector", "mask"] = valid
    batch["goal", "x"][~valid] = math.nan
    result = loss(batch if dim is None else lazy_stack(list(batch.unbind(dim)), dim))
    for name in ("loss_objective", "loss_entropy", "loss_critic", "kl"):
        torch.testing.assert_close(result[name], expected[name])


def test_an_empty_minibatch():
    for loss in make_pair("normal", torch.float32):
        with pytest.raises(ValueError, match=r"The minibatch is empty: \[0\]"):
            loss(make_minibatch(make_actor("normal"), 4)[:0])


def test_a_coefficient_with_a_gradient_gets_it():
    _, loss = make_pair("normal", torch.float32)
    loss.entropy_coeff.requires_grad_()
    out = loss(make_minibatch(make_actor("normal"), 8))
    out["loss_entropy"].backward()
    assert loss.entropy_coeff.grad != 0


@pytest.mark.filterwarnings("ignore:The KL divergence is", "ignore:std\\(\\)")
@pytest.mark.parametrize(("size", "stored"), [(8, -math.inf), (1, -math.inf), (1, math.inf)])
def test_the_mean_of_ratios_that_are_infinite_or_zero(size: int, stored: float):
    batch = make_minibatch(make_actor("normal"), size)
    batch["action_log_prob"][0] = stored
    for loss in make_pair("normal", torch.float32):
        assert loss(batch)["mean_ratio"] == (math.inf if stored < 0 else 0)


def test_bounds_with_a_gradient_get_it():
    low, high = -torch.ones(2), nn.Parameter(torch.tensor([1.5, 2.0]))
    slow, fast = make_pair("tanh-normal", torch.float32, functional=False)
    batch = make_minibatch(make_actor("tanh-normal"), 8)
    gradients = []
    for loss in (slow, fast):
        loss.actor_network[-1].distribution_kwargs = {"low": low, "high": high}
        torch.manual_seed(0)
        out = loss(batch)
        gradients += torch.autograd.grad(out["loss_objective"] + out["loss_entropy"], high)
    torch.testing.assert_close(*gradients)
    assert gradients[0].all()


def test_a_value_of_before_that_is_nan():
    slow, fast = make_pair("normal", torch.float32, clip_value=0.1)
    batch = make_minibatch(make_actor("normal"), 8)
    batch["state_value"][2] = math.nan
    for loss in (slow, fast):
        assert loss(batch)["loss_critic"].isnan()


def test_a_recurrent_or_nested_encoder_of_a_lean_actor_is_not_stale():
    feature = TensorDictModule(Feature(), ["observation"], ["feature"])
    head = TensorDictModule(nn.Linear(6, 5), [("feature", "a")], ["logits"])
    actor = choice_of(feature, head)
    step = TensorActor(actor)(TensorDict({"observation": torch.randn(2, 4)}, [2]))
    step["observation"] = torch.randn(2, 4)
    expected = actor.get_dist(step.clone()).logits
    with set_exploration_type(ExplorationType.RANDOM):
        torch.testing.assert_close(TensorActor(actor)(step)["logits"].log_softmax(-1), expected)


@pytest.mark.parametrize("fast", [False, True])
def test_a_separate_critic_loss_keeps_what_a_shared_encoder_assigns_to_a_buffer(fast: bool):
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 6)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(input)

    body = TensorDictModule(Counts(), ["observation"], ["hidden"])
    actor = choice_of(body, TensorDictModule(nn.Linear(6, 5), ["hidden"], ["logits"]))
    critic = TensorDictSequential(body, ValueOperator(nn.Linear(6, 1), in_keys=["hidden"]))
    batch = make_minibatch(actor, 8)
    loss = loss_on_path(actor, critic, functional=False, separate_losses=True, fast=fast)
    before = body.module.calls.item()
    loss(batch)
    assert body.module.calls.item() == before + 2
