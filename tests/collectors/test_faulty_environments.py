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

from ppokit import GymCollector, ObservationNormalizer
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
    message = rf"Environment [01] returned the observation 'observation' as .*{described}.*\[3\]"
    with pytest.raises(ValueError, match=message):
        collect(partial(Faulty, bad, when), vectorization=vectorization)


@pytest.mark.slow
@reported
def test_an_observation_of_another_shape_in_another_process():
    """Shared memory would take it by broadcasting."""
    with pytest.raises(ValueError, match=r"Environment [01] .*'observation' as .*\[1\].* \[3\]"):
        collect(partial(Faulty, np.zeros(1, np.float32)), vectorization="async")


class ReadsNothing(TensorDictModuleBase):
    """Chooses the first action."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [], ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.shape, 3, dtype=torch.int64)
        action[..., 0] = 1
        return tensordict.set("action", action)


def other_leaf(observation: Any, *, goal: dict[str, Any]) -> Any:
    return observation | {"goal": {**observation["goal"], **goal}}


@reported
@EVERYWHERE
@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (
            {"place": np.zeros((1, 2))},
            r"Environment [01] .*\('goal', 'place'\).* \[1, 2\].*\[2, 2\]",
        ),
        ({"place": None}, r"\('goal', 'place'\) as None"),
        ({"kind": np.array([1, 2])}, r"\('goal', 'kind'\) as .*\[2\].*numbers of shape \[\]"),
        ({"kind": None}, r"\('goal', 'kind'\) as None"),
    ],
)
def test_leaves_of_another_shape(goal: dict[str, Any], message: str, vectorization: str):
    make_env = partial(Faulty, partial(other_leaf, goal=goal), observations="dict")
    with pytest.raises(ValueError, match=message):
        collect(make_env, ReadsNothing(), vectorization=vectorization)


@reported
@EVERYWHERE
@pytest.mark.parametrize("bad", [{}, None])
def test_leaves_that_are_missing(bad: Any, vectorization: str):
    make_env = partial(Faulty, bad, observations="dict")
    with pytest.raises(ValueError, match=r"Environment [01] returned no .* in its observation"):
        collect(make_env, ReadsNothing(), vectorization=vectorization)


class FaultyMask(Wander):
    """Its action mask goes wrong."""

    def __init__(self, mask: Any) -> None:
        super().__init__(mask=True)
        self.bad = mask

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        info = {} if self.bad is None else {"action_mask": self.bad}
        return *rest, info


@reported
@EVERYWHERE
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(1, np.int8), r"'action_mask' as int8 of shape \[1\].*\[3\]"),
        (None, r"Environment [01] returned no 'action_mask' in its info"),
    ],
)
def test_action_masks(mask: Any, message: str, vectorization: str):
    with pytest.raises(ValueError, match=message):
        collect(partial(FaultyMask, mask), vectorization=vectorization)


@EVERYWHERE
@pytest.mark.parametrize("length", [1, 2])
def test_the_first_action_mask_is_of_the_choices(length: int, vectorization: str):
    class Short(Wander):
        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0], {"action_mask": np.ones(length, bool)}

    with pytest.raises(ValueError, match=rf"'action_mask' .*shape \[{length}\].* \[3\]"):
        collect(Short, vectorization=vectorization)


def test_the_first_observation():
    with pytest.raises(ValueError, match=r"Environment 0 .*'observation' as .*shape \[1\].* \[3\]"):
        GymCollector(
            partial(FirstIsFaulty, np.zeros(1)), ReadsNothing(), frames_per_batch=4, num_envs=1
        )


class FirstIsFaulty(Faulty):
    """Goes wrong at once."""

    def is_due(self, when: str) -> bool:
        return True


def test_numbers_in_lists_are_arrays():
    lists = collect_good(partial(Faulty, lambda observation: observation.tolist()))
    arrays = collect_good(partial(Faulty, lambda observation: observation))
    assert torch.equal(lists["next", "observation"], arrays["next", "observation"])


def collect_good(make_env: Callable[[], Any], **options: Any) -> TensorDictBase:
    policy = make_policy(3, 3, OneHotCategorical)
    with GymCollector(make_env, policy, frames_per_batch=12, num_envs=2, **options) as collector:
        collector.set_seed(0)
        return collector.rollout()


# -- what is no step, and no end -----------------------------------------------------------


class Odd(Wander):
    """Returns from a step, or from a reset, what a function makes of it."""

    def __init__(self, of_step: Any = None, of_reset: Any = None) -> None:
        super().__init__()
        self.of_step, self.of_reset, self.resets = of_step, of_reset, 0

    def reset(self, **kwargs: Any) -> Any:
        self.resets += 1
        returned = super().reset(**kwargs)
        return self.of_reset(returned) if self.of_reset and self.resets > 2 else returned

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        returned = observation, reward, False, self.time == 3, info
        return self.of_step(returned) if self.of_step and self.time > 1 else returned


@reported
@EVERYWHERE
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:4], r"returned \(ndarray, .*, bool, bool\), where gymnasium's returns"),
        (lambda x: None, r"returned a NoneType, where"),
        (lambda x: x[0], r"returned a ndarray, where"),
        (lambda x: (*x[:4], None), r"returned .*bool, NoneType\), where .* info a dict"),
        (lambda x: (*x[:2], "no", *x[3:]), r"returned terminated='no', which is neither"),
        (lambda x: (*x[:2], None, *x[3:]), r"returned terminated=None, which"),
        (lambda x: (*x[:2], float("nan"), *x[3:]), r"returned terminated=nan, which"),
        (lambda x: (*x[:3], np.array([True, False]), x[4]), r"returned truncated=array"),
        (lambda x: (*x[:3], 2, x[4]), r"returned truncated=2, which"),
    ],
    ids=["four", "None", "one", "no info", "text", "no end", "NaN", "two ends", "2"],
)
def test_steps_that_are_none(change: Any, message: str, vectorization: str):
    with pytest.raises(ValueError, match=rf"[Ee]nvironment [01] {message}"):
        collect(partial(Odd, change), vectorization=vectorization)


@reported
@EVERYWHERE
@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: None, lambda x: (x[0], None)])
def test_resets_that_are_none(change: Any, vectorization: str):
    with pytest.raises(ValueError, match=r"reset\(\) of environment [01] returned .* where gym"):
        collect(partial(Odd, None, change), vectorization=vectorization)


@EVERYWHERE
@pytest.mark.parametrize("kind", [np.bool_, int, lambda x: np.array([x]), torch.tensor])
def test_ends_of_any_kind(kind: Any, vectorization: str):
    make_env = partial(Odd, lambda x: (*x[:2], kind(x[2]), kind(x[3]), x[4]))
    found = collect_good(make_env, vectorization=vectorization)
    expected = collect_good(Odd, vectorization=vectorization)
    for name in ("terminated", "truncated", "done"):
        assert torch.equal(found["next", name], expected["next", name])
    assert found["next", "done"].any()


# -- rewards ------------------------------------------------------------------------------


class Pays(Wander):
    """A reward of any kind."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


@reported
@EVERYWHERE
@pytest.mark.parametrize(
    ("reward", "described"),
    [
        (None, "None"),
        (np.ones(2), r"float64 of shape \[2\]"),
        (np.ones((1, 1, 1)), r"float64 of shape \[1, 1, 1\]"),
        ("1", "U1"),
    ],
)
def test_rewards_that_are_no_number(reward: Any, described: str, vectorization: str):
    with pytest.raises(ValueError, match=rf"Environment [01] returned the reward as .*{described}"):
        collect(partial(Pays, reward), vectorization=vectorization)


@EVERYWHERE
@pytest.mark.parametrize("reward", [2, True, np.float32(2), np.int64(2), np.full(1, 2.0), [2.0]])
def test_rewards_that_are_numbers(reward: Any, vectorization: str):
    batch = collect_good(partial(Pays, reward), vectorization=vectorization)
    assert batch["next", "reward"].unique().tolist() == [float(np.asarray(reward).item())]


# -- native vector environments -------------------------------------------------------------


class PaysTwice(Pays):
    """Declares rewards of two objectives."""

    reward_space = spaces.Box(-9, 9, (2,))

    def __init__(self) -> None:
        super().__init__(np.ones(2, np.float32))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_rewards_of_several_numbers_are_refused_by_vector_environments(vectorization: str):
    assert collect_good(PaysTwice)["next", "reward"].shape[-1] == 2
    with pytest.raises(ValueError, match=r"rewards of shape \[2\].*vectorization='serial'"):
        collect(PaysTwice, vectorization=vectorization)


class Native(VectorEnv):
    """Two environments whose observations are of any kind; all episodes end together."""

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
        ({"observation": np.zeros(6)}, r"A vector environment .* \[6\].* \[2, 3\]"),
        ({"observation": None}, "A vector environment returned the observation .* as None"),
        ({"final": [np.zeros(3), np.zeros(1)]}, r"Environment 1 .*'observation' as .*\[1\]"),
        ({"final": [None, None]}, "Environment 0 .*'observation' as None"),
        ({"reward": np.ones(1)}, r"A vector environment returned the reward .* \[1\].* \[2\]"),
        ({"reward": None}, "A vector environment returned the reward as None"),
    ],
)
def test_native_vector_environments(returns: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        collect(lambda: Native(**returns), vectorization="vector_entry_point")


def test_a_native_vector_environment_that_is_as_declared():
    policy = make_policy(3, 3, OneHotCategorical)
    options = {"vectorization": "vector_entry_point", "num_envs": 2, "frames_per_batch": 6}
    assert GymCollector(Native, policy, **options).rollout()["next", "truncated"].all()


# -- names that are taken -----------------------------------------------------------------


class Named(gym.Env):
    """Observations of these names."""

    action_space = spaces.Discrete(3)

    def __init__(self, **names: spaces.Space) -> None:
        box = spaces.Box(-9, 9, (3,), np.float32)
        self.observation_space = spaces.Dict({"observation": box, **dict.fromkeys(names, box)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 1.0, False, False, {}


def named(*names: str) -> Callable[[], gym.Env]:
    return lambda: Named(**dict.fromkeys(names))


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("action", "collector"),
        ("is_init", "collector"),
        ("collector", "collector"),
        ("logits", "policy"),
        ("action_log_prob", "policy"),
    ],
)
def test_observations_that_would_be_replaced(name: str, writer: str):
    message = rf"The {writer} writes '{name}', which would replace the observation '{name}'"
    with pytest.raises(ValueError, match=message):
        GymCollector(named(name), make_policy(3, 3, OneHotCategorical), frames_per_batch=4)


def test_a_recurrent_state_that_would_be_replaced():
    lstm = LSTMModule(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", "h", "c", "is_init"],
        out_keys=["features", ("next", "h"), ("next", "c")],
    )
    head = TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(lstm, head),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    with pytest.raises(ValueError, match="The policy writes 'h', which would replace"):
        GymCollector(named("h"), policy, frames_per_batch=4)


def test_a_policy_that_changes_its_observation():
    """The loss would change it a second time."""
    norm = TensorDictModule(nn.LayerNorm(3), ["observation"], ["observation"])
    policy = TensorDictSequential(norm, make_policy(3, 3, OneHotCategorical))
    with pytest.raises(ValueError, match=r"replace the observation.*in observation_transform"):
        GymCollector(Wander, policy, frames_per_batch=4)


def test_transforms_may_replace_observations_and_nothing_else():
    policy = make_policy(3, 3, OneHotCategorical)
    options = {"frames_per_batch": 4}
    norm = ObservationNormalizer(3)
    GymCollector(Wander, policy, observation_transform=norm, **options).rollout()
    taken = TensorDictModule(nn.Identity(), ["observation"], ["logits"])
    with pytest.raises(ValueError, match="The policy writes 'logits', which would replace"):
        GymCollector(Wander, policy, observation_transform=taken, **options)


def test_other_names_are_free():
    batch = GymCollector(
        named("goal", "logit"), make_policy(3, 3, OneHotCategorical), frames_per_batch=4
    ).rollout()
    assert isinstance(batch, TensorDict)
    assert {"goal", "logit", "observation"} <= set(batch.keys())


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


def first_action(at: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(at), dtype=torch.long)


def collect_whole(make_env: Callable[[], Any], key: str, vectorization: str) -> TensorDictBase:
    with GymCollector(
        make_env,
        TensorDictModule(first_action, [key], ["action"]),
        frames_per_batch=12,
        num_envs=2,
        vectorization=vectorization,
        categorical_action_encoding=True,
    ) as collector:
        return collector.rollout()


@pytest.mark.parametrize("vectorization", ["serial", "sync", "async"])
def test_the_last_observation_of_an_episode_where_arrays_are_used_again(vectorization: str):
    batch = collect_whole(Reusing, "at", vectorization)
    expected = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]).expand(2, 6)
    assert torch.equal(batch["next", "at"].squeeze(-1), expected)


class Numbers(gym.Env):
    """Returns what it is told to, whatever its space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space, value: Any) -> None:
        self.observation_space, self.value = space, value

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        return self.value, {}

    def step(self, action: Any) -> Any:
        return self.value, 1.0, False, False, {}


PIXELS = spaces.Box(0, 255, (2,), np.uint8)


@EVERYWHERE
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
def test_numbers_that_would_be_stored_as_others(
    space: spaces.Space, value: Any, message: str, vectorization: str
):
    policy = TensorDictModule(first_action, ["observation"], ["action"])
    options: Any = {"vectorization": vectorization, "categorical_action_encoding": True}
    with pytest.raises(ValueError, match=rf"the observation 'observation' {message}"):
        GymCollector(partial(Numbers, space, value), policy, frames_per_batch=2, **options)


@pytest.mark.parametrize(
    ("space", "value"),
    [(PIXELS, np.array([3, 255])), (PIXELS, [3.0, 255.0]), (spaces.Discrete(256), np.int32(3))],
)
def test_whole_numbers_of_another_dtype_are_taken(space: spaces.Space, value: Any):
    found = collect_whole(partial(Numbers, space, value), "observation", "serial")["observation"]
    assert ((found if found.ndim == 2 else found[..., 0]) == 3).all()


def test_what_a_vector_environment_would_not_cast():
    message = "Environment 0 returned .* as int64, and its space declares uint8.*Return it as"
    with pytest.raises(ValueError, match=message):
        collect_whole(partial(Numbers, PIXELS, np.array([3, 255])), "observation", "sync")
