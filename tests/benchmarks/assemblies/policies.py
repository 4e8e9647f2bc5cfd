"""A policy of modules that end in features: for actions of a Box, or choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal


def policy_of(
    modules: Sequence[Any], key: str, make_head: Callable[[int], nn.Module], space: gym.Space
) -> ProbabilisticActor:
    """Return the modules with a head that reads ``key``; its scale depends on the observation."""
    size, bounds = gym.spaces.flatdim(space), {}
    if isinstance(space, gym.spaces.Box):
        head = nn.Sequential(make_head(2 * size), NormalParamExtractor())
        keys, distribution = ["loc", "scale"], TanhNormal
        bounds = {x: torch.as_tensor(getattr(space, x)) for x in ("low", "high")}
    else:
        head, keys, distribution = make_head(size), ["logits"], torch.distributions.Categorical
    return ProbabilisticActor(
        TensorDictSequential(*modules, TensorDictModule(head, [key], keys)),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
