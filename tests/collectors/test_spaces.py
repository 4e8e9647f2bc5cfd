"""Spaces, dtypes, states, masks and actions of several parts, as torchrl yields them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import distributions as d
from torchrl.data import Unbounded
from torchrl.envs import Compose, GymEnv, InitTracker, default_info_dict_reader
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    MaskedCategorical,
    MaskedOneHotCategorical,
    TanhNormal,
)
from torchrl.modules.utils import get_primers_from_module

from ppokit import GymCollector
from ppokit.networks import actor_critic
from tests.blocks import actor_of
from tests.collectors.test_collector import (
    ACTIONS,
    OBSERVATIONS,
    Wander,
    assert_many_ends,
    assert_same,
    collect,
    collector_of,
    in_one,
    make_policy,
    make_recurrent_policy,
    reference,
    rescored,
)
from tests.mixed import ACTIONS as MIXED
from tests.mixed import Cut, Exp, Mixed, make_mixed_actor, make_recurrent_actor, torchrl_env


class ReadsAll(TensorDictModuleBase):
    """Draws an action of any kind after the sum of all observations."""

    def __init__(self, in_keys: list, spec: Any) -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.choice = in_keys, ["action", "sum"], spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = [tensordict[key].reshape(*tensordict.shape, -1).double() for key in self.in_keys]
        tensordict["sum"] = torch.cat(seen, -1).sum(-1, keepdim=True)
        tensordict["action"] = torch.stack([self.choice.rand() for _ in range(len(tensordict))])
        return tensordict


SPACES: list[Any] = [({"observations": name}, False) for name in OBSERVATIONS]
SPACES += [({"observations": name}, True) for name in ("dict", "discrete", "alike")]
SPACES += [({"actions": name}, False) for name in ACTIONS]
SPACES += [({"actions": name}, True) for name in ("discrete", "multi_discrete")]


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays:UserWarning")
@pytest.mark.parametrize(("names", "categorical"), SPACES, ids=str)
def test_spaces(names: dict[str, str], categorical: bool):
    encoding: Any = {"categorical_action_encoding": categorical}
    make_env = partial(GymEnv, "ppokit/Wander-v0", **names, **encoding)
    env = make_env()
    policy = ReadsAll(list(env.observation_spec.keys(True, True)), env.action_spec)
    batches = collect(partial(Wander, **names), policy, 3, batches=2, **encoding)
    assert_many_ends(batches, "truncated", "terminated")
    assert_same(batches, reference(make_env, policy, 3, batches=2))
    if names.get("observations") == "pixels":
        assert batches[0]["pixels"].dtype is torch.uint8


# -- precision -----------------------------------------------------------------


def float_policy(dtype: torch.dtype = torch.float32) -> Any:
    return make_policy(9, 2, TanhNormal, dtype=dtype)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_policy_of_another_dtype_names_the_option(dtype: torch.dtype, hooked: bool):
    policy = TensorDictSequential(float_policy(dtype)) if hooked else float_policy(dtype)
    make = partial(GymCollector, "InvertedDoublePendulum-v5", policy, frames_per_batch=10)
    assert make(observation_dtype=dtype).rollout()["observation"].dtype is dtype
    collector = make(observation_dtype=torch.float32 if dtype is torch.float64 else None)
    with pytest.raises(ValueError, match=r"'observation' \[1, 9\] torch\.float.*Pass observ"):
        collector.rollout()
    assert collector.closed


def test_observations_are_single_precision_by_default():
    collector = GymCollector("InvertedDoublePendulum-v5", float_policy(), frames_per_batch=30)
    assert collector.env.observation_spec["observation"].dtype is torch.float64
    batch = collector.rollout()
    after, done = batch["next", "observation"], batch["next", "done"][:, :-1, 0]
    assert batch["observation"].dtype is after.dtype is torch.float32
    assert torch.equal(after[:, :-1][~done], batch["observation"][:, 1:][~done])


# -- memory and action masks ---------------------------------------------------


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_recurrent_states(kind: type):
    policy = make_recurrent_policy(kind)
    transform = Compose(InitTracker(), get_primers_from_module(policy))
    batches = collect(Wander, policy, 3)
    assert_many_ends(batches, "truncated", "terminated")
    make_env = partial(GymEnv, "ppokit/Wander-v0")
    assert_same(batches, reference(make_env, policy, 3, transform=transform))


@pytest.mark.parametrize("is_vector", [False, True])
def test_action_masks_of_info(is_vector: bool):
    network, keys = make_policy(3, 3, d.Categorical).module[0], {"logits": "logits"}
    policy = actor_of(network, MaskedCategorical, keys | {"mask": "action_mask"})

    def make_env() -> Any:
        env = GymEnv("ppokit/Wander-v0", mask=True, categorical_action_encoding=True)
        reader = default_info_dict_reader(["action_mask"], [Unbounded((3,), dtype=torch.bool)])
        return env.set_info_dict_reader(reader)

    masked: Any = partial(Wander, mask=True)
    envs = in_one(masked, 3) if is_vector else masked
    batches = collect(envs, policy, 3, categorical_action_encoding=True)
    assert_same(batches, reference(make_env, policy, 3))
    for batch in batches:
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()


# -- actions of several parts ------------------------------------------------------------

# Of a Dict with one part, torchrl passes the part to the environment without its name.
OF_TORCHRL = [actions for actions in MIXED if actions != "one"]


@pytest.mark.parametrize("actions", OF_TORCHRL)
def test_batches_are_torchrls(actions: str):
    """In both encodings, with log-probabilities of each part or their sum."""
    for categorical, summed in ((False, False), (True, True)):
        with set_composite_lp_aggregate(summed):
            actor = make_mixed_actor(actions, categorical=categorical)
            encoding = {"categorical_action_encoding": categorical}
            batches = collect(lambda: Mixed(actions), actor, 3, batches=2, **encoding)
            make_env = torchrl_env(actions, categorical=categorical)
            expected = rescored(actor, reference(make_env, actor, 3, batches=2))
        assert_many_ends(batches, "truncated", "terminated")
        assert_same(batches, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("actions", "summed"), [("deep", False), ("one", True), ("masked", False)])
def test_a_graph_gives_the_same(actions: str, summed: bool):
    options: dict[str, Any] = {"batches": 1, "categorical_action_encoding": True}
    graph = {"compile_policy": {"backend": "eager"}}
    with set_composite_lp_aggregate(summed):
        actor = make_mixed_actor(actions, categorical=True)
        found = collect(lambda: Mixed(actions), actor, 2, **options, **graph)
        expected = collect(lambda: Mixed(actions), actor, 2, **options)
    assert_same(found, expected)


@pytest.mark.parametrize("actions", ["deep", "nested", "alike"])
def test_vector_environments(actions: str):
    actor = make_mixed_actor(actions, categorical=True)
    options: dict[str, Any] = {"batches": 1, "categorical_action_encoding": True}
    expected = collect(lambda: Mixed(actions), actor, 2, **options)
    found = collect(in_one(lambda: Mixed(actions), 2), actor, 2, **options)
    assert_same(found, expected)


def test_a_recurrent_policy_with_several_heads():
    actor = make_recurrent_actor()
    transform = Compose(InitTracker(), get_primers_from_module(actor))
    make_env = torchrl_env("nested", categorical=True)
    batches = collect(lambda: Mixed("nested"), actor, 3, categorical_action_encoding=True)
    assert_same(batches, reference(make_env, actor, 3, transform=transform))


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("actions", ["dict", "nested", "deep", "masked", "grid"])
def test_the_encoding_follows_the_heads(actions: str, categorical: bool):
    actor = make_mixed_actor(actions, categorical=categorical)
    options: dict[str, Any] = {"categorical_action_encoding": categorical}
    batches = collect(lambda: Mixed(actions), actor, 2, batches=1)
    assert_same(batches, collect(lambda: Mixed(actions), actor, 2, batches=1, **options))


# -- bad input -----------------------------------------------------------------------------


def mixed_encodings() -> Any:
    actor = make_mixed_actor("masked", categorical=True)
    actor.module[-1].distribution_kwargs["distribution_map"]["gear"] = MaskedOneHotCategorical
    return actor


def unwritten() -> Any:
    actor = make_mixed_actor("dict")
    actor.module[-1].in_keys = ["other"]
    return ProbabilisticTensorDictSequential(*actor.module[:-1], actor.module[-1])


ONE_HOT: Any = {"categorical_action_encoding": False}
SHAPE = r"\('action', 'gear'\) has shape \[2\]; .* Discrete\(3\) it must be \[2, 3\]"
NAMES = r"steer.*gear.* nor these within .*'action.*brake"
BAD: list[Any] = [
    ("masked", mixed_encodings, {}, ValueError, r"\['dials'\] as indices and \['gear'\] as one-h"),
    ("nested", lambda: make_mixed_actor("nested", categorical=True), ONE_HOT, ValueError, SHAPE),
    ("dict", lambda: make_mixed_actor("one"), {}, KeyError, NAMES),
    ("dict", unwritten, {}, KeyError, r"reads \['other'\], which neither"),
]


@pytest.mark.parametrize(("actions", "make_actor", "options", "error", "message"), BAD)
def test_bad_actors(actions: str, make_actor: Any, options: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        collector_of(lambda: Mixed(actions), make_actor(), **options).rollout()


def test_a_private_name_of_a_part_of_the_action():
    def make_env() -> gym.Env:
        space = spaces.Dict(_gas=spaces.Box(-1, 1, (2,)))
        return gym.wrappers.TransformAction(Wander(actions="box"), lambda x: x["_gas"], space)

    keys: Any = [("params", "_gas", "loc"), ("params", "_gas", "scale")]
    modules = [TensorDictModule(Cut(3, [(2,), (2,)]), ["observation"], keys)]
    modules.append(TensorDictModule(Exp(), [keys[1]], [keys[1]]))
    options = {"distribution_map": {"_gas": TanhNormal}, "name_map": {"_gas": ("action", "_gas")}}
    with set_composite_lp_aggregate(False):
        policy = actor_of(
            TensorDictSequential(*modules),
            CompositeDistribution,
            ["params"],
            distribution_kwargs=options,
        )
        batch = collector_of(make_env, policy).rollout()
    assert ("action", "_gas_log_prob") in batch.keys(True)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=5), spaces.Dict(a=spaces.MultiDiscrete([3], start=[1]))]
)
def test_choices_that_do_not_start_at_0(space: spaces.Space):
    """torchrl's specs begin at 0, and would hand other numbers to the environment."""

    class Env(Wander):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = space

    with pytest.raises(ValueError, match=r"starts at .*torchrl's encoding starts at 0"):
        GymCollector(Env, None, frames_per_batch=4)


class Numbers(gym.Env):
    """Takes two numbers, and returns their sum as the reward."""

    observation_space = spaces.Box(-1, 1, (2,))

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        parts = [*(action.values() if isinstance(action, dict) else action)]
        assert [x.shape for x in map(np.asarray, parts)] == [(), ()]
        return self.observation_space.sample(), float(sum(parts)), False, False, {}


NUMBER = spaces.Box(-9, 9, (), np.float32)


@pytest.mark.parametrize("mode", [None, AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("space", [spaces.Tuple([NUMBER] * 2), spaces.Dict(a=NUMBER, b=NUMBER)])
def test_parts_of_an_action_that_are_numbers(mode: Any, space: spaces.Space):
    make: Any = partial(Numbers, space)
    actor, _ = actor_critic(make())
    env = make if mode is None else SyncVectorEnv([make] * 2, autoreset_mode=mode)
    with GymCollector(env, actor, frames_per_batch=8, num_envs=2) as collector:
        batch = collector.rollout()
    keys = ["action"] if isinstance(space, spaces.Tuple) else ["a", "b"]
    total = sum(batch[key].flatten(2).sum(-1, keepdim=True) for key in keys)
    torch.testing.assert_close(batch["next", "reward"], total)
