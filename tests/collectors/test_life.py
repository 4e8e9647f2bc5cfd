"""The end of a GymCollector, memory of batches, saved state, and whole episodes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector, ObservationNormalizer, RewardNormalizer
from tests.collectors.test_collector import (
    POLICY,
    Wander,
    assert_same,
    collect,
    collector_of,
    in_one,
    make_policy,
)


class Recorded(list):
    """Makes environments and keeps them."""

    def __call__(self) -> gym.Env:
        self.append(Wander())
        return self[-1]


# -- the end ----------------------------------------------------------------------


def test_the_end_closes_the_environments():
    envs = Recorded()
    collector = collector_of(envs, total_frames=32)
    batches = iter(collector)
    next(batches)
    assert not any(env.closed for env in envs)
    next(batches)
    assert all(env.closed for env in envs)
    assert list(collector) == []
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()
    collector.shutdown()


def test_environments_stay_open_while_the_collector_lives():
    """torchrl's wrappers close theirs when they are garbage."""
    envs = Recorded()
    collector = collector_of(lambda: GymWrapper(envs()))
    gc.collect()
    collector.rollout()
    assert not any(env.closed for env in envs[-2:])
    collector.shutdown()
    assert all(env.closed for env in envs)


def test_a_loop_may_be_left_and_continued():
    envs = Recorded()
    with collector_of(envs, total_frames=64) as collector:
        assert len([batch for _, batch in zip(range(2), collector, strict=False)]) == 2
        assert not collector.closed
        assert len(list(collector)) >= 1
    assert all(env.closed for env in envs)
    batches = iter(collector_of(total_frames=-1))
    assert [next(batches).numel() for _ in range(5)] == [16] * 5


def failing(*_: Any) -> Any:
    raise ZeroDivisionError


def test_errors_close_the_environments():
    for part in ("environment", "policy"):
        envs, policy = Recorded(), make_policy(3, 3, OneHotCategorical)
        collector = collector_of(envs, policy)
        if part == "environment":
            envs[1].step = failing
        else:
            policy.module[0].module[1].register_forward_hook(failing)
        with pytest.raises(ZeroDivisionError):
            next(iter(collector))
        assert collector.closed
        assert all(env.closed for env in envs)
    envs = Recorded()
    with pytest.raises(ZeroDivisionError):
        collector_of(lambda: envs() if len(envs) < 2 else failing(), num_envs=4)
    assert [env.closed for env in envs] == [True, True]


def test_an_environment_that_does_not_close():
    envs = Recorded()
    collector = collector_of(envs)
    envs[1].close = failing
    with pytest.raises(ZeroDivisionError):
        collector.shutdown()
    assert envs[0].closed


def test_a_collector_without_references_closes_its_environments():
    envs = Recorded()
    collector = collector_of(envs)
    del collector
    assert all(env.closed for env in envs)


# -- the memory of a batch ----------------------------------------------------------


def test_a_batch_belongs_to_its_caller():
    first, second = collect(Wander, POLICY, 2, batches=2)
    copy = first.clone()
    second.zero_()
    assert (first == copy).all()


def test_a_worker_of_torchrls_yields_the_same_batch_every_time():
    pair = collector_of(return_same_td=True, worker_idx=0), collector_of()
    batches = []
    for collector in pair:
        collector.set_seed(7)
        torch.manual_seed(1)
        batches.append([collector.rollout() for _ in range(2)])
    assert batches[0][0] is batches[0][1]
    assert_same(batches[0][1:], batches[1][1:])


BUFFER: Any = {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))}


@pytest.mark.parametrize(
    "options",
    [{}, {"worker_idx": 0, "use_buffers": False}, BUFFER],
    ids=["default", "no buffers", "replay buffer"],
)
def test_other_collectors_do_not(options: dict[str, Any]):
    collector = collector_of(return_same_td=True, **options)
    assert collector.rollout() is not collector.rollout()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_device_of_the_batch(device: str):
    policy = make_policy(3, 3, OneHotCategorical).to(device)
    batch = collector_of(policy=policy, device=device).rollout()
    assert all(x.device.type == device for x in (batch, batch["next"], *batch.values(True, True)))


# -- state --------------------------------------------------------------------------


def test_state_continues(tmp_path: Path):
    norm = ObservationNormalizer(3)
    collector = collector_of(observation_transform=norm, total_frames=48)
    collector.set_seed(0)
    batch = collector.rollout()
    torch.save(collector.state_dict(), tmp_path / "state.pt")
    policy, fresh_norm = make_policy(3, 3, OneHotCategorical), ObservationNormalizer(3)
    nn.init.zeros_(policy.module[0].module[0].weight)
    fresh = collector_of(policy=policy, observation_transform=fresh_norm, total_frames=48)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(fresh_norm.mean, norm.mean)
    assert torch.equal(policy.module[0].module[0].weight, POLICY.module[0].module[0].weight)
    batches = list(fresh)
    assert len(batches) == 2  # of three
    ids = batch["collector", "traj_ids"], batches[0]["collector", "traj_ids"]
    assert not set(ids[0].unique().tolist()) & set(ids[1].unique().tolist())


def test_loading_a_state_resets_the_environments():
    collector = collector_of()
    state = collector.state_dict()
    before = collector.rollout()
    collector.load_state_dict(state)
    last = before["next", "observation"][:, -1]
    assert not torch.equal(collector.rollout()["observation"][:, 0], last)


# -- whole episodes: trajs_per_batch -----------------------------------------------------


def collector_of_episodes(make_env: Any = Wander, **options: Any) -> GymCollector:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"frames_per_batch": 12, "num_envs": 3, "total_frames": 240}
    collector = GymCollector(make_env, POLICY, episode_reward=True, **arguments | options)
    collector.set_seed(0)
    return collector


def episodes_of(frames: list[TensorDict]) -> list[TensorDict]:
    """Cut batches of frames into the episodes that ended in them, batch by batch."""
    running: dict[int, list[TensorDict]] = {}
    whole = []
    for batch in frames:
        ended = []
        for row in batch.unbind(0):
            for frame in row.unbind(0):
                number = int(frame["collector", "traj_ids"])
                running.setdefault(number, []).append(frame)
                if frame["next", "done"]:
                    ended.append(number)
        whole += [torch.stack(running.pop(number)) for number in sorted(ended)]
    return whole


@pytest.mark.parametrize("number", [1, 4])
def test_they_are_the_episodes_of_the_frames(number: int):
    expected = episodes_of(list(collector_of_episodes()))
    batches = list(collector_of_episodes(trajs_per_batch=number))
    assert len(batches) == len(expected) // number > 2
    found = [row for batch in batches for row in batch.unbind(0)]
    lengths, ids = set(), ("collector", "traj_ids")
    shift = found[0][ids][0] - expected[0][ids][0]  # each collector has its own ids
    for row, episode in zip(found, expected, strict=False):
        mask = row["collector", "mask"]
        length = int(mask.sum())
        lengths.add(length)
        assert mask[:length].all()
        own = row[:length]
        for key in episode.keys(True, True):
            assert torch.equal(own[key], episode[key] + shift * (key == ids)), key
        assert own["next", "done"].nonzero()[:, 0].tolist() == [length - 1]
        total = own["next", "reward"].sum(0)
        torch.testing.assert_close(own["next", "episode_reward"][-1], total)
    assert len(lengths) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trajs_per_batch": 0}, "trajs_per_batch must be a whole number of at least 1, got 0"),
        ({"trajs_per_batch": 2.5}, "trajs_per_batch must be a whole number .* got 2.5"),
        (
            {"trajs_per_batch": True},
            "trajs_per_batch must be a whole number of at least 1, got True",
        ),
        ({"trajs_per_batch": 2} | BUFFER, "buffer .* trajs_per_batch, not both"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str):
    envs = Recorded()
    with pytest.raises(ValueError, match=message):
        collector_of_episodes(envs, **options)
    assert all(env.closed for env in envs)


def test_vector_environments_have_steps_of_no_episode():
    with pytest.raises(ValueError, match="a vector environment may belong"):
        collector_of_episodes(in_one(Wander, 3), trajs_per_batch=2)


def assert_whole(batch: TensorDict) -> None:
    for row in batch.unbind(0):
        length = int(row["collector", "mask"].sum())
        steps = row["next", "step_count"][:length].flatten().tolist()
        assert steps == list(range(1, length + 1))
        assert row["next", "done"][:length].nonzero()[:, 0].tolist() == [length - 1]
        assert len(row["collector", "traj_ids"][:length].unique()) == 1


def test_a_postproc_gets_the_episodes_that_are_yielded():
    seen: list[TensorDict] = []

    def keep(batch: TensorDict) -> TensorDict:
        seen.append(batch.clone())
        return batch.set("seen", torch.full(batch.shape, len(seen)))

    found = list(collector_of_episodes(trajs_per_batch=2, step_count=True, postproc=keep))
    assert len(found) == len(seen) > 2
    for number, (batch, before) in enumerate(zip(found, seen, strict=True), 1):
        assert_whole(batch)
        assert (batch["seen"] == number).all()
        assert (batch.exclude("seen") == before).all()
    normalizer, frames = RewardNormalizer(0.9), 0
    for batch in collector_of_episodes(trajs_per_batch=2, postproc=normalizer):
        frames += int(batch["collector", "mask"].sum())
    assert normalizer.count == frames


def test_new_loops_states_and_resets_begin_new_episodes():
    collector = collector_of_episodes(trajs_per_batch=2, step_count=True, total_frames=-1)
    state = collector.state_dict()
    for _ in range(3):
        for number, batch in enumerate(collector):
            assert_whole(batch)
            if number == 1:
                collector.load_state_dict(state)
            if number == 2:
                collector.reset()
            if number == 4:
                break
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        next(iter(collector))
