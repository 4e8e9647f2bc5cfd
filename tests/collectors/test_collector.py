"""GymCollector yields what torchrl's Collector yields, frame by frame."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as d
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import DoubleToFloat, EnvBase, GymEnv, SerialEnv, TransformedEnv
from torchrl.modules import (
    IndependentNormal,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from ppokit import GymCollector, RewardNormalizer
from tests.blocks import actor_of

OBSERVATIONS = {
    "array": spaces.Box(-9, 9, (3,), np.float32),
    "double": spaces.Box(-9, 9, (3,), np.float64),
    "scalar": spaces.Box(-9, 9, (), np.float32),
    "dict": spaces.Dict(
        state=spaces.Box(-9, 9, (3,), np.float32),
        goal=spaces.Dict(kind=spaces.Discrete(4), place=spaces.Box(-9, 9, (2, 2), np.float64)),
    ),
    "pixels": spaces.Box(0, 255, (6, 5, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "alike": spaces.MultiDiscrete([3, 3]),
    "multi_binary": spaces.MultiBinary(4),
    "tuple": spaces.Tuple([spaces.Box(-9, 9, (3,), np.float32)] * 2),
}
ACTIONS = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "multi_binary": spaces.MultiBinary(4),
}


class Wander(gym.Env):
    """Random observations; an episode ends by chance, or after nine steps, or both at once.

    The reward tells which action came in. Arrays are handed out in the same memory every time.
    """

    def __init__(self, observations="array", actions="discrete", mask: bool = False) -> None:
        self.observation_space = copy.deepcopy(OBSERVATIONS[observations])
        self.action_space = copy.deepcopy(ACTIONS[actions])
        self.mask = mask
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time, self.memory = 0, None
        return self.observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert isinstance(self.action_space, spaces.Box) or self.action_space.contains(action)
        self.time += 1
        weighed = np.asarray(action, dtype=np.float64).ravel()
        reward = float(weighed @ np.arange(1, weighed.size + 1))
        observation, info = self.observe()
        return observation, reward, bool(self.np_random.random() < 0.1), self.time >= 9, info

    def observe(self) -> tuple[Any, dict]:
        self.observation_space.seed(int(self.np_random.integers(2**30)))
        observation = self.observation_space.sample()
        if isinstance(observation, np.ndarray):
            if self.memory is None:
                self.memory = observation.copy()
            self.memory[...] = observation
            observation = self.memory
        if not self.mask:
            return observation, {}
        mask = np.ones(3, dtype=np.int8)
        mask[self.time % 3] = 0
        return observation, {"action_mask": mask}

    def close(self) -> None:
        self.closed = True


gym.register("ppokit/Wander-v0", Wander)


def make_policy(
    inputs: int, outputs: int, distribution: Any, *, dtype: Any = torch.float32, **options: Any
) -> ProbabilisticActor:
    """A policy that reads the observation."""
    torch.manual_seed(0)
    body = [nn.Linear(inputs, 16, dtype=dtype), nn.Tanh(), nn.Linear(16, outputs, dtype=dtype)]
    keys = ["logits"]
    if distribution in (d.Normal, IndependentNormal, TanhNormal):
        body, keys = [*body, NormalParamExtractor()], ["loc", "scale"]
    module = TensorDictModule(nn.Sequential(*body), ["observation"], keys)
    return actor_of(module, distribution, distribution_kwargs=options)


POLICY = make_policy(3, 3, OneHotCategorical)


def collector_of(make_env: Any = Wander, policy: Any = POLICY, **options: Any) -> GymCollector:
    return GymCollector(make_env, policy, **{"frames_per_batch": 16, "num_envs": 2} | options)


def make_recurrent_policy(kind: Any = LSTMModule) -> ProbabilisticActor:
    """A policy with states at "h" and, of an LSTM, "c"."""
    torch.manual_seed(0)
    states = ["h", "c"] if issubclass(kind, LSTMModule) else ["h"]
    keys = {"in_keys": ["observation", *states, "is_init"]}
    keys["out_keys"] = ["features", *(("next", state) for state in states)]
    head = TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"])
    memory = kind(input_size=3, hidden_size=4, **keys)
    return actor_of(TensorDictSequential(memory, head), OneHotCategorical)


def reference(
    make_env: Callable[[], EnvBase],
    policy: Any,
    n: int,
    *,
    steps: int = 25,
    batches: int = 3,
    transform: Any = None,
    **options: Any,
) -> list[TensorDictBase]:
    """What torchrl yields."""
    env: Any = SerialEnv(n, make_env)
    env.set_seed(7)
    if transform is not None:
        env = TransformedEnv(env, transform)
    frames = {"frames_per_batch": n * steps, "total_frames": n * steps * batches}
    collector = Collector(env, policy, **frames, auto_register_policy_transforms=False, **options)
    torch.manual_seed(1)  # construction calls the policy
    return list(collector)


def in_one(make_env: Any, n: int) -> SyncVectorEnv:
    """Return a vector environment that resets its members in the step that ends an episode."""
    make_env = partial(gym.make, make_env) if isinstance(make_env, str) else make_env
    return SyncVectorEnv([make_env] * n, autoreset_mode=AutoresetMode.SAME_STEP)


def collect(
    make_env: Any, policy: Any, n: int, *, steps: int = 25, batches: int = 3, **options: Any
) -> list[TensorDictBase]:
    """What ppokit yields."""
    frames = {"frames_per_batch": n * steps, "total_frames": n * steps * batches}
    options = {"observation_dtype": None} | options
    collector = GymCollector(make_env, policy, num_envs=n, **frames, **options)
    collector.set_seed(7)
    torch.manual_seed(1)
    return list(collector)


def assert_same(batches: list[TensorDictBase], expected: list[TensorDictBase]) -> None:
    """Compare key for key and frame by frame; scores, and what a memory writes, to rounding."""
    assert len(batches) == len(expected)
    first, of_other = (x[0]["collector", "traj_ids"].min() for x in (batches, expected))
    for batch, other in zip(batches, expected, strict=True):
        assert batch.batch_size == other.batch_size
        assert batch.device == other.device
        for key in (None, "next", "collector"):
            nested, reference = (batch, other) if key is None else (batch[key], other[key])
            assert nested.names == reference.names == [None, "time"]
        assert set(batch.keys(True, True)) == set(other.keys(True, True))
        for key in batch.keys(True, True):
            a, b = batch[key], other[key]
            if key == ("collector", "traj_ids"):  # each collector has its own
                a, b = a - first, b - of_other
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), key
            of_env = any(name in str(key) for name in ("observation", "reward"))
            of_memory = "is_init" in batch.keys() and a.is_floating_point() and not of_env
            if str(key).rstrip("')").endswith("log_prob") or of_memory:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
            else:
                assert torch.equal(a, b), key


def rescored(policy: Any, batches: list[TensorDictBase]) -> list[TensorDictBase]:
    """Give the actions of a tanh-normal the log-probability that torchrl gives them as stored."""
    for batch in batches:
        with torch.no_grad():
            scores: Any = policy.log_prob(scored := batch.copy())
        for key in (key for key in batch.keys(True, True) if "_log_prob" in str(key)):
            batch[key] = scored[key]  # of the parts of a sum
        for key in policy.log_prob_keys:
            batch[key] = scores if isinstance(scores, torch.Tensor) else scores[key]
    return batches


def assert_many_ends(batches: list[TensorDictBase], *kinds: str) -> None:
    """Of every kind, that is."""
    counts = {k: sum(int(batch["next", k].sum()) for batch in batches) for k in ("done", *kinds)}
    assert counts["done"] >= 5
    assert all(counts.values()), counts


def cart_pole(categorical: bool) -> GymEnv:
    options = {"categorical_action_encoding": categorical, "max_episode_steps": 15}
    return GymEnv("CartPole-v1", **options)


double_pendulum = partial(GymEnv, "InvertedDoublePendulum-v5", max_episode_steps=8)
pendulum = partial(GymEnv, "Pendulum-v1", max_episode_steps=7)
BOTH, TRUNCATED = ("truncated", "terminated"), ("truncated",)
OF_ARRAYS = {"low": np.full(1, -2.0, np.float32), "high": np.full(1, 2.0, np.float32)}
TASKS: dict[str, Any] = {
    "indices": (partial(cart_pole, True), (4, 2, d.Categorical), {}, BOTH),
    "one-hot": (partial(cart_pole, False), (4, 2, OneHotCategorical), {}, BOTH),
    "tanh": (pendulum, (3, 2, TanhNormal), {"low": -2.0, "high": 2.0}, TRUNCATED),
    "normal": (pendulum, (3, 2, IndependentNormal), {}, TRUNCATED),
    "arrays": (pendulum, (3, 2, TanhNormal), OF_ARRAYS, TRUNCATED),
    "double": (double_pendulum, (9, 2, TanhNormal), {"dtype": torch.float64}, BOTH),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("task", TASKS)
def test_batches_are_those_of_torchrls_collector(task: str, n: int):
    make_env, sizes, options, ends = TASKS[task]
    policy = make_policy(*sizes, **options)
    batches = collect(make_env, policy, n)
    assert_many_ends(batches, *ends)
    expected = reference(make_env, policy, n)
    assert_same(batches, rescored(policy, expected) if sizes[2] is TanhNormal else expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_transform_is_applied_to_every_observation(hooked: bool):
    policy = make_policy(9, 2, TanhNormal)
    to_float = TensorDictModule(torch.Tensor.float, ["observation"], ["observation"])
    if hooked:  # which is called on a TensorDict
        to_float.register_forward_hook(lambda *_: None)
    batches = collect(double_pendulum, policy, 3, observation_transform=to_float)
    expected = reference(double_pendulum, policy, 3, transform=DoubleToFloat())
    assert_same(batches, expected)


# -- the rest of the toolkit ---------------------------------------------------


def test_a_block_as_postproc():
    policy = make_policy(4, 2, OneHotCategorical)
    batches = collect("CartPole-v1", policy, 2, postproc=RewardNormalizer())
    make_env = partial(GymEnv, "CartPole-v1")
    assert_same(batches, reference(make_env, policy, 2, postproc=RewardNormalizer()))


def test_no_entry_shares_memory_with_another():
    (batch,) = collect("CartPole-v1", make_policy(4, 2, OneHotCategorical), 1, batches=1)
    assert isinstance(batch, TensorDict)
    starts = [value.untyped_storage().data_ptr() for value in batch.values(True, True)]
    assert len(set(starts)) == len(starts)
