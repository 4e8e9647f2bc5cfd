"""Policies, minibatches and comparisons that the tests of the loss share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from tests.blocks import IndependentNormal as UnknownNormal
from tests.blocks import actor_of, make_critic

OF_NORMAL = ["loc", "scale"]
SCALARS = {"low": torch.tensor(-1.0), "high": torch.tensor(2.0)}
BOUNDS = {"high": torch.tensor([1.0, 2.0])}
KINDS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "tanh-normal": (TanhNormal, {}, OF_NORMAL),
    "tanh-normal, numbers": (TanhNormal, {"low": -2.0, "high": 0.5}, OF_NORMAL),
    "tanh-normal, scalars": (TanhNormal, SCALARS, OF_NORMAL),
    "tanh-normal, one upper bound each": (TanhNormal, BOUNDS, OF_NORMAL),
    "tanh-normal, tanh_loc": (TanhNormal, {"tanh_loc": True}, OF_NORMAL),
    "normal": (IndependentNormal, {}, OF_NORMAL),
    "unknown normal": (UnknownNormal, {}, OF_NORMAL),
    "categorical": (d.Categorical, {}, ["logits"]),
    "one-hot": (OneHotCategorical, {}, ["logits"]),
    "masked": (MaskedCategorical, {}, ["logits"]),
}


def make_actor(kind: str, dtype: torch.dtype = torch.float32) -> ProbabilisticActor:
    """A policy from 4 observations to 2 actions, or to a choice of 4."""
    torch.manual_seed(0)
    distribution, options, keys = KINDS[kind]
    network: nn.Module = nn.Linear(4, 4, dtype=dtype)
    if keys != ["logits"]:
        network = nn.Sequential(network, NormalParamExtractor())
    in_keys = [*keys, "mask"] if distribution is MaskedCategorical else keys
    module = TensorDictModule(network, ["observation"], keys)
    return actor_of(module, distribution, in_keys, distribution_kwargs=dict(options))


def make_minibatch(
    actor: Any, *shape: int, spread: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TensorDict:
    """A minibatch whose old log-probabilities lie ``spread`` away from the actor's own."""
    torch.manual_seed(seed)
    batch = TensorDict({"observation": torch.randn(*shape, 4, dtype=dtype)}, shape)
    batch["mask"] = torch.rand(*shape, 4) < 0.7
    batch["mask"][..., 0] = True
    with torch.no_grad():
        batch.update(actor(batch.clone()).detach().clone())
    for key in actor.log_prob_keys:
        batch[key] = batch[key] + spread * torch.randn_like(batch[key])
    for key in ("advantage", "value_target", "state_value"):
        batch[key] = torch.randn(*shape, 1, dtype=dtype)
    return batch


def make_pair(
    kind: str, dtype: torch.dtype = torch.float32, *, ours: dict[str, Any] | None = None, **kw: Any
) -> tuple[Any, Any]:
    """torchrl's loss and ppokit's over networks of the same parameters."""
    actor, critic = make_actor(kind, dtype), make_critic(dtype=dtype)
    theirs = ClipPPOLoss(copy.deepcopy(actor), copy.deepcopy(critic), **kw)
    return theirs.to(dtype), DualClipPPOLoss(actor, critic, **kw, **(ours or {})).to(dtype)


def results(loss: Any, batch: TensorDict, *, seed: int = 0) -> tuple[TensorDict, dict[str, Any]]:
    """What a loss returns, and the gradients of each of its losses."""
    torch.manual_seed(seed)
    out = loss(batch)
    parameters = [p for p in loss.parameters() if p.requires_grad]
    gradients = {
        name: torch.autograd.grad(out[name].sum(), parameters, retain_graph=True, allow_unused=True)
        for name in out.keys()
        if name.startswith("loss_")
    }
    return out.detach(), gradients


def assert_alike(found: Any, expected: Any, *, tolerance: float) -> None:
    """Compare results: every output of the second is in the first, and the gradients agree."""
    close: Any = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    for key, value in expected[0].items(True, True):
        mine = found[0][key]
        assert (mine.shape, mine.dtype) == (value.shape, value.dtype), key
        torch.testing.assert_close(mine, value, **close, msg=lambda m, k=key: f"{k}: {m}")
    for name, theirs in expected[1].items():
        for one, other in zip(found[1][name], theirs, strict=True):
            zero = torch.zeros(())
            one, other = (zero if x is None else x for x in (one, other))
            one, other = torch.broadcast_tensors(one, other)
            torch.testing.assert_close(one, other, **close, msg=lambda m, n=name: f"{n}: {m}")


def assert_same(theirs: Any, ours: Any, batch: TensorDict, *, tolerance: float = 3e-6) -> None:
    """Compare two losses on a batch, which neither may write to."""
    before = batch.clone()
    assert_alike(results(ours, batch), results(theirs, batch), tolerance=tolerance)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


def log_ratio_of(actor: Any, batch: TensorDict) -> Tensor:
    """The log-ratio ``[*B, 1]`` by the actor's own distribution."""
    dist = actor.get_dist(batch.copy())
    if isinstance(batch["action"], TensorDict):
        new = dist.log_prob(batch)
        return sum(new[key] - batch[key] for key in actor.log_prob_keys).unsqueeze(-1)
    return (dist.log_prob(batch["action"]) - batch["action_log_prob"]).unsqueeze(-1)


def shared_networks(
    dtype: torch.dtype = torch.float32,
    *,
    encoder: nn.Module | None = None,
    actor: nn.Module | None = None,
    critic: nn.Module | None = None,
) -> tuple[Any, Any, Any]:
    """Actor, value head, and the critic that consists of the actor's encoder and the head.

    Args:
        dtype: of the parameters.
        encoder: last layer of the encoder.
        actor: first layer of the actor's head.
        critic: first layer of the value head.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), encoder or nn.Tanh())
    body = TensorDictModule(layers, ["observation"], ["hidden"])
    of_actor = nn.Sequential(actor or nn.Identity(), nn.Linear(5, 4), NormalParamExtractor())
    head = TensorDictModule(of_actor, ["hidden"], ["loc", "scale"])
    policy = actor_of(TensorDictSequential(body, head), TanhNormal)
    layers = nn.Sequential(critic or nn.Identity(), nn.Linear(5, 1))
    value = ValueOperator(layers, in_keys=["hidden"])
    return policy.to(dtype), value.to(dtype), TensorDictSequential(body, value)
