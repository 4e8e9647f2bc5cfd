"""The networks and minibatches of the loss and step benchmarks, and a loss on plain tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator

from tests.benchmarks.networks import actor_of, mlp
from tests.benchmarks.timing import Call

OBSERVATIONS, ACTIONS, CHOICES = 11, 1, 4
CLIP, DUAL_CLIP, ENTROPY = 0.2, 5.0, 1e-4  # the tutorial's
LOSSES = ("loss_objective", "loss_entropy", "loss_critic")


@dataclass(frozen=True)
class Setting:
    """The networks and the distribution."""

    name: str
    cells: tuple[int, ...]
    discrete: bool = False
    shared: bool = False  #: actor and critic share all but their last layer
    normal: bool = False  #: a normal distribution, without tanh


SETTINGS = (
    Setting("3x256, tanh-normal", (256,) * 3),
    Setting("2x64, tanh-normal", (64,) * 2),
    Setting("3x256, categorical", (256,) * 3, discrete=True),
    Setting("2x64, categorical", (64,) * 2, discrete=True),
    Setting("3x256 shared, tanh-normal", (256,) * 3, shared=True),
)
NORMAL = (
    Setting("3x256, normal", (256,) * 3, normal=True),
    Setting("2x64, normal", (64,) * 2, normal=True),
)


class Model:
    """The networks, as plain modules and as torchrl's."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting = setting
        outputs = CHOICES if setting.discrete else 2 * ACTIONS
        policy, value = (mlp(OBSERVATIONS, n, setting.cells) for n in (outputs, 1))
        self.body = policy[:-1] if setting.shared else None
        self.policy, self.value = (x[-1:] if setting.shared else x for x in (policy, value))
        if not setting.discrete:
            self.policy.append(NormalParamExtractor())

    def parameters(self) -> list[nn.Parameter]:
        parts = (self.body, self.policy, self.value)
        return [p for part in parts if part is not None for p in part.parameters()]

    def __call__(self, observation: Tensor) -> tuple[Any, Tensor]:
        hidden = observation if self.body is None else self.body(observation)
        return self.policy(hidden), self.value(hidden)

    def modules(self) -> tuple[ProbabilisticActor, Any, Any]:
        entry = "observation" if self.body is None else "hidden"
        normal = IndependentNormal if self.setting.normal else TanhNormal
        distribution = d.Categorical if self.setting.discrete else normal
        head: Any = ValueOperator(self.value, in_keys=[entry])
        if self.body is None:
            return actor_of(self.policy, distribution), head, head
        body = TensorDictModule(self.body, ["observation"], [entry])
        actor = actor_of(self.policy, distribution, key=entry, before=[body])
        return actor, TensorDictSequential(body, head), head


def minibatch(model: Model, frames: int) -> TensorDict:
    random = torch.Generator().manual_seed(1)
    batch = TensorDict(
        {"observation": torch.randn(frames, OBSERVATIONS, generator=random)}, [frames]
    )
    actor, critic, _ = model.modules()
    with torch.no_grad():
        batch = critic(actor(batch)).exclude("loc", "scale", "logits", "hidden")
    batch["action_log_prob"] += 0.1 * torch.randn(frames, generator=random)
    for key in ("advantage", "value_target"):
        batch[key] = torch.randn(frames, 1, generator=random)
    return batch


def networks_alone(model: Model, batch: TensorDict) -> Call:
    """Return forward and backward of the networks, with given gradients of their outputs."""
    observation, parameters = batch["observation"], model.parameters()

    def outputs() -> list[Tensor]:
        policy, value = model(observation)
        return [*policy, value] if isinstance(policy, tuple) else [policy, value]

    gradients = [torch.randn_like(output) for output in outputs()]

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(outputs(), gradients)

    return Call(run)


class PlainLoss:
    """The loss of CleanRL's ``ppo_continuous_action.py``, on tensors.

    Distribution and critic loss are those of the other contenders: tanh-normal with a sampled
    entropy, and smooth-L1 without value clipping.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, batch: TensorDict) -> dict[str, Tensor]:
        policy, value = self.model(batch["observation"])
        log_prob, entropy = self._policy(policy, batch["action"])
        advantage = batch["advantage"].squeeze(-1)
        log_ratio = log_prob - batch["action_log_prob"]
        ratio = log_ratio.exp()
        with torch.no_grad():
            diagnostics = {
                "old_approx_kl": (-log_ratio).mean(),
                "approx_kl": ((ratio - 1) - log_ratio).mean(),
                "clip_fraction": ((ratio - 1.0).abs() > CLIP).float().mean(),
            }
        first = -advantage * ratio
        second = -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
        return {
            "loss_objective": torch.max(first, second).mean(),
            "loss_critic": nn.functional.smooth_l1_loss(value, batch["value_target"]),
            "loss_entropy": -ENTROPY * entropy.mean(),
            **diagnostics,
        }

    def _policy(self, policy: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        if self.model.setting.discrete:
            dist = d.Categorical(logits=policy)
            return dist.log_prob(action), dist.entropy()
        normal = d.Normal(*policy)
        if self.model.setting.normal:
            return normal.log_prob(action).sum(1), normal.entropy().sum(1)
        edge = 1 - torch.finfo(action.dtype).resolution
        inverse, drawn = action.clamp(-edge, edge).atanh(), normal.rsample()
        log_prob = normal.log_prob(inverse) - _log_slope_of_tanh(inverse)
        entropy = _log_slope_of_tanh(drawn) - normal.log_prob(drawn)
        return log_prob.sum(1), entropy.sum(1)


def _log_slope_of_tanh(x: Tensor) -> Tensor:
    return 2 * (math.log(2.0) - x - nn.functional.softplus(-2 * x))
