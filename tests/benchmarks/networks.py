"""The networks of the benchmarks and the assemblies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

HIDDEN, CELLS = (64, 64), 64


@cache
def spaces_of(env_id: str) -> tuple[Any, Any]:
    """Return the spaces of observations and actions."""
    env = gym.make(env_id)
    env.close()
    return env.observation_space, env.action_space


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


def policy_of(
    make_network: Callable[[int], nn.Sequential], space: gym.Space, **options: Any
) -> ProbabilisticActor:
    """Return a tanh-normal policy for a Box, whose scale depends on the observation, or choices.

    ``make_network`` takes the number of outputs; ``options`` are those of :func:`actor_of`.
    """
    size = gym.spaces.flatdim(space)
    if not isinstance(space, gym.spaces.Box):
        return actor_of(make_network(size), Categorical, **options)
    bounds = {name: torch.as_tensor(getattr(space, name)) for name in ("low", "high")}
    network = make_network(2 * size).append(NormalParamExtractor())
    return actor_of(network, TanhNormal, **options, **bounds)


def body_of(space: gym.Space, memory: Any = None, *, key: str = "observation") -> list[Any]:
    """Return modules from the observation to ``"hidden"``: a layer, and a memory or a layer."""
    encoder = nn.Sequential(nn.Linear(gym.spaces.flatdim(space), CELLS), nn.Tanh())
    if memory is None:
        last: Any = nn.Sequential(nn.Linear(CELLS, CELLS), nn.Tanh())
        last = TensorDictModule(last, ["features"], ["hidden"])
    else:
        keys = {"in_key": "features", "out_key": "hidden"}
        last = memory(input_size=CELLS, hidden_size=CELLS, **keys)
    return [TensorDictModule(encoder, [key], ["features"]), last]


def actor_and_critic(
    env_id: str, hidden: Sequence[int] = HIDDEN, seed: int | None = None
) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return a categorical or tanh-normal policy, and a critic with layers of its own."""
    if seed is not None:
        torch.manual_seed(seed)
    observations, actions = spaces_of(env_id)
    inputs = gym.spaces.flatdim(observations)
    actor = policy_of(lambda outputs: mlp(inputs, outputs, hidden), actions)
    return actor, ValueOperator(mlp(inputs, 1, hidden), in_keys=["observation"])
