"""Observations, rewards and flags that contradict an environment's spaces raise, and are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector
from tests.collectors.test_collector import Wander, make_policy

POLICY = make_policy(3, 3, OneHotCategorical)


class ReadsNothing(TensorDictModuleBase):
    """Chooses the first action."""

    def __init__(self, one_hot: bool = True) -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.one_hot = [], ["action"], one_hot

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(len(tensordict), dtype=torch.long)
        if self.one_hot:
            action = nn.functional.one_hot(action, 3)
        return tensordict.set("action", action)


def collect(make_env: Callable[[], Any], policy: Any = POLICY, **options: Any) -> TensorDictBase:
    collector = GymCollector(make_env, policy, **{"frames_per_batch": 12, "num_envs": 2} | options)
    with collector:
        collector.set_seed(0)
        return collector.rollout()


def assert_raises(message: str, make_env: Any, policy: Any = POLICY, **options: Any) -> None:
    collector = GymCollector(make_env, policy, **{"frames_per_batch": 12, "num_envs": 2} | options)
    seeded = []

    def run() -> None:
        collector.set_seed(0)
        seeded.append(True)
        collector.rollout()

    with pytest.raises(ValueError, match=message):
        run()
    assert collector.closed or not seeded


# -- observations --------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    "one number": (np.zeros(1, np.float32), r"float32 of shape \[1\]"),
    "a scalar": (np.float32(0), r"float32 of shape \[\]"),
    "a row": (np.zeros((1, 3), np.float32), r"float32 of shape \[1, 3\]"),
    "None": (None, "None"),
    "objects": (np.array([0.0, None, 0.0], dtype=object), r"object of shape \[3\]"),
    "text": ("abc", r"U3 of shape \[\]"),
}


class Faulty(Wander):
    """Spoils an observation after some steps: of a step, of the last one, or of a reset."""

    def __init__(self, bad: Any, when: str = "step", **options: Any) -> None:
        super().__init__(**options)
        self.bad, self.when, self.resets = bad, when, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.resets += 1
        observation, info = super().reset(**kwargs)
        return (self.spoil(observation), info) if self.is_due("reset") else (observation, info)

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        ends = self.time == 3
        if self.is_due("end" if ends else "step"):
            observation = self.spoil(observation)
        return observation, reward, False, ends, info

    def is_due(self, when: str) -> bool:
        # a seed and two resets come before the first batch
        return self.when == when and self.resets > 2 and (when == "reset" or self.time > 1)

    def spoil(self, observation: Any) -> Any:
        return self.bad(observation) if callable(self.bad) else self.bad


CASES = [(kind, "step") for kind in BAD]
CASES += [("one number", when) for when in ("end", "reset")]


@pytest.mark.parametrize(("kind", "when"), CASES)
def test_observations_of_another_shape(kind: str, when: str):
    bad, described = BAD[kind]
    message = rf"Environment [01] returned the observation 'observation' as .*{described}.*\[3\]"
    assert_raises(message, partial(Faulty, bad, when))


def goal(**leaves: Any) -> Any:
    return lambda observation: observation | {"goal": {**observation["goal"], **leaves}}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (goal(place=np.zeros((1, 2))), r"[01] .*\('goal', 'place'\).* \[1, 2\].*\[2, 2\]"),
        (goal(kind=None), r"\('goal', 'kind'\) as None"),
        ({}, r"Environment [01] returned no .* in its observation"),
        (None, r"Environment [01] returned no .* in its observation"),
    ],
)
def test_entries_of_a_dict(bad: Any, message: str):
    make_env = partial(Faulty, bad, observations="dict")
    assert_raises(message, make_env, ReadsNothing())


class FaultyMask(Wander):
    """Spoils its action mask in a step, or in the first reset."""

    def __init__(self, bad: Any, first: bool = False) -> None:
        super().__init__(mask=True)
        self.bad, self.first = {} if bad is None else {"action_mask": bad}, first

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        return observation, self.bad if self.first else info

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, info if self.first else self.bad


def test_action_masks():
    options: Any = {"policy": ReadsNothing()}
    one = np.ones(1, np.int8)
    assert_raises(
        r"'action_mask' as int8 of shape \[1\].*\[3\]", partial(FaultyMask, one), **options
    )
    assert_raises(
        r"Environment [01] returned no 'action_mask' in its info",
        partial(FaultyMask, None),
        **options,
    )
    with pytest.raises(ValueError, match=r"'action_mask' .*shape \[2\].* \[3\]"):
        collect(partial(FaultyMask, np.ones(2, bool), True), **options)


# -- flags and rewards ----------------------------------------------------------------------


class Odd(Wander):
    """Changes the result of a step with a function."""

    def __init__(self, of_step: Any = None) -> None:
        super().__init__()
        self.of_step = of_step

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        returned = observation, reward, False, self.time == 3, info
        return self.of_step(returned) if self.of_step and self.time > 1 else returned


def test_flags_and_rewards_of_any_kind():
    expected = collect(Odd)["next"]
    assert expected["done"].any()
    for kind in (np.bool_, int, lambda x: np.array([x]), torch.tensor):
        make_env = partial(Odd, lambda x, kind=kind: (*x[:2], kind(x[2]), kind(x[3]), x[4]))
        found = collect(make_env)["next"]
        for name in ("terminated", "truncated", "done"):
            assert torch.equal(found[name], expected[name])
    for reward in (2, np.float32(2), np.int64(2), np.full(1, 2.0), [2.0]):
        batch = collect(partial(Pays, reward))
        assert batch["next", "reward"].unique().tolist() == [2.0]


class Pays(Wander):
    """Pays a reward of any kind."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


REWARDS = [
    (None, "None"),
    (np.ones(2), r"float64 of shape \[2\]"),
    (np.ones((1, 1, 1)), r"float64 of shape \[1, 1, 1\]"),
    ("1", "U1"),
]


@pytest.mark.parametrize(("reward", "described"), REWARDS)
def test_rewards_that_are_no_number(reward: Any, described: str):
    message = rf"Environment [01] returned the reward as .*{described}"
    assert_raises(message, partial(Pays, reward))


# -- native vector environments -------------------------------------------------------------


class Native(VectorEnv):
    """Two environments that return given observations; all episodes end together."""

    def __init__(self, **returns: Any) -> None:
        self.num_envs, self.metadata = 2, {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = spaces.Box(-9, 9, (3,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = spaces.Box(-9, 9, (2, 3), np.float32)
        self.action_space = spaces.MultiDiscrete([3, 3])
        good = np.zeros((2, 3), np.float32)
        self.returns = {"observation": good, "reward": np.ones(2), "final": list(good)} | returns

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        ended = np.ones(2, dtype=bool)
        info = {"final_obs": self.returns["final"]}
        return self.returns["observation"], self.returns["reward"], ~ended, ended, info


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"observation": np.zeros((2, 1))}, r"A vector environment .* \[2, 1\].* \[2, 3\]"),
        ({"observation": None}, "A vector environment returned the observation .* as None"),
        ({"final": [np.zeros(3), np.zeros(1)]}, r"Environment 1 .*'observation' as .*\[1\]"),
        ({"final": [None, None]}, "Environment 0 .*'observation' as None"),
        ({"reward": np.ones(1)}, r"A vector environment returned the reward .* \[1\].* \[2\]"),
        ({"reward": None}, "A vector environment returned the reward as None"),
    ],
)
def test_native_vector_environments(returns: dict[str, Any], message: str):
    assert collect(Native)["next", "truncated"].all()
    assert_raises(message, lambda: Native(**returns))
