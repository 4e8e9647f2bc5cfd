"""Small real pieces that several tests assemble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

from ppokit import PPOUpdate, TrainingStep


def make_actor(kind: str = "normal", *, dtype: torch.dtype = torch.float32) -> ProbabilisticActor:
    """A policy from 4 observations to 2 actions, of one of the kinds that PPO meets."""
    torch.manual_seed(0)
    body = nn.Linear(4, 4, dtype=dtype)
    if kind == "categorical":
        network, out_keys = body, ["logits"]
        distribution: Any = d.Categorical
    elif kind == "composite":
        network = TensorDictModule(
            nn.Sequential(body, Split()),
            ["observation"],
            [("params", "go", "logits"), ("params", "turn", "logits")],
        )
        heads = {
            "distribution_map": {"go": d.Categorical, "turn": d.Categorical},
            "name_map": {"go": ("action", "go"), "turn": ("action", "turn")},
        }
        return actor_of(network, CompositeDistribution, ["params"], distribution_kwargs=heads)
    else:
        network, out_keys = nn.Sequential(body, NormalParamExtractor()), ["loc", "scale"]
        distribution = {"normal": IndependentNormal, "tanh_normal": TanhNormal}[kind]
    return actor_of(TensorDictModule(network, ["observation"], out_keys), distribution)


def actor_of(
    network: Any, distribution: Any = d.Categorical, in_keys: Any = None, **options: Any
) -> ProbabilisticActor:
    """A policy that draws from a distribution of the entries that its last module writes."""
    if in_keys is None:
        last = network
        while isinstance(last, TensorDictSequential):
            last = last[-1]
        in_keys = [key for key in last.out_keys if key != "_"]
    options = {"distribution_class": distribution, "return_log_prob": True} | options
    return ProbabilisticActor(network, in_keys=in_keys, **options)


def categorical_actor(*modules: Any, in_key: str = "observation") -> ProbabilisticActor:
    """A policy of one choice: modules, and last a network of logits, which reads this entry."""
    *body, network = modules
    if not isinstance(network, TensorDictModuleBase):
        network = TensorDictModule(network, [in_key], ["logits"])
    return actor_of(TensorDictSequential(*body, network) if body else network)


class Split(nn.Module):
    """Two heads of two logits."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., :2], x[..., 2:]


class IndependentNormal(d.Independent):
    """A diagonal normal: its entropy is known in closed form."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(d.Normal(loc, scale), 1)


def make_critic(*, dtype: torch.dtype = torch.float32) -> ValueOperator:
    """A value network of 4 observations."""
    torch.manual_seed(1)
    return ValueOperator(nn.Linear(4, 1, dtype=dtype), in_keys=["observation"])


def make_minibatch(
    actor: ProbabilisticActor,
    *shape: int,
    spread: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TensorDict:
    """A minibatch whose old log-probabilities lie ``spread`` away from the actor's own."""
    torch.manual_seed(seed)
    batch = TensorDict({"observation": torch.randn(*shape, 4, dtype=dtype)}, shape)
    with torch.no_grad():
        batch = actor(batch)
    for key in actor.log_prob_keys:
        batch[key] = batch[key] + spread * torch.randn_like(batch[key])
    batch["advantage"] = torch.randn(*shape, 1, dtype=dtype)
    batch["value_target"] = torch.randn(*shape, 1, dtype=dtype)
    batch["state_value"] = torch.randn(*shape, 1, dtype=dtype)
    return batch


def outcome(loss: Any, batch: TensorDict) -> tuple[dict[str, Any], list[Any]]:
    """Return what a loss returns, and the gradients of the sum of its losses."""
    torch.manual_seed(0)
    found = loss(batch.clone())
    total = sum(x for name, x in found.items() if name.startswith("loss_"))
    parameters = [p for p in loss.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return found.detach().to_dict(), list(gradients)


class Given(nn.Module):
    """A loss that returns the result of a function of its weight and the minibatch."""

    def __init__(self, make: Callable[[torch.Tensor, Any], Any], *in_keys: Any) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(())), make
        self.in_keys, self.out_keys = list(in_keys), ["loss_any"]

    def forward(self, minibatch: Any) -> Any:
        return self.make(self.weight, minibatch)


def ppo_update(loss: Any, optimizer: Any, **options: Any) -> PPOUpdate:
    """Return an update over a TrainingStep; each takes its own of these options."""
    names = ("max_grad_norm", "stopper", "compile", "amp_dtype", "nonfinite", "group")
    of_step = {name: options.pop(name) for name in names if name in options}
    return PPOUpdate(TrainingStep(loss, optimizer, **of_step), **options)
