"""The loss on its fast path: torchrl's results, in C and in torch, or torchrl's own path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import distributions as d
from torch import nn
from torchrl.modules import (
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from ppokit import DualClipPPOLoss, kernels
from ppokit.objectives.fast import FastPath
from tests.blocks import IndependentNormal as OtherNormal
from tests.blocks import make_critic, make_minibatch

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tanh-normal": (TanhNormal, {}),
    "tanh-normal, bounded": (TanhNormal, {"low": -2.0, "high": 0.5}),
    "tanh-normal, tensor bounds": (TanhNormal, {"low": torch.tensor(-1), "high": torch.tensor(3)}),
    "tanh-normal, bounds of their own": (TanhNormal, {"high": torch.tensor([1.0, 2.0])}),
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
) -> tuple[TensorDict, dict[str, tuple[torch.Tensor | None, ...]]]:
    """What the loss returns, and each loss's own gradients."""
    torch.manual_seed(seed)
    out = loss(batch)
    parameters = [p for p in loss.parameters() if p.requires_grad]
    names = [name for name in out.keys() if name.startswith("loss_")]
    gradients = {
        name: torch.autograd.grad(out[name], parameters, retain_graph=True, allow_unused=True)
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
    slow = DualClipPPOLoss(copy.deepcopy(actor), copy.deepcopy(critic), fast=False, **options)
    return slow.to(dtype), DualClipPPOLoss(actor, critic, **options).to(dtype)


@pytest.fixture
def never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the fast path gives up."""
    original = FastPath._fast_forward

    def checked(self: FastPath, tensordict: TensorDict) -> TensorDict | None:
        out = original(self, tensordict)
        assert out is not None or not self.fast
        return out

    monkeypatch.setattr(FastPath, "_fast_forward", checked)


@pytest.mark.usefixtures("never_falls_back")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", kernels.available())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_fast_path_is_torchrls(kind: str, options: dict, kernel: str, dtype: torch.dtype):
    slow, fast = make_pair(kind, dtype, **options)
    batch = make_minibatch(
        slow.actor_network if False else make_actor(kind, dtype), 16, dtype=dtype
    )
    with kernels.use(kernel):
        assert_same(slow, fast, batch, tolerance=3e-6 if dtype is torch.float32 else 1e-12)
