"""Networks with a memory or without: modules that end in ``"hidden"``, and a policy of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, TanhNormal

from tests.benchmarks.networks import actor_of, bounds_of

CELLS = 64


def body_of(space: gym.Space, memory: Any = None, *, key: str = "observation") -> list[Any]:
    """Return the modules from the observation to ``"hidden"``; without a memory a second layer."""
    encoder = nn.Sequential(nn.Linear(gym.spaces.flatdim(space), CELLS), nn.Tanh())
    if memory is None:
        last: Any = nn.Sequential(nn.Linear(CELLS, CELLS), nn.Tanh())
        last = TensorDictModule(last, ["features"], ["hidden"])
    else:
        keys = {"in_key": "features", "out_key": "hidden"}
        last = memory(input_size=CELLS, hidden_size=CELLS, **keys)
    return [TensorDictModule(encoder, [key], ["features"]), last]


def policy_of(
    modules: Sequence[Any], make_head: Callable[[int], nn.Module], space: gym.Space
) -> ProbabilisticActor:
    """Return the modules with a head for a Box or choices; its scale depends on the observation."""
    size = gym.spaces.flatdim(space)
    if not isinstance(space, gym.spaces.Box):
        return actor_of(make_head(size), Categorical, key="hidden", before=modules)
    head = nn.Sequential(make_head(2 * size), NormalParamExtractor())
    return actor_of(head, TanhNormal, key="hidden", before=modules, **bounds_of(space))
