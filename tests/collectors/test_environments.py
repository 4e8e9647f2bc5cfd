"""GymCollector's environments: seeds, ids, vector environments of both kinds, bad input."""

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

from ppokit import GymCollector, LSTMModule, ObservationNormalizer
from tests.collectors.test_collector import (
    POLICY,
    Wander,
    assert_same,
    collect,
    collector_of,
    in_one,
    make_policy,
    make_recurrent_policy,
)
from tests.collectors.test_faulty_environments import Numbers

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


@pytest.mark.parametrize("name", ["frames", "iter", "policy_version"])
@pytest.mark.parametrize("value", [-3, 1.5, None, [1]])
def test_a_state_that_is_no_count_is_not_loaded(name: str, value: Any):
    collector = collector_of()
    before = collector.state_dict()
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        collector.load_state_dict(before | {name: value})
    assert collector.state_dict()[name] == before[name]


def test_ids_beyond_int64_are_not_loaded():
    """Later collectors of the process would have no ids left."""
    collector = collector_of()
    for number, words in ((2**63, "must be below"), (-1, "whole number"), (2**63 - 2, "below")):
        with pytest.raises(ValueError, match=words):
            collector.load_state_dict(collector.state_dict() | {"traj_pool": {"traj_id": number}})
    assert len(ids_of(collector_of())) >= 2


def test_a_transform_in_place_of_an_entry_that_is_not_there():
    with pytest.raises(KeyError, match=r"observation_transform reads \['state'\].*observation"):
        collector_of(observation_transform=ObservationNormalizer(3, in_key="state"))


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


def test_a_native_vector_environment_that_takes_one_seed():
    (batch,) = collect(lambda: OneSeed(2), POLICY, 2, batches=1)
    expected = OneSeed(2)
    expected.reset(seed=7)
    assert np.array_equal(batch["observation"][:, 0].numpy(), expected.reset()[0])


# -- bad input ----------------------------------------------------------------------------


def observing(space: spaces.Space) -> Any:
    return partial(Numbers, space, None)


POLE, UNNAMED = "CartPole-v1", r"no encoding for observation .*Tuple.*Flatten"
BOX = spaces.Box(0, 1, (3,))
TUPLE = spaces.Tuple([spaces.Discrete(2), BOX])
TUPLE_OF_DICTS = spaces.Tuple([spaces.Dict(a=BOX), spaces.Dict(a=BOX)])
EMPTY = spaces.Dict(nothing=spaces.Dict())
SCALAR_PIXEL = spaces.Box(0, 255, (), np.uint8)


@pytest.mark.parametrize(
    ("make_env", "options", "error", "message"),
    [
        (Wander, {"num_envs": 0}, ValueError, "num_envs must be a whole number .* 1, got 0"),
        (
            Wander,
            {"frames_per_batch": 0},
            ValueError,
            "frames_per_batch must be a whole number .* 1, got 0",
        ),
        (Wander, {"total_frames": 0}, ValueError, "must be positive, or -1 for no end, got 0"),
        (3, {}, TypeError, "must be the id of an environment, a function"),
        (object, {}, TypeError, r"make_env returned .*it must return a single gymnasium\.Env"),
        (lambda: TransformedEnv(GymEnv(POLE)), {}, TypeError, "make_env returned TransformedEnv"),
        (lambda: GymEnv(POLE, frame_skip=2), {}, TypeError, "without batch size or frame skip"),
        (observing(TUPLE), {}, TypeError, UNNAMED),
        ("Blackjack-v1", {}, TypeError, UNNAMED),
        (observing(TUPLE_OF_DICTS), {}, TypeError, UNNAMED),
        (POLE, {"observation_transform": lambda x: x}, TypeError, "TensorDictModule, got function"),
        (observing(EMPTY), {}, TypeError, "The observation has no entry"),
        (observing(SCALAR_PIXEL), {}, TypeError, "no encoding for observation space Box.*Flatten"),
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
    collector = collector_of(num_envs=2.0)
    for frames, steps in ((1, 1), (33, 17)):  # set later
        collector.frames_per_batch = frames
        assert collector.rollout().shape == (2, steps)


@pytest.mark.parametrize("seed", [-1, 1.5, None])
def test_a_seed_is_a_whole_number(seed: Any):
    collector = collector_of()
    assert collector.set_seed(np.int64(3)) == collector.set_seed(3)
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        collector.set_seed(seed)


# -- vector environments that reset in the next step -------------------------------------


def largest(x: torch.Tensor) -> torch.Tensor:
    """The one-hot action of the largest number, of three."""
    return torch.nn.functional.one_hot(x.argmax(-1), 3)


@pytest.mark.parametrize("observations", ["array", "dict"])
def test_resets_in_the_next_step(observations: str):
    """The frames are those of resets in the same step, except for the resetting steps."""
    policy = TensorDictModule(largest, ["observation"], ["action"])
    transform = None
    if observations == "array":
        transform = TensorDictModule(lambda x: 2 * x, ["observation"], ["doubled"])
    make_env = partial(Wander, observations=observations)
    envs = SyncVectorEnv([make_env] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    options: Any = {"steps": 40, "batches": 3, "observation_transform": transform}
    late = collect(envs, policy, 1, **options | {"steps": 120})
    early = torch.cat(collect(make_env, policy, 3, **options), 1)
    batch = torch.cat(late, 1)
    for row, other in zip(batch, early, strict=True):
        frames = row[row["collector", "mask"]]
        size = min(len(frames), len(other))
        assert size > 90
        for name in other.exclude("collector").keys(True, True):
            assert torch.equal(frames[name][:size], other[name][:size]), name
    is_reset, ids = ~batch["collector", "mask"], batch["collector", "traj_ids"]
    done = batch["next", "done"].squeeze(-1)
    assert torch.equal(is_reset[:, 1:], done[:, :-1])
    assert not batch["next", "done"][is_reset].any()
    assert not batch["next", "reward"][is_reset].any()
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])


def test_infos_may_be_a_list_of_each_environments():
    """Of gymnasium's DictInfoToList; a mask in them is read."""
    policy = TensorDictModule(largest, ["observation"], ["action"])
    batches = []
    for wrap in (lambda envs: envs, gym.wrappers.vector.DictInfoToList):
        make_env = partial(Wander, mask=True)
        envs = SyncVectorEnv([make_env] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
        batches.append(torch.cat(collect(wrap(envs), policy, 1, steps=90, batches=2), 1))
    assert "action_mask" in batches[0].keys()
    assert (batches[0].exclude("collector") == batches[1].exclude("collector")).all()


def test_frames_of_resets_are_not_counted():
    """Not by the collector, and not by the statistics of the observations."""
    native, norm = Native(2, AutoresetMode.NEXT_STEP), ObservationNormalizer(3)
    frames: Any = {"frames_per_batch": 40, "total_frames": 120}
    collector = GymCollector(native, POLICY, **frames, observation_transform=norm)
    batches = list(collector)
    frames = [int(batch["collector", "mask"].sum()) for batch in batches]
    assert sum(frames[:-1]) < 120 <= sum(frames)
    assert collector.stats()["frames"] == sum(frames) == norm.count
    assert collector.closed
    assert native.closed


def test_recurrent_states_begin_after_the_reset():
    native = Native(3, AutoresetMode.NEXT_STEP)
    with GymCollector(native, make_recurrent_policy(LSTMModule), frames_per_batch=90) as collector:
        batch = torch.cat([collector.rollout(), collector.rollout()], 1)
    mask, is_init = batch["collector", "mask"], batch["is_init"].squeeze(-1)
    assert not mask.all()
    assert torch.equal(is_init[:, 1:], ~mask[:, :-1])
    state = batch["h"].flatten(2)
    assert (state.abs().amax(-1) == 0)[is_init].all()
    assert (state.abs().amax(-1) > 0)[~is_init].all()


class Silent(Native):
    """Resets in the same step, without the final observation."""

    def step(self, actions: Any) -> Any:
        *results, infos = super().step(actions)
        infos.pop("final_obs", None)
        return *results, infos


# -- forms of make_env ------------------------------------------------------------------------


def test_a_list_and_a_vector_environment():
    kinds = [partial(Wander), "ppokit/Wander-v0", lambda: Wander()]
    expected = collect(Wander, POLICY, 3)
    assert_same(collect(kinds, POLICY, 1, steps=75), expected)
    assert_same(collect(Native(3), POLICY, 1, steps=75), expected)
    assert_same(collect(lambda: Native(3), POLICY, 3), expected)


ONE = Wander()
DIFFERENT = [Wander, partial(Wander, actions="box")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make_env": DIFFERENT}, r"Environment 1 has action_space Box.* environment 0 has"),
        ({"make_env": [], "num_envs": 1}, "make_env is an empty list"),
        ({"make_env": lambda: ONE}, "returned one environment twice"),
        ({"make_env": [Wander]}, "make_env holds 1 environments, and num_envs is 2"),
        ({"make_env": Native(2), "num_envs": 3}, "holds 2 environments, and num_envs is 3"),
        ({"make_env": Native(2, AutoresetMode.DISABLED)}, r"mode .*DISABLED.* Make it with"),
        ({"make_env": Silent(2)}, r"Silent says .* no 'final_obs'.* NEXT_STEP"),
    ],
)
def test_bad_environments(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        collector_of(**{"frames_per_batch": 100} | options).rollout()


def test_the_number_of_environments_cannot_be_set():
    collector = collector_of()
    with pytest.raises(AttributeError, match="num_envs"):
        collector.num_envs = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert collector.num_envs == 2


def test_a_list_of_vector_environments_raises():
    for make_env in ([Native(2), Native(2)], [partial(Native, 2)]):
        with pytest.raises(TypeError, match=r"a list of these|A list holds single environments"):
            GymCollector(make_env, make_policy(3, 3, OneHotCategorical), frames_per_batch=4)
