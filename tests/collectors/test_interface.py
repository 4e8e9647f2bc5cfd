"""What torchrl's trainers, loggers and weight synchronisation ask of a collector."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
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
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from ppokit import GymCollector, RewardNormalizer
from tests.collectors.test_collector import Wander, assert_same, collect, make_policy, reference

POLICY = make_policy(3, 3, OneHotCategorical)


def collector_of(policy: Any = POLICY, **options: Any) -> GymCollector:
    return GymCollector(Wander, policy, **{"frames_per_batch": 16, "num_envs": 2} | options)


def test_it_is_a_collector_of_torchrl():
    collector = collector_of(total_frames=64)
    assert isinstance(collector, BaseCollector)
    assert (len(collector), collector.init_random_frames) == (4, 0)
    assert collector.requested_frames_per_batch == 16
    assert collector.env.action_spec == GymEnv("ppokit/Wander-v0").action_spec
    assert collector.getattr_env("observation_spec") == collector.env.observation_spec
    assert collector.getattr_policy("out_keys") == POLICY.out_keys
    assert collector.next().batch_size == (2, 8)
    stats = {
        "frames": 16,
        "batches": 1,
        "total_frames": 64,
        "completed": False,
        "requested_frames_per_batch": 16,
        "policy_version": 0,
    }
    assert collector.stats().items() >= stats.items()
    collector.shutdown(timeout=1.0, raise_on_error=False)
    assert collector.closed


def followed(collector: Any) -> list[dict[str, Any]]:
    """The stats after each batch, a reset, the end and a shutdown."""
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


STATS: list[dict[str, Any]] = [
    {},
    {"replay_buffer": True},
    {"trajs_per_batch": 2, "traj_format": "padded"},
]


@pytest.mark.parametrize("options", STATS, ids=str)
def test_stats_are_those_of_torchrls_collector(options: dict[str, Any]):
    def make_options() -> dict[str, Any]:
        buffer = ReplayBuffer(storage=LazyTensorStorage(999, ndim=2))
        return options | ({"replay_buffer": buffer} if "replay_buffer" in options else {})

    frames = {"frames_per_batch": 18, "total_frames": 18 * 6}
    env = SerialEnv(3, lambda: GymEnv("ppokit/Wander-v0"))
    env.set_seed(7)
    expected = followed(
        Collector(env, POLICY, **frames, auto_register_policy_transforms=False, **make_options())
    )
    collector = collector_of(num_envs=3, **frames, **make_options())
    collector.set_seed(7)
    found = followed(collector)
    assert len(found) == len(expected) > 5
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {"policy_version": 0} | theirs


@pytest.mark.parametrize("older", [False, True])  # a state of torchrl 0.14 has no counters
def test_stats_go_on_with_the_state(older: bool):
    collector, fresh = collector_of(total_frames=64), collector_of(total_frames=64)
    collector.rollout()
    state = collector.state_dict()
    expected = collector.stats()
    if older:
        state["collector_progress"] = {}
        expected |= dict.fromkeys(expected.keys() & {"stepped_frames"}, 0)
    fresh.load_state_dict(state)
    assert fresh.stats() == expected


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


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.12
def test_profiling(tmp_path: Path):
    collector = collector_of(total_frames=64)
    collector.enable_profile(num_rollouts=2, warmup_rollouts=1, save_path=tmp_path / "trace.json")
    assert len(list(collector)) == 4
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_a_replay_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=8)
    collector = collector_of(replay_buffer=buffer, total_frames=32)
    assert list(collector) == [None, None]
    assert len(buffer) == 32
    assert collector.getattr_rb("write_count") == buffer.write_count
    assert buffer.sample()["observation"].shape == (8, 3)


# -- weights ---------------------------------------------------------------------


def halved() -> Any:
    """Another policy, of half the weights."""
    policy = make_policy(3, 3, OneHotCategorical)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    return policy


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
    collector, other = collector_of(policy), halved()
    args, kwargs = FORMS[form](other)
    collector.update_policy_weights_(*args, **kwargs)
    for mine, given in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, given)
        assert mine is not given
        assert mine.requires_grad
    assert collector.get_policy_version() == 1
    fresh = collector_of(policy)
    fresh.load_state_dict(collector.state_dict())
    assert fresh.get_policy_version() == 1


def test_its_own_weights_and_none():
    policy = make_policy(3, 3, OneHotCategorical)
    before = [p.clone() for p in policy.parameters()]
    collector = collector_of(policy)
    collector.update_policy_weights_(policy)
    collector.update_policy_weights_()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert collector.policy_version == 2


def test_weights_of_another_policy_are_refused_whole():
    policy = make_policy(3, 3, OneHotCategorical)
    before = [p.clone() for p in policy.parameters()]
    collector = collector_of(policy)
    for other in (make_policy(4, 3, OneHotCategorical), policy.module[0], {"weight": before[0]}):
        with pytest.raises(ValueError, match="not those of the collector's policy"):
            collector.update_policy_weights_(other)
    state = {**policy.state_dict(), "module.0.module.0.weight": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"'weight'\): \(2, 2\) for"):
        collector.update_policy_weights_(state)
    with pytest.raises(KeyError, match="has one model, 'policy', and none of \\['critic'\\]"):
        collector.update_policy_weights_(policy, model_id="critic")
    with pytest.raises(ValueError, match="Give the weights once; there are 2"):
        collector.update_policy_weights_(policy, weights=policy.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert collector.policy_version == 0


# -- what cannot be had ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"init_random_frames": 100},
            "does not support init_random_frames=100 of torchrl's Collector",
        ),
        ({"weight_sync_schemes": {"policy": None}}, "does not support weight_sync_schemes="),
        ({"max_frames_per_traj": 50}, "docs/howto/in_torchrl.md says what to use"),
        (
            {"storing_device": "meta", "device": "cpu"},
            "one device, and got storing_device='meta', d",
        ),
        (
            {"policy_factory": lambda: None},
            "a policy, or None beside a policy_factory; there are both",
        ),
        ({"split_trajs": True}, "does not support split_trajs=True"),
        ({"worker_idx": 4096}, "worker_idx must be from 0 to 4,095, got 4096"),
        ({"track_traj_ids": False}, "does not support track_traj_ids=False"),
        ({"replay_write_mode": "trajectory"}, "does not support replay_write_mode='trajectory'"),
    ],
)
def test_arguments_that_cannot_be_had(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        collector_of(**options)


def test_arguments_that_say_what_is_done_anyway():
    collector_of(auto_register_policy_transforms=True, reset_when_done=True, trust_policy=True)
    collector_of(replay_buffer=ReplayBuffer(), replay_write_mode="rollout")


@pytest.mark.parametrize("name", inspect.signature(Collector.__init__).parameters)
def test_every_argument_of_torchrls_collector_is_known(name: str):
    """Their defaults are what is done here; but for the environments, which have another name."""
    default = inspect.signature(Collector.__init__).parameters[name].default
    if default is not inspect.Parameter.empty:
        collector_of(**{name: default} if name != "policy" else {})


def test_arguments_that_are_turned_off():
    collector_of(init_random_frames=-1, storing_device=None, split_trajs=False, set_truncated=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'frames'"):
        collector_of(frames=3)


def test_collecting_in_the_background_is_refused():
    with pytest.raises(NotImplementedError, match="MultiAsyncCollector, collector_class=G"):
        collector_of().start()


# -- episodes ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_step_count_and_episode_reward_are_torchrls(n: int):
    batches = collect(Wander, POLICY, n, step_count=True, episode_reward=True)
    counters = Compose(StepCounter(), RewardSum())
    expected = reference(lambda: GymEnv("ppokit/Wander-v0"), POLICY, n, transform=counters)
    for batch, other in zip(batches, expected, strict=True):
        for key in ("step_count", "episode_reward"):
            a, b = batch["next", key], other["next", key]
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b)
        other = other.exclude("step_count", "episode_reward")
        assert set(batch.keys(True)) == set(other.keys(True))


def test_counts_begin_anew_with_the_episodes():
    collector = collector_of(step_count=True, frames_per_batch=4)
    for begin in (collector.reset, lambda: collector.set_seed(3), collector.reset):
        first = collector.rollout()
        begin()
        second = collector.rollout()
        assert second["next", "step_count"][:, 0].eq(1).all()
        ids = (first["collector", "traj_ids"], second["collector", "traj_ids"])
        assert not set(ids[0].unique().tolist()) & set(ids[1].unique().tolist())


def test_they_are_raw_rewards():
    collector = collector_of(episode_reward=True, postproc=RewardNormalizer())
    batch = collector.rollout()
    assert torch.equal(batch["next", "episode_reward"][:, 0], batch["next", "raw_reward"][:, 0])


def test_nothing_else_is_written_by_default():
    assert_same(
        collect(Wander, POLICY, 2), reference(lambda: GymEnv("ppokit/Wander-v0"), POLICY, 2)
    )


def test_weights_that_are_none_and_policies_that_have_none():
    with pytest.raises(TypeError, match="a module, a TensorDict or a state_dict, not of type int"):
        collector_of().update_policy_weights_(3)
    zeros = TensorDictModule(lambda x: x.new_zeros(len(x), 3).long(), ["observation"], ["action"])
    collector = collector_of(lambda tensordict: zeros(tensordict))
    with pytest.raises(TypeError, match="The policy is a function, no module: it has no weights"):
        collector.update_policy_weights_(POLICY)


class Shifted(nn.Module):
    """Has a buffer that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


def test_a_state_without_the_buffers_that_are_no_state():
    policy = ProbabilisticActor(
        TensorDictModule(Shifted(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    state = {name: torch.ones_like(x) for name, x in policy.state_dict().items()}
    collector_of(policy).update_policy_weights_(state)
    assert all((parameter == 1).all() for parameter in policy.parameters())


@pytest.mark.parametrize("name", ["step_count", "episode_reward"])
def test_an_observation_named_like_a_count_is_refused(name: str):
    def make_env() -> gym.Env:
        env = Wander("dict")
        parts = {**env.observation_space.spaces, name: gym.spaces.Box(0, 1, (1,))}
        env.observation_space = gym.spaces.Dict(parts)
        return env

    with pytest.raises(ValueError, match=f"The collector writes '{name}', which would replace"):
        GymCollector(make_env, POLICY, frames_per_batch=4, **{name: True})


def test_rewards_of_several_numbers_are_summed_each():
    class Two(Wander):
        def __init__(self) -> None:
            super().__init__()
            self.reward_space = gym.spaces.Box(-9, 9, (2,), np.float32)

        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, np.array([1.0, 2.0], np.float32), *rest

    with GymCollector(
        Two, POLICY, frames_per_batch=9, step_count=True, episode_reward=True
    ) as collector:
        batch = collector.rollout()
    steps = batch["next", "step_count"]
    assert torch.equal(batch["next", "episode_reward"], steps * torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, torch.int32])
def test_dtypes_that_observations_cannot_have(dtype: Any):
    with pytest.raises(ValueError, match=r"must be None, torch\.float16, torch\.float32 or"):
        collector_of(observation_dtype=dtype)


def test_another_policy_or_transform_is_seen_at_the_next_batch():
    def choosing(action: int) -> TensorDictModule:
        one_hot = torch.nn.functional.one_hot(torch.tensor(action), 3)
        return TensorDictModule(lambda x: one_hot.expand(len(x), 3), ["observation"], ["action"])

    def times(factor: float) -> TensorDictModule:
        return TensorDictModule(lambda x: factor * x, ["observation"], ["scaled"])

    collector = collector_of(choosing(0), observation_transform=times(1.0))
    collector.rollout()
    collector.policy, collector.observation_transform = choosing(2), times(0.0)
    batch = collector.rollout()
    assert (batch["action"].argmax(-1) == 2).all()
    assert not batch["scaled"].any()
    assert not batch["next", "scaled"].any()


def test_a_script_ends_in_silence():
    script = """
from tests.collectors.test_interface import collector_of
collector = collector_of()
collector.rollout()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr, "ignored" in ended.stderr) == (0,) * 3
