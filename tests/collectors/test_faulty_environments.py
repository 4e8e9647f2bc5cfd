"""Environments that contradict their spaces, and entries that would be replaced or changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from ppokit import GymCollector
from tests.collectors.test_collector import POLICY, Wander, collector_of, make_recurrent_policy


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
    with collector_of(make_env, policy, **{"frames_per_batch": 12} | options) as collector:
        collector.set_seed(0)
        return collector.rollout()


def assert_raises(message: str, make_env: Any, policy: Any = POLICY) -> None:
    collector = collector_of(make_env, policy, frames_per_batch=12)
    collector.set_seed(0)
    with pytest.raises(ValueError, match=message):
        collector.rollout()
    assert collector.closed


class Odd(Wander):
    """Changes what steps or later resets return with functions; an episode has three steps."""

    def __init__(self, of_step: Any = None, of_reset: Any = None, after=3, **options: Any) -> None:
        super().__init__(**options)
        self.of_step, self.of_reset = of_step, of_reset
        self.resets, self.after = 0, after  # two resets and a seed come before the first batch

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.resets += 1
        returned = super().reset(**kwargs)
        return self.of_reset(returned) if self.of_reset and self.resets > self.after else returned

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        returned = observation, reward, False, self.time == 3, info
        return self.of_step(returned) if self.of_step else returned


# -- observations --------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    "one number": (np.zeros(1, np.float32), r"float32 of shape \[1\]"),
    "a scalar": (np.float32(0), r"float32 of shape \[\]"),
    "a row": (np.zeros((1, 3), np.float32), r"float32 of shape \[1, 3\]"),
    "None": (None, "None"),
    "objects": (np.array([0.0, None, 0.0], dtype=object), r"object of shape \[3\]"),
    "text": ("abc", r"U3 of shape \[\]"),
}


def observing(bad: Any, when: str = "step") -> dict[str, Any]:
    """Options of Odd: a function or a value for the observation of a step, an end or a reset."""
    change = bad if callable(bad) else lambda _: bad
    if when == "reset":
        return {"of_reset": lambda x: (change(x[0]), x[1])}
    return {"of_step": lambda x: (change(x[0]), *x[1:]) if x[3] == (when == "end") else x}


CASES = [(kind, "step") for kind in BAD]
CASES += [("one number", when) for when in ("end", "reset")]


@pytest.mark.parametrize(("kind", "when"), CASES)
def test_observations_of_another_shape(kind: str, when: str):
    bad, described = BAD[kind]
    message = rf"Environment [01] returned the observation 'observation' as .*{described}.*\[3\]"
    assert_raises(message, partial(Odd, **observing(bad, when)))


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
    make_env = partial(Odd, **observing(bad), observations="dict")
    assert_raises(message, make_env, ReadsNothing())


def test_action_masks():
    def masking(info: dict[str, Any]) -> Any:
        return partial(Odd, lambda x: (*x[:4], info), mask=True)

    shape, one = r"'action_mask' as int8 of shape \[1\].*\[3\]", np.ones(1, np.int8)
    assert_raises(shape, masking({"action_mask": one}), ReadsNothing())
    missing = r"Environment [01] returned no 'action_mask' in its info"
    assert_raises(missing, masking({}), ReadsNothing())
    first = partial(Odd, None, lambda x: (x[0], {"action_mask": np.ones(2, bool)}), 0, mask=True)
    with pytest.raises(ValueError, match=r"'action_mask' .*shape \[2\].* \[3\]"):
        collect(first, ReadsNothing())


# -- flags and rewards ----------------------------------------------------------------------


def paying(reward: Any) -> Any:
    return partial(Odd, lambda x: (x[0], reward, *x[2:]))


def test_flags_and_rewards_of_any_kind():
    expected = collect(Odd)["next"]
    assert expected["done"].any()
    for kind in (np.bool_, int, lambda x: np.array([x]), torch.tensor):
        make_env = partial(Odd, lambda x, kind=kind: (*x[:2], kind(x[2]), kind(x[3]), x[4]))
        found = collect(make_env)["next"]
        for name in ("terminated", "truncated", "done"):
            assert torch.equal(found[name], expected[name])
    for reward in (2, np.float32(2), np.float16(2), np.int64(2), np.full(1, 2.0), [2.0]):
        batch = collect(paying(reward))
        assert batch["next", "reward"].unique().tolist() == [2.0]


REWARDS = [
    (None, "None"),
    (np.ones(2), r"float64 of shape \[2\]"),
    (np.ones((1, 1, 1)), r"float64 of shape \[1, 1, 1\]"),
    ("1", "U1"),
]


@pytest.mark.parametrize(("reward", "described"), REWARDS)
def test_rewards_that_are_no_number(reward: Any, described: str):
    message = rf"Environment [01] returned the reward as .*{described}"
    assert_raises(message, paying(reward))


@pytest.mark.parametrize("place", [2, 3], ids=["terminated", "truncated"])
@pytest.mark.parametrize("flag", [None, "False", [False], (True,), math.nan, 2, np.zeros(2), {}])
def test_flags_that_are_no_flag(flag: Any, place: int):
    make_env = partial(Odd, lambda x: (*x[:place], flag, *x[place + 1 :]))
    name = ("terminated", "truncated")[place - 2]
    collector = collector_of(make_env, frames_per_batch=12)
    with pytest.raises(TypeError, match=rf"Environment 0: step returned .* as {name}\. A flag is"):
        collector.rollout()
    assert collector.closed


@pytest.mark.parametrize("kind", [float, np.float64, np.full, torch.tensor])
def test_a_reward_that_is_infinite_in_float32(kind: Any):
    make = (lambda x: np.full(1, x)) if kind is np.full else kind
    kwargs: Any = {"dtype": torch.float64} if kind is torch.tensor else {}
    large = 3.4e38
    assert collect(paying(make(large, **kwargs)))["next", "reward"].isfinite().all()
    for value in (1e300, -1e39):
        message = r"Environment [01] returned the reward -?1.*e\+\d+, which is infinite in float32"
        assert_raises(message, paying(make(value, **kwargs)))
    # an infinite reward of the environment stays as it is
    assert collect(paying(make(math.inf, **kwargs)))["next", "reward"].isinf().all()


@pytest.mark.parametrize("reward", [3, -(2**24), 10**38, True, np.int8(-3)])
def test_rewards_that_are_whole_numbers(reward: Any):
    found = collect(paying(reward))["next", "reward"]
    assert torch.equal(found, torch.full_like(found, float(reward)))
    for large in (10**39, -(2**200), 10**400):
        message = r"Environment [01] returned the reward -?1.*e\+\d+, which is infinite in float32"
        assert_raises(message, paying(large))


# -- environments of the old API --------------------------------------------------------------


class Old(gym.Env):
    """Resets and steps as given."""

    observation_space = spaces.Box(-9, 9, (3,), np.float32)
    action_space = spaces.Discrete(3)
    first: Any = (np.zeros(3, np.float32), {})
    then: Any = (np.zeros(3, np.float32), 1.0, False, False, {})

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.first

    def step(self, action: Any) -> Any:
        return self.then


class Unseeded(Old):
    """Has gym's reset without arguments."""

    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.first


ZEROS = np.zeros(3, np.float32)
OLD: dict[str, tuple[dict[str, Any], str]] = {
    "an array": ({"first": ZEROS}, "reset returned ndarray"),
    "no info": ({"first": (ZEROS, None)}, r"reset returned \['ndarray', 'NoneType'\]"),
    "three of a reset": ({"first": (ZEROS, {}, 1)}, r"reset returned \['ndarray', 'dict', 'int'\]"),
    "four of a step": ({"then": (ZEROS, 1.0, False, {})}, r"step returned \['ndarray', 'float', "),
    "six of a step": ({"then": (ZEROS, 1.0, False, False, {}, 1)}, "step returned .*'dict', 'int'"),
    "one of a step": ({"then": ZEROS}, "step returned ndarray"),
    "info of a step": ({"then": (ZEROS, 1.0, False, False, None)}, "step returned .*'NoneType'"),
}


@pytest.mark.parametrize(("returns", "message"), OLD.values(), ids=OLD.keys())
def test_environments_of_the_old_api(returns: dict[str, Any], message: str):
    kind = type("Returning", (Old,), returns)
    expected = rf"Environment 0: {message}.*In gymnasium, reset\(.*shimmy"
    with pytest.raises(TypeError, match=expected):
        collect(kind, ReadsNothing())
    if "then" in returns:
        native = type("Vector", (Native,), {"step": lambda *_: returns["then"]})
        with pytest.raises(TypeError, match=rf"A vector environment: {message}.*In gymnasium"):
            collect(native)


def test_a_reset_without_a_seed():
    collector = GymCollector(Unseeded, ReadsNothing(), frames_per_batch=4)
    with pytest.raises(TypeError, match=r"Environment 0: reset\(seed=0\) raised: .*'seed'.*shimmy"):
        collector.set_seed(0)


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
        terminated = self.returns.get("terminated", ~ended)
        return self.returns["observation"], self.returns["reward"], terminated, ended, info


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"observation": np.zeros((2, 1))}, r"A vector environment .* \[2, 1\].* \[2, 3\]"),
        ({"observation": None}, "A vector environment returned the observation .* as None"),
        ({"final": [np.zeros(3), np.zeros(1)]}, r"Environment 1 .*'observation' as .*\[1\]"),
        ({"final": [None, None]}, "Environment 0 .*'observation' as None"),
        ({"reward": np.ones(1)}, r"A vector environment returned the reward .* \[1\].* \[2\]"),
        ({"reward": None}, "A vector environment returned the reward as None"),
        ({"reward": np.array([1.0, 1e300])}, r"A vector .* reward 1e\+300, which is infinite in"),
    ],
)
def test_native_vector_environments(returns: dict[str, Any], message: str):
    assert collect(Native)["next", "truncated"].all()
    assert_raises(message, lambda: Native(**returns))


@pytest.mark.parametrize("flags", [None, [0.0, math.nan], [True], ["a", "b"], [0, 2]])
def test_flags_of_native_vector_environments(flags: Any):
    with pytest.raises(TypeError, match=r"A vector environment: step returned .* as term"):
        collect(partial(Native, terminated=flags))
    expected = collect(Native)
    for good in ([0, 0], np.zeros(2), np.zeros((2, 1), dtype=int)):
        found = collect(partial(Native, terminated=good))
        for name in ("terminated", "truncated", "done"):
            assert torch.equal(found["next", name], expected["next", name])


# -- names -----------------------------------------------------------------------------------


class Numbers(gym.Env):
    """Returns a given value, whatever its space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space, value: Any) -> None:
        self.observation_space, self.value = space, value

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        return self.value, {}

    def step(self, action: Any) -> Any:
        return self.value, 1.0, False, False, {}


NORM = TensorDictModule(nn.LayerNorm(3), ["observation"], ["observation"])
TAKEN: Any = {"observation_transform": TensorDictModule(nn.Identity(), ["observation"], ["logits"])}


@pytest.mark.parametrize(
    ("name", "policy", "options", "message"),
    [
        ("action", POLICY, {}, "The collector writes 'action', which would replace the observ"),
        ("is_init", POLICY, {}, "The collector writes 'is_init', which would replace"),
        ("collector", POLICY, {}, "The collector writes 'collector', which would replace"),
        ("policy_version", POLICY, {}, "The collector writes 'policy_version', which would rep"),
        ("raw_reward", POLICY, {}, "The reward normalizer writes 'raw_reward', which"),
        ("advantage", POLICY, {}, "The GAE of the update writes 'advantage', which"),
        ("value_target", POLICY, {}, "The GAE of the update writes 'value_target', which"),
        ("shifted_valid", POLICY, {}, "The GAE of the update writes 'shifted_valid', which"),
        ("steps_to_next_obs", POLICY, {}, "writes 'steps_to_next_obs', which .* taken for it"),
        ("step_count", POLICY, {"step_count": True}, "The collector writes 'step_count', which"),
        ("logits", POLICY, {}, "The policy writes 'logits', which would replace"),
        ("h", make_recurrent_policy(), {}, "The policy writes 'h', which would replace"),
        ("free", TensorDictSequential(NORM, POLICY), {}, "replace the .*in observation_transform"),
        ("free", POLICY, TAKEN, "The policy writes 'logits', which would replace"),
    ],
)
def test_entries_that_would_be_replaced(name: str, policy: Any, options: Any, message: str):
    space = spaces.Dict(dict.fromkeys(("observation", name), spaces.Box(-9, 9, (3,), np.float32)))
    make_env = partial(Numbers, space, space.sample())
    with pytest.raises(ValueError, match=message):
        GymCollector(make_env, policy, frames_per_batch=4, **options)


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


@pytest.mark.parametrize("encoding", [True, False])
@pytest.mark.parametrize(
    ("space", "value", "bad"),
    [
        (spaces.Discrete(4), -1, -1),
        (spaces.Discrete(4), 4, 4),
        (spaces.MultiDiscrete([2, 3]), [1, 3], 3),
        (spaces.MultiDiscrete([2, 3]), [2, 2], 2),
        (spaces.MultiBinary(3), [256, 0, 1], 256),
        (spaces.Tuple([spaces.MultiBinary(3)] * 2), ([0, 1, 0], [0, 0, 2]), 2),
        (spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]), (0, 3), 3),
    ],
    ids=str,
)
def test_choices_that_the_space_does_not_have(
    space: spaces.Space, value: Any, bad: int, encoding: bool
):
    options = INDICES | {"categorical_action_encoding": encoding}
    options["policy"] = ReadsNothing(one_hot=not encoding)
    message = f"Environment 0 returned the observation 'observation' with {bad}, .* choices"
    with pytest.raises(ValueError, match=message):
        collect(partial(Numbers, space, value), **options)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (PIXELS, np.array([3, 255])),
        (PIXELS, [3.0, 255.0]),
        (spaces.Discrete(256), np.int32(3)),
        (spaces.Discrete(256), np.uint16(3)),
    ],
)
def test_whole_numbers_of_another_dtype_are_cast(space: spaces.Space, value: Any):
    found = collect(partial(Numbers, space, value), **INDICES)["observation"]
    assert ((found if found.ndim == 2 else found[..., 0]) == 3).all()
