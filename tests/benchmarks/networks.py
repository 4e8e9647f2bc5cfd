"""The networks of the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

HIDDEN = (64, 64)


@dataclass(frozen=True)
class Sizes:
    """The sizes that networks need to know of an environment with flat observations."""

    observations: int
    actions: int  #: entries of an action, or choices
    is_choice: bool
    is_float32: bool  #: the observation
    bounds: Any  #: of the actions

    @classmethod
    @cache
    def of(cls, env_id: str) -> Sizes:
        env = gym.make(env_id)
        observations: Any = env.observation_space
        actions: Any = env.action_space
        env.close()
        is_float32 = observations.dtype == np.float32
        if isinstance(actions, gym.spaces.Discrete):
            return cls(observations.shape[0], int(actions.n), True, is_float32, None)
        bounds = {name: torch.as_tensor(getattr(actions, name)) for name in ("low", "high")}
        return cls(observations.shape[0], actions.shape[0], False, is_float32, bounds)


def mlp(
    inputs: int, outputs: int, hidden: Sequence[int] = HIDDEN, activation: Any = nn.Tanh
) -> nn.Sequential:
    """Return hidden layers with an activation after each, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


def actor_and_critic(
    env_id: str, hidden: Sequence[int] = HIDDEN, seed: int | None = None
) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return a categorical or tanh-normal policy, and a critic with layers of its own."""
    if seed is not None:
        torch.manual_seed(seed)
    sizes = Sizes.of(env_id)
    if sizes.is_choice:
        network, keys = mlp(sizes.observations, sizes.actions, hidden), ["logits"]
        distribution: dict[str, Any] = {"distribution_class": torch.distributions.Categorical}
    else:
        network = mlp(sizes.observations, 2 * sizes.actions, hidden).append(NormalParamExtractor())
        keys = ["loc", "scale"]
        distribution = {"distribution_class": TanhNormal, "distribution_kwargs": sizes.bounds}
    module = TensorDictModule(network, in_keys=["observation"], out_keys=keys)
    actor = ProbabilisticActor(module, in_keys=keys, return_log_prob=True, **distribution)
    return actor, ValueOperator(mlp(sizes.observations, 1, hidden), in_keys=["observation"])
