"""Policies and environments that do not fit together: errors that name both, and the fix."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import (
    Delta,
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from ppokit import DualClipPPOLoss, GymCollector, evaluate
from ppokit.networks import actor_critic
from tests.blocks import actor_of
from tests.collectors.test_collector import make_policy

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Samples(gym.Env):
    """Returns samples of its observation space, and notes the actions that it gets."""

    def __init__(self, observations: Any, actions: Any = None) -> None:
        self.observation_space = observations
        self.action_space = spaces.Discrete(3) if actions is None else actions
        self.actions: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return self.observation_space.sample(), 1.0, False, len(self.actions) % 5 == 0, {}


def collect(make_env: Any, policy: Any, **options: Any) -> Any:
    return GymCollector(make_env, policy, **{"frames_per_batch": 8} | options).rollout()


# -- actions --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 1)], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_an_action_has_the_shape_of_its_space(shape: tuple[int, ...], nested: bool):
    part = spaces.Box(-1, 1, shape, np.float32)
    space = spaces.Dict(gear=part, lane=spaces.Discrete(2)) if nested else part
    if not shape or 0 in shape:
        policy: Any = TensorDictModule(
            lambda x: x.new_zeros(*x.shape[:-1], *(shape or (1,))), ["observation"], ["action"]
        )
        if nested:
            policy = TensorDictModule(
                lambda x: (
                    x.new_zeros(*x.shape[:-1], *(shape or (1,))),
                    torch.zeros(len(x)).long(),
                ),
                ["observation"],
                ["gear", "lane"],
            )
    else:
        policy, _ = actor_critic((BOX, space))
    env = Samples(BOX, space)
    collect(lambda: env, policy, categorical_action_encoding=True)
    found = [action["gear"] if nested else action for action in env.actions]
    assert {np.shape(action) for action in found} == {shape}
    assert all(space.contains(action) for action in env.actions) or any(np.abs(found).ravel() > 1)
    mode = gym.vector.AutoresetMode.SAME_STEP
    together = gym.vector.SyncVectorEnv([lambda: Samples(BOX, space)] * 2, autoreset_mode=mode)
    batch = collect(together, policy, categorical_action_encoding=True)
    assert batch["gear" if nested else "action"].shape == (2, 4, *(shape or (1,)))


def test_bits_are_whole_numbers():
    policy = TensorDictModule(lambda x: x * 0 + 0.5, ["observation"], ["action"])
    with pytest.raises(ValueError, match=r"chose 0\.5 in 'action', and the space is MultiBinary"):
        collect(partial(Samples, BOX, spaces.MultiBinary(2)), policy)


@pytest.mark.parametrize("part", [spaces.Discrete(3), BOX], ids=str)
@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_an_action_of_equal_parts(part: Any, mode: Any):
    """A Tuple, which a vector environment takes as a tuple of arrays."""
    space = spaces.Tuple((part, part))
    if mode is gym.vector.AutoresetMode.DISABLED:
        mode = gym.vector.AutoresetMode.SAME_STEP
    policy, _ = actor_critic((BOX, space))
    envs = [Samples(BOX, space) for _ in range(2)]
    together = gym.vector.SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)
    batch = collect(together, policy)
    assert batch["action"].shape == (2, 4, 2, *part.shape)
    for env, actions in zip(envs, batch["action"], strict=True):
        assert all(space.contains(action) for action in env.actions) or part is BOX
        expected = np.stack([np.stack(action) for action in env.actions])
        np.testing.assert_array_equal(actions.numpy()[: len(expected)], expected)


@pytest.mark.parametrize("kind", [d.Categorical, OneHotCategorical, IndependentNormal])
@pytest.mark.parametrize("space", [BOX, spaces.Discrete(3)], ids=str)
def test_a_distribution_of_another_kind_of_space(kind: Any, space: Any):
    policy = make_policy(2, 4 if kind is IndependentNormal else 3, kind)
    if (kind is IndependentNormal) == (space is BOX):
        collect(partial(Samples, BOX, space), policy)
        return
    message = r"'action' has shape \[1.*for 1 env.*(Box|Discrete).*distribution for that"
    with pytest.raises(ValueError, match=message) as error:
        collect(partial(Samples, BOX, space), policy)
    advises_encoding = "categorical_action_encoding" in str(error.value)
    assert advises_encoding == isinstance(space, spaces.Discrete)


# -- observations ------------------------------------------------------------------------------


def test_a_distribution_of_numbers_for_whole_numbers():
    """An environment with a Box of whole numbers would get fractions."""
    space = spaces.Box(0, 5, (2,), np.int64)
    policy = make_policy(2, 4, TanhNormal)
    with pytest.raises(ValueError, match=r"int64.* has whole numbers, the policy's 'action'"):
        collect(partial(Samples, BOX, space), policy)
    later = itertools.chain([0.0], itertools.repeat(0.5))
    sometimes = TensorDictModule(lambda x: x * 0 + next(later), ["observation"], ["action"])
    with pytest.raises(ValueError, match="has whole numbers"):
        collect(partial(Samples, BOX, space), sometimes)
    for dtype in (torch.float32, torch.int32, torch.int64):
        rounded = TensorDictModule(lambda x, t=dtype: x.round().to(t), ["observation"], ["action"])
        assert collect(partial(Samples, BOX, space), rounded)["action"].dtype is dtype


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (spaces.Discrete(3), 2.0, 1.7),
        (spaces.Discrete(3), 2, 3),
        (spaces.MultiDiscrete([2, 3]), 1.0, 0.7),
        (spaces.MultiBinary(2), 1, 3),
        (spaces.MultiBinary(2), 1.0, -1.0),
    ],
    ids=str,
)
def test_choices_that_a_policy_writes(space: spaces.Space, right: float, wrong: float):
    policy = lambda value: TensorDictModule(  # noqa: E731
        lambda x: torch.full((len(x), *(space.shape or ())), value), ["observation"], ["action"]
    )
    env = Samples(BOX, space)
    collect(lambda: env, policy(right), categorical_action_encoding=True)
    assert all(space.contains(action) for action in env.actions)
    with pytest.raises(ValueError, match=r"The policy chose .* in 'action', and the space"):
        collect(partial(Samples, BOX, space), policy(wrong), categorical_action_encoding=True)


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.Discrete(3), [1, 0, 1]),
        (spaces.Discrete(3), [0, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 1, 1]),
    ],
    ids=str,
)
def test_vectors_that_are_not_one_hot(space: spaces.Space, wrong: list[int]):
    written = lambda row: TensorDictModule(  # noqa: E731
        lambda x: torch.tensor(row).expand(len(x), -1), ["observation"], ["action"]
    )
    right = [1, 0, 0] if isinstance(space, spaces.Discrete) else [0, 1, 0, 0, 1]
    collect(partial(Samples, BOX, space), written(right))
    with pytest.raises(ValueError, match=r"The policy chose \[.*\] in 'action', and the space is"):
        collect(partial(Samples, BOX, space), written(wrong))


def test_a_vector_environment_gets_actions_of_its_dtype():
    space = spaces.Discrete(3, dtype=np.int32)
    envs = [Samples(BOX, space) for _ in range(2)]
    mode = gym.vector.AutoresetMode.SAME_STEP
    together = gym.vector.SyncVectorEnv([lambda e=e: e for e in envs], autoreset_mode=mode)
    collect(together, actor_critic((BOX, space))[0])
    assert all(space.contains(action) for env in envs for action in env.actions)


class Negative(nn.Module):
    """Gives a scale below 0."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, -torch.ones_like(x)


def test_a_log_probability_that_is_no_number_is_named():
    network = TensorDictModule(Negative(), ["observation"], ["loc", "scale"])
    policy = actor_of(network, IndependentNormal)
    with pytest.raises(ValueError, match=r"action_log_prob.*is nan"):
        collect(partial(Samples, BOX, BOX), policy)


def test_bounds_may_be_arrays_of_several():
    space = spaces.Box(np.float32([-1, 0]), np.float32([1, 2]))
    policy = make_policy(2, 4, TanhNormal, low=space.low, high=space.high)
    batch = collect(partial(Samples, BOX, space), policy)
    expected = policy.get_dist(batch.copy()).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], expected)
    assert (batch["action"].numpy() >= space.low).all()
    loss = DualClipPPOLoss(policy, None, critic_coeff=None)
    assert abs(float(loss(batch.set("advantage", torch.randn(1, 8, 1)))["kl"])) <= 1e-6


def test_a_policy_for_another_size_names_both_sizes():
    wide, _ = actor_critic("Acrobot-v1")
    message = r"policy raised: .*'observation' \[3, 4\] torch.float32.* takes 6 torch"
    with pytest.raises(ValueError, match=message):
        collect("CartPole-v1", wide, num_envs=3, frames_per_batch=9)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_batch_normalization_with_one_environment(num_envs: int):
    layers = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    policy = actor_of(TensorDictModule(nn.Sequential(*layers), ["observation"], ["logits"]))
    options: Any = {"num_envs": num_envs, "frames_per_batch": 8}
    if num_envs == 1:
        with pytest.raises(
            ValueError, match=r"single frame: .*eval\(\).*minibatch_size.*LayerNorm"
        ):
            collect(partial(Samples, BOX), policy, **options)
        policy.eval()
    assert collect(partial(Samples, BOX), policy, **options)["logits"].isfinite().all()


def test_an_error_of_a_network_itself_is_left_alone():
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    policy = actor_of(TensorDictModule(fails, ["observation"], ["logits"]))
    with pytest.raises(RuntimeError, match=r"^out of luck"):
        collect(partial(Samples, BOX), policy)


class Mission(spaces.Space):
    """A space of sentences, unknown to torchrl and gymnasium, as in MiniGrid."""

    def sample(self, *_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "go to the red door"


IMAGE = spaces.Box(0, 255, (7, 7, 3), np.uint8)
OTHERS = {
    "text": spaces.Text(10),
    "mission": Mission(),
    "graph": spaces.Graph(BOX, None),
    "sequence": spaces.Sequence(BOX),
    "one of": spaces.OneOf([spaces.Discrete(2), BOX]),
    "a Tuple with text": spaces.Tuple([BOX, spaces.Text(3)]),
    "a Dict with text": spaces.Dict(words=spaces.Text(3), number=BOX),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_entry_that_is_no_array_is_left_out_unless_it_is_read(name: str):
    space = spaces.Dict(direction=spaces.Discrete(4), image=IMAGE, mission=OTHERS[name])
    actor, _ = actor_critic(Samples(space), in_keys=["direction", "image"])
    plain, _ = actor_critic(Samples(spaces.Dict(direction=spaces.Discrete(4), image=IMAGE)))
    for policy in (actor, plain):
        batch = collect(partial(Samples, space), policy)
        found = [key for key in batch.keys(True, True) if "mission" in key[:1]]
        assert found == [("mission", "number")] * (name == "a Dict with text")
        assert batch["image"].dtype is torch.uint8
    reads = TensorDictModule(lambda *_: torch.zeros(1).long(), ["mission"], ["action"])
    with pytest.raises(TypeError, match=r"no encoding|is no array"):
        collect(partial(Samples, space), reads, categorical_action_encoding=True)
    with pytest.raises(TypeError, match=r"in_keys=\['direction', 'image'"):
        actor_critic(Samples(space))


@pytest.mark.parametrize("is_vector", [False, True])
def test_an_action_beyond_the_bounds_reaches_the_environment_as_it_is(is_vector: bool):
    """Whose ClipAction makes 0 of -1, and not 255."""
    space = spaces.Box(0, 255, (2,), np.uint8)
    action = torch.tensor([-1.0, 300.0])
    policy = TensorDictModule(
        lambda x: action.expand(*x.shape[:-1], 2), ["observation"], ["action"]
    )
    envs: Any = [Samples(BOX, space) for _ in range(2)]
    made: Any = [lambda env=env: env for env in envs]
    if is_vector:
        mode = gym.vector.AutoresetMode.SAME_STEP
        made = gym.vector.SyncVectorEnv(made, autoreset_mode=mode)
    collect(made, policy)
    for env in envs:
        assert [np.asarray(x, float).tolist() for x in env.actions] == [[-1, 300]] * 4


def test_text_within_a_nested_dict_is_left_out():
    space = spaces.Dict(x=BOX, sub=spaces.Dict(y=BOX, words=spaces.Text(3)))
    with pytest.raises(TypeError) as error:
        actor_critic(Samples(space))
    named = re.search(r"in_keys=(\[.*?\])", str(error.value))
    assert named is not None
    in_keys = eval(named[1])
    assert in_keys == ["x", ("sub", "y")]
    batch = collect(partial(Samples, space), actor_critic(Samples(space), in_keys=in_keys)[0])
    assert ("sub", "y") in batch.keys(True, True)
    assert ("sub", "words") not in batch.keys(True, True)


def test_an_id_is_constructed_once():
    made = []

    def make() -> Samples:
        made.append(1)
        return Samples(spaces.Dict(x=BOX, words=spaces.Text(3)))

    gym.register("ppokit/Words-v0", make)
    try:
        policy, _ = actor_critic((spaces.Dict(x=BOX), Samples(BOX).action_space))
        batch = collect("ppokit/Words-v0", policy)
    finally:
        del gym.registry["ppokit/Words-v0"]
    assert len(made) == 1
    assert "words" not in batch.keys()


def test_text_alone_names_no_wrapper_that_cannot_take_it():
    for space in (spaces.Text(4), spaces.Graph(BOX, None)):
        policy = TensorDictModule(lambda *_: torch.zeros(1).long(), ["observation"], ["action"])
        with pytest.raises(TypeError) as error:
            collect(partial(Samples, space), policy)
        assert "FlattenObservation" not in str(error.value)
        assert "TransformObservation" in str(error.value)


# -- devices --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_device_that_is_not_there():
    actor, _ = actor_critic("CartPole-v1")
    for call in (
        partial(GymCollector, "CartPole-v1", actor, frames_per_batch=8),
        partial(evaluate, "CartPole-v1", actor),
        partial(actor_critic, "CartPole-v1"),
    ):
        with pytest.raises(ValueError, match=r"device='cuda:1', and torch finds 0 CUDA devices"):
            call(device="cuda:1")


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.MultiDiscrete([2, 2])], ids=str)
def test_a_choice_that_the_space_does_not_have(space: Any):
    def choose(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.full((len(x), *(space.shape or ())), value)

    for value in (2, -1):
        policy = TensorDictModule(partial(choose, value=value), ["observation"], ["action"])
        with pytest.raises(
            ValueError, match=r"The policy chose -?\d in 'action'.*an output for each"
        ):
            collect(partial(Samples, BOX, space), policy, categorical_action_encoding=True)
    policy = TensorDictModule(partial(choose, value=1), ["observation"], ["action"])
    collect(partial(Samples, BOX, space), policy, categorical_action_encoding=True)


@pytest.mark.parametrize("kind", [TanhNormal, Delta])
@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.MultiDiscrete([2, 2])], ids=str)
def test_a_distribution_of_numbers_for_choices(kind: Any, space: Any):
    """Two numbers have the shape of one of two choices as a one-hot vector."""
    names = ["param"] if kind is Delta else ["loc", "scale"]
    network: Any = nn.Linear(2, 2 if space.shape == () else 4)
    policy: Any = ProbabilisticActor(
        TensorDictModule(
            lambda x: (network(x), torch.ones(len(x), network.out_features))[: len(names)],
            ["observation"],
            names,
        ),
        in_keys=names,
        distribution_class=kind,
        return_log_prob=False,
        default_interaction_type=InteractionType.RANDOM,
    )
    with pytest.raises(ValueError, match=r"'action'.*distribution (of choices|for that)"):
        collect(partial(Samples, BOX, space), policy)
