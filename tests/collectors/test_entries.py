"""Names and numbers of observations: entries that would be replaced, arrays, casts."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import LSTMModule, OneHotCategorical, ProbabilisticActor

from ppokit import GymCollector
from tests.collectors.test_faulty_environments import POLICY, ReadsNothing, collect

# -- names -----------------------------------------------------------------------------------


class Named(gym.Env):
    """Has observations of these names."""

    action_space = spaces.Discrete(3)

    def __init__(self, *names: str) -> None:
        box = spaces.Box(-9, 9, (3,), np.float32)
        self.observation_space = spaces.Dict(dict.fromkeys(("observation", *names), box))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 1.0, False, False, {}


def recurrent_policy() -> ProbabilisticActor:
    keys = {"in_keys": ["observation", "h", "c", "is_init"]}
    keys["out_keys"] = ["features", ("next", "h"), ("next", "c")]
    head = TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"])
    return ProbabilisticActor(
        TensorDictSequential(LSTMModule(input_size=3, hidden_size=4, **keys), head),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


CHANGES = TensorDictSequential(
    TensorDictModule(nn.LayerNorm(3), ["observation"], ["observation"]), POLICY
)
TAKEN: Any = {"observation_transform": TensorDictModule(nn.Identity(), ["observation"], ["logits"])}


@pytest.mark.parametrize(
    ("name", "policy", "options", "message"),
    [
        ("action", POLICY, {}, "The collector writes 'action', which would replace the observ"),
        ("is_init", POLICY, {}, "The collector writes 'is_init', which would replace"),
        ("collector", POLICY, {}, "The collector writes 'collector', which would replace"),
        (
            "policy_version",
            POLICY,
            {},
            "The collector writes 'policy_version', which would replace",
        ),
        ("step_count", POLICY, {"step_count": True}, "The collector writes 'step_count', which"),
        ("logits", POLICY, {}, "The policy writes 'logits', which would replace"),
        ("h", recurrent_policy(), {}, "The policy writes 'h', which would replace"),
        ("free", CHANGES, {}, "replace the observation.*in observation_transform"),
        ("free", POLICY, TAKEN, "The policy writes 'logits', which would replace"),
    ],
)
def test_entries_that_would_be_replaced(name: str, policy: Any, options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        GymCollector(partial(Named, name), policy, frames_per_batch=4, **options)


# -- arrays and dtypes -------------------------------------------------------------------------


class Reusing(gym.Env):
    """Writes each observation into the same array."""

    observation_space = spaces.Dict({"at": spaces.Box(0, 10, (1,), np.float32)})
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.at = {"at": np.zeros(1, np.float32)}

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.at["at"][0] = 0
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.at["at"] += 1
        return self.at, 1.0, False, self.at["at"][0] == 3, {}


INDICES: Any = {"policy": ReadsNothing(one_hot=False), "categorical_action_encoding": True}


def test_final_observations_of_environments_that_reuse_arrays():
    batch = collect(Reusing, **INDICES)
    expected = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]).expand(2, 6)
    assert torch.equal(batch["next", "at"].squeeze(-1), expected)


class Numbers(gym.Env):
    """Returns a given value, whatever its space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space, value: Any) -> None:
        self.observation_space, self.value = space, value

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        return self.value, {}

    def step(self, action: Any) -> Any:
        return self.value, 1.0, False, False, {}


PIXELS = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (PIXELS, np.array([0.3, 0.9]), "with 0.3, of float64, but its space declares uint8"),
        (PIXELS, np.array([7, 300]), "with 300, of int64, but its space declares uint8"),
        (PIXELS, np.array([7, -1]), "with -1, of int64"),
        (spaces.Box(-9, 9, (2,), np.int64), np.array([1.0, np.nan]), "with nan, of float64"),
        (spaces.Discrete(4), 1.7, "with 1.7, of float64, but its space declares int64"),
    ],
)
def test_numbers_that_a_cast_would_change(space: spaces.Space, value: Any, message: str):
    with pytest.raises(ValueError, match=rf"the observation 'observation' {message}"):
        collect(partial(Numbers, space, value), **INDICES)


@pytest.mark.parametrize(
    ("space", "value"),
    [(PIXELS, np.array([3, 255])), (PIXELS, [3.0, 255.0]), (spaces.Discrete(256), np.int32(3))],
)
def test_whole_numbers_of_another_dtype_are_cast(space: spaces.Space, value: Any):
    found = collect(partial(Numbers, space, value), **INDICES)["observation"]
    assert ((found if found.ndim == 2 else found[..., 0]) == 3).all()
