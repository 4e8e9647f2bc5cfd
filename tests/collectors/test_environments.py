"""GymCollector's environments: seeds, ids of trajectories, vector environments, bad input."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector
from tests.collectors.test_collector import Wander, assert_same, collect, in_one, make_policy

POLICY = make_policy(3, 3, OneHotCategorical)


def collector_of(make_env: Any = Wander, policy: Any = POLICY, **options: Any) -> GymCollector:
    return GymCollector(make_env, policy, **{"frames_per_batch": 16, "num_envs": 2} | options)


# -- seeds and trajectory ids ------------------------------------------------------


@pytest.mark.parametrize("static_seed", [False, True])
def test_seeds_are_those_of_serial_env(static_seed: bool):
    collector = collector_of(num_envs=3, frames_per_batch=6)
    env = SerialEnv(3, lambda: GymEnv("ppokit/Wander-v0"))
    expected = env.set_seed(5, static_seed=static_seed)
    assert collector.set_seed(5, static_seed=static_seed) == expected
    assert torch.equal(collector.rollout()["observation"][:, 0], env.reset()["observation"])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        collector.set_seed(-1)


def ids_of(collector: GymCollector) -> set[int]:
    return set(collector.rollout()["collector", "traj_ids"].flatten().tolist())


def test_a_seed_between_batches_begins_new_trajectories():
    collector = collector_of()
    collector.set_seed(0)
    first = collector.rollout()
    used = int(collector.state_dict()["traj_pool"]["traj_id"])
    collector.set_seed(0)
    second = collector.rollout()
    assert torch.equal(first["observation"][:, 0], second["observation"][:, 0])
    assert second["collector", "traj_ids"][:, 0].tolist() == [used, used + 1]


def test_each_collector_of_a_process_has_its_own_trajectory_ids():
    collectors = [collector_of() for _ in range(3)]
    ids = [ids_of(collector) for collector in collectors]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]
    state = collectors[2].state_dict()
    collectors[0].load_state_dict(state)
    loaded, later = ids_of(collectors[0]), ids_of(collector_of())
    assert not loaded & (ids[0] | ids[1] | ids[2] | later)
    train, evaluation = collector_of(), collector_of()  # in another order than when it was saved
    state["traj_pool"] = evaluation.state_dict()["traj_pool"]
    train.load_state_dict(state)
    assert not ids_of(train) & ids_of(evaluation)


# -- vector environments ----------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_give_the_same(mode: Any):
    policy = make_policy(4, 2, OneHotCategorical)
    options: Any = {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode=mode, vector_kwargs=options)
    assert_same(collect(envs, policy, 2), collect("CartPole-v1", policy, 2))


class Acts(nn.Module):
    """An action that depends on the observation's first number."""

    def __init__(self, actions: str) -> None:
        super().__init__()
        self.actions = actions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)[:, 0]
        if self.actions in ("box", "scalar"):
            size = 2 if self.actions == "box" else 1
            return x.float().sin().unsqueeze(-1).expand(-1, size).contiguous()
        one_hot = torch.nn.functional.one_hot
        return torch.cat([one_hot((x > 0).long(), 3), one_hot((x > 1).long(), 4)], -1)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [("dict", "multi_discrete"), ("double", "box"), ("tuple", "box"), ("array", "scalar")],
)
def test_vector_environments_of_other_spaces(observations: str, actions: str):
    key = {"dict": ("goal", "place")}.get(observations, "observation")
    policy = TensorDictModule(Acts(actions), [key], ["action"])
    make_env = partial(Wander, observations, actions)
    batches = collect(in_one(make_env, 2), policy, 2)
    assert_same(batches, collect(make_env, policy, 2))


class Native(SyncVectorEnv):
    """A vector environment of its own kind."""

    def __init__(self, num_envs: int, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> None:
        super().__init__([Wander] * num_envs, autoreset_mode=mode)


class OneSeed(Native):
    """Takes one seed."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if isinstance(seed, list):
            raise TypeError
        return super().reset(seed=seed, options=options)


def test_a_function_that_makes_a_vector_environment():
    assert_same(collect(lambda: Native(3), POLICY, 3), collect(Wander, POLICY, 3))


def test_a_native_vector_environment_that_takes_one_seed():
    (batch,) = collect(lambda: OneSeed(2), POLICY, 2, batches=1)
    expected = OneSeed(2)
    expected.reset(seed=7)
    assert np.array_equal(batch["observation"][:, 0].numpy(), expected.reset()[0])


# -- bad input ----------------------------------------------------------------------------


def observing(space: spaces.Space) -> Any:
    def make_env() -> gym.Env:
        env = Wander()
        env.observation_space = space
        return env

    return make_env


UNNAMED = r"no encoding for observation .*Tuple.*Flatten"
BOX = spaces.Box(0, 1, (3,))
TUPLE = spaces.Tuple([spaces.Discrete(2), BOX])
TUPLE_OF_DICTS = spaces.Tuple([spaces.Dict(a=BOX), spaces.Dict(a=BOX)])
EMPTY = spaces.Dict(nothing=spaces.Dict())
SCALAR_PIXEL = spaces.Box(0, 255, (), np.uint8)


@pytest.mark.parametrize(
    ("make_env", "options", "error", "message"),
    [
        (Wander, {"num_envs": 0}, ValueError, "num_envs must be 1 or more, got 0"),
        (Wander, {"frames_per_batch": 0}, ValueError, "frames_per_batch must be 1 or more, got 0"),
        (Wander, {"total_frames": 0}, ValueError, "must be positive, or -1 for no end, got 0"),
        (3, {}, TypeError, "must be the id of an environment, a function"),
        (object, {}, TypeError, r"make_env returned .*it must return a single gymnasium\.Env"),
        (
            lambda: TransformedEnv(GymEnv("CartPole-v1")),
            *({}, TypeError, "make_env returned TransformedEnv"),
        ),
        (
            lambda: GymEnv("CartPole-v1", frame_skip=2),
            {},
            TypeError,
            "without batch size or frame skip",
        ),
        (observing(TUPLE), {}, TypeError, UNNAMED),
        ("Blackjack-v1", {}, TypeError, UNNAMED),
        (observing(TUPLE_OF_DICTS), {}, TypeError, UNNAMED),
        (observing(EMPTY), {}, TypeError, "The observation has no entry"),
        (
            observing(SCALAR_PIXEL),
            *({}, TypeError, "no encoding for observation space Box.*Flatten"),
        ),
    ],
)
def test_bad_arguments(make_env: Any, options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        collector_of(make_env, **options)


def test_more_frames_than_asked_for():
    with pytest.warns(UserWarning, match="is no multiple of"):
        collector = collector_of(frames_per_batch=15, total_frames=20)
    assert [batch.numel() for batch in collector] == [16, 16]
    assert "num_envs=2, frames_per_batch=16" in repr(collector)
