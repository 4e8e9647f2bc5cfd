"""The interface that torchrl's trainers, loggers and weight synchronization expect."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector, RewardNormalizer
from tests.collectors.test_collector import (
    POLICY,
    Wander,
    collect,
    collector_of,
    make_policy,
    reference,
)
from tests.collectors.test_faulty_environments import Odd

make_env = partial(GymEnv, "ppokit/Wander-v0")


def test_it_is_a_collector_of_torchrl():
    collector = collector_of(total_frames=64)
    assert isinstance(collector, BaseCollector)
    assert (len(collector), collector.init_random_frames) == (4, 0)
    assert collector.requested_frames_per_batch == 16
    assert collector.env.action_spec == make_env().action_spec
    assert collector.next().batch_size == (2, 8)
    collector.shutdown(timeout=1.0, raise_on_error=False)
    assert collector.closed


def followed(collector: Any) -> list[dict[str, Any]]:
    """Return the stats after each batch, a reset, the end and a shutdown."""
    torch.manual_seed(1)  # construction calls the policy
    seen = []
    for number, _ in enumerate(collector):
        seen.append(collector.stats())
        if number == 2:
            collector.reset()
            seen.append(collector.stats())
    seen.append(collector.stats())
    collector.shutdown()
    return [*seen, collector.stats()]


PADDED: dict[str, Any] = {"trajs_per_batch": 2, "traj_format": "padded"}


@pytest.mark.parametrize("options", [{}, {"replay_buffer": True}, PADDED], ids=str)
def test_stats_are_those_of_torchrls_collector(options: dict[str, Any]):
    def make_options() -> dict[str, Any]:
        buffer = ReplayBuffer(storage=LazyTensorStorage(999, ndim=2))
        return options | ({"replay_buffer": buffer} if "replay_buffer" in options else {})

    frames = {"frames_per_batch": 18, "total_frames": 18 * 6}
    env = SerialEnv(3, make_env)
    env.set_seed(7)
    plain: Any = {"auto_register_policy_transforms": False}
    expected = followed(Collector(env, POLICY, **frames, **plain, **make_options()))
    collector = collector_of(num_envs=3, **frames, **make_options())
    collector.set_seed(7)
    found = followed(collector)
    assert len(found) == len(expected) > 5
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {"policy_version": 0} | theirs


def test_stats_continue_with_the_state():
    collector, fresh = collector_of(total_frames=64), collector_of(total_frames=64)
    collector.rollout()
    state = collector.state_dict()
    fresh.load_state_dict(state)
    assert fresh.stats() == collector.stats()


def test_hooks():
    seen = []
    collector = collector_of(
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=lambda batch: seen.append(batch),
        postproc=RewardNormalizer(),
    )
    batch = collector.rollout()
    assert seen == ["before", batch]
    assert ("next", "raw_reward") in batch.keys(True)
    collector.pre_collect_hook = None
    collector.post_collect_hook = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(iter(collector))
    assert collector.closed


def test_a_replay_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=8)
    collector = collector_of(replay_buffer=buffer, total_frames=32, replay_write_mode="rollout")
    assert list(collector) == [None, None]
    assert len(buffer) == 32
    assert buffer.sample()["observation"].shape == (8, 3)


# -- weights ---------------------------------------------------------------------


FORMS = {
    "a module": lambda x: ((x,), {}),
    "a TensorDict": lambda x: ((TensorDict.from_module(x).data,), {}),
    "a state_dict": lambda x: ((x.state_dict(),), {}),
    "a nested dict": lambda x: ((TensorDict.from_module(x).data.to_dict(),), {}),
    "policy": lambda x: ((), {"policy": x}),
    "weights": lambda x: ((), {"weights": TensorDict.from_module(x), "worker_ids": 0}),
    "model_id": lambda x: ((x,), {"model_id": "policy"}),
    "weights_dict": lambda x: ((), {"weights_dict": {"policy": x}}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_every_form(form: str):
    policy = make_policy(3, 3, OneHotCategorical)
    collector, other = collector_of(policy=policy), make_policy(3, 3, OneHotCategorical)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    args, kwargs = FORMS[form](other)
    collector.update_policy_weights_(*args, **kwargs)
    for mine, given in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, given)
        assert mine is not given
        assert mine.requires_grad
    assert collector.policy_version == 1
    fresh = collector_of(policy=policy)
    fresh.load_state_dict(collector.state_dict())
    assert fresh.policy_version == 1


def test_bad_weights_change_nothing():
    policy = make_policy(3, 3, OneHotCategorical)
    before, own = [p.clone() for p in policy.parameters()], policy.state_dict()
    collector = collector_of(policy=policy)
    wrong, unknown = "not those of the collector's policy", "one model, 'policy', and no 'critic'"
    resized = {**own, "module.0.module.0.weight": torch.zeros(2, 2)}
    for args, kwargs, error, message in (
        ((make_policy(4, 3, OneHotCategorical),), {}, ValueError, wrong),
        ((policy.module[0],), {}, ValueError, wrong),
        (({"weight": before[0]},), {}, ValueError, wrong),
        ((resized,), {}, ValueError, r"'weight'\): \(2, 2\) for"),
        ((), {"weights_dict": {"critic": policy}}, KeyError, unknown),
        ((policy,), {"model_id": "critic"}, KeyError, unknown),
        ((3,), {}, TypeError, "a module, a TensorDict or a state_dict, not of type int"),
    ):
        with pytest.raises(error, match=message):
            collector.update_policy_weights_(*args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert collector.policy_version == 0
    zeros = TensorDictModule(lambda x: x.new_zeros(len(x), 3).long(), ["observation"], ["action"])
    collector = collector_of(policy=lambda tensordict: zeros(tensordict))
    with pytest.raises(TypeError, match="The policy is a function, no module: it has no weights"):
        collector.update_policy_weights_(POLICY)


# -- arguments ---------------------------------------------------------------------


def unsupported(**options: Any) -> tuple[dict[str, Any], str]:
    ((name, value),) = options.items()
    return options, f"does not support {name}={value!r}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        unsupported(init_random_frames=100),
        unsupported(split_trajs=True),
        unsupported(track_traj_ids=False),
        unsupported(replay_write_mode="trajectory"),
        ({"weight_sync_schemes": {"policy": None}}, "does not support weight_sync_schemes="),
        ({"max_frames_per_traj": 50}, "docs/howto/in_torchrl.md says what to use"),
        ({"storing_device": "meta", "device": "cpu"}, "one device, .* storing_device='meta', d"),
        ({"policy_factory": lambda: None}, "a policy, or None beside a policy_factory; there are"),
        ({"worker_idx": 4096}, "worker_idx must be from 0 to 4,095, got 4096"),
        ({"observation_dtype": "float32"}, r"must be None, torch\.float16, torch\.float32 or"),
        ({"observation_dtype": torch.bfloat16}, r"must be None, torch\.float16, torch\.float32"),
    ],
)
def test_bad_arguments(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        collector_of(**options)


def test_arguments_of_torchrls_collector():
    """Its defaults are accepted, and options that describe what this collector does."""
    parameters = inspect.signature(Collector.__init__).parameters
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty and name != "policy":
            collector_of(**{name: parameter.default})
    collector_of(auto_register_policy_transforms=True, reset_when_done=True, trust_policy=True)
    collector_of(init_random_frames=-1, storing_device=None, set_truncated=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'frames'"):
        collector_of(frames=3)


# -- episodes ----------------------------------------------------------------------


def test_step_count_and_episode_reward_are_torchrls():
    batches = collect(Wander, POLICY, 3, step_count=True, episode_reward=True)
    counters = Compose(StepCounter(), RewardSum())
    expected = reference(make_env, POLICY, 3, transform=counters)
    for batch, other in zip(batches, expected, strict=True):
        for key in ("step_count", "episode_reward"):
            a, b = batch["next", key], other["next", key]
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b)
        other = other.exclude("step_count", "episode_reward")
        assert set(batch.keys(True)) == set(other.keys(True))


def test_counts_restart_with_the_episodes():
    collector = collector_of(step_count=True, frames_per_batch=4)
    for begin in (collector.reset, lambda: collector.set_seed(3), collector.reset):
        first = collector.rollout()
        begin()
        second = collector.rollout()
        assert second["next", "step_count"][:, 0].eq(1).all()
        ids = (first["collector", "traj_ids"], second["collector", "traj_ids"])
        assert not set(ids[0].unique().tolist()) & set(ids[1].unique().tolist())


def test_episode_rewards_are_raw_and_may_have_several_entries():
    collector = collector_of(episode_reward=True, postproc=RewardNormalizer())
    batch = collector.rollout()
    assert torch.equal(batch["next", "episode_reward"][:, 0], batch["next", "raw_reward"][:, 0])

    def two() -> Odd:
        env = Odd(lambda x: (x[0], np.array([1.0, 2.0], np.float32), *x[2:]))
        env.reward_space = gym.spaces.Box(-9, 9, (2,), np.float32)
        return env

    options: Any = {"frames_per_batch": 9, "step_count": True, "episode_reward": True}
    batch = GymCollector(two, POLICY, **options).rollout()
    steps = batch["next", "step_count"]
    assert torch.equal(batch["next", "episode_reward"], steps * torch.tensor([1.0, 2.0]))


def test_another_policy_or_transform_is_seen_at_the_next_batch():
    def choosing(action: int) -> TensorDictModule:
        one_hot = nn.functional.one_hot(torch.tensor(action), 3)
        return TensorDictModule(lambda x: one_hot.expand(len(x), 3), ["observation"], ["action"])

    def times(factor: float) -> TensorDictModule:
        return TensorDictModule(lambda x: factor * x, ["observation"], ["scaled"])

    collector = collector_of(policy=choosing(0), observation_transform=times(1.0))
    collector.rollout()
    collector.policy, collector.observation_transform = choosing(2), times(0.0)
    batch = collector.rollout()
    assert (batch["action"].argmax(-1) == 2).all()
    assert not batch["scaled"].any()
    assert not batch["next", "scaled"].any()
