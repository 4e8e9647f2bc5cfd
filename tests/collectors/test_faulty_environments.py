"""Observations and rewards that are not as declared are refused, whoever steps the environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.modules import LSTMModule, OneHotCategorical, ProbabilisticActor

from ppokit import GymCollector, RunningObservationNorm
from tests.collectors.test_collector import Wander, make_policy

EVERYWHERE = pytest.mark.parametrize("vectorization", ["serial", "sync"])
# gymnasium's vector environments report the exception of a worker as warnings, too
reported = pytest.mark.filterwarnings("ignore::UserWarning")

BAD: dict[str, tuple[Any, str]] = {
    "one number": (np.zeros(1, np.float32), r"float32 of shape \[1\]"),
    "a scalar": (np.float32(0), r"float32 of shape \[\]"),
    "a row": (np.zeros((1, 3), np.float32), r"float32 of shape \[1, 3\]"),
    "None": (None, "None"),
    "a None inside": ([0.0, None, 0.0], r"object of shape \[3\]"),
    "objects": (np.array([0.0, None, 0.0], dtype=object), r"object of shape \[3\]"),
    "text": ("abc", r"U3 of shape \[\]"),
}


class Faulty(Wander):
    """Goes wrong after some steps: in a step, in the last one of an episode, or in a reset."""

    def __init__(self, bad: Any, when: str = "step", **options: Any) -> None:
        super().__init__(**options)
        self.bad, self.when, self.resets = bad, when, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.resets += 1
        observation, info = super().reset(**kwargs)
        # a seed and two resets come before the first batch
        return (self.spoil(observation), info) if self.is_due("reset") else (observation, info)

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        ends = self.time == 3
        if self.is_due("end" if ends else "step"):
            observation = self.spoil(observation)
        return observation, reward, False, ends, info

    def is_due(self, when: str) -> bool:
        return self.when == when and self.resets > 2 and (when == "reset" or self.time > 1)

    def spoil(self, observation: Any) -> Any:
        return self.bad(observation) if callable(self.bad) else self.bad


def collect(make_env: Callable[[], Any], policy: Any = None, **options: Any) -> TensorDictBase:
    policy = make_policy(3, 3, OneHotCategorical) if policy is None else policy
    collector = GymCollector(make_env, policy, **{"frames_per_batch": 12, "num_envs": 2} | options)
    collector.set_seed(0)
    try:
        return collector.rollout()
    finally:
        assert collector.closed  # at once, and not by this test
        collector.shutdown()


@reported
@EVERYWHERE
@pytest.mark.parametrize("when", ["step", "end", "reset"])
@pytest.mark.parametrize("kind", BAD)
def test_observations_of_another_shape(kind: str, when: str, vectorization: str):
    bad, described = BAD[kind]
    message = "Environment 0 returned .* as int64, and its space declares uint8.*Return it as"
    )
    with pytest.raises(ValueError, match=message):
        collect_whole(partial(Numbers, PIXELS, np.array([3, 255])), "observation", "sync")
