"""The networks of the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

HIDDEN = (64, 64)


@dataclass(frozen=True)
class Sizes:
    """The sizes that networks need to know of an environment with flat observations."""

    observations: int
    actions: int  #: entries of an action, or choices
    is_choice: bool
    bounds: Any  #: of the actions

    @classmethod
    @cache
    def of(cls, env_id: str) -> Sizes:
        env = gym.make(env_id)
        observations: Any = env.observation_space
        actions: Any = env.action_space
        env.close()
        if isinstance(actions, gym.spaces.Discrete):
            return cls(observations.shape[0], int(actions.n), True, None)
        return cls(observations.shape[0], actions.shape[0], False, bounds_of(actions))


def bounds_of(space: Any) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(getattr(space, name)) for name in ("low", "high")}


def mlp(
    inputs: int, outputs: int, hidden: Sequence[int] = HIDDEN, activation: Any = nn.Tanh
) -> nn.Sequential:
    """Return hidden layers with an activation after each, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


def actor_of(
    network: nn.Module,
    distribution: Any,
    *,
    key: str = "observation",
    before: Sequence[Any] = (),
    **options: Any,
) -> ProbabilisticActor:
    """Return the policy of a network that reads ``key``, after other modules."""
    keys = ["logits"] if distribution is Categorical else ["loc", "scale"]
    module: Any = TensorDictModule(network, [key], keys)
    return ProbabilisticActor(
        TensorDictSequential(*before, module) if before else module,
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )


def actor_and_critic(
    env_id: str, hidden: Sequence[int] = HIDDEN, seed: int | None = None
) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return a categorical or tanh-normal policy, and a critic with layers of its own."""
    if seed is not None:
        torch.manual_seed(seed)
    sizes = Sizes.of(env_id)
    if sizes.is_choice:
        actor = actor_of(mlp(sizes.observations, sizes.actions, hidden), Categorical)
    else:
        network = mlp(sizes.observations, 2 * sizes.actions, hidden).append(NormalParamExtractor())
        actor = actor_of(network, TanhNormal, **sizes.bounds)
    return actor, ValueOperator(mlp(sizes.observations, 1, hidden), in_keys=["observation"])
