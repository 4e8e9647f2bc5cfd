"""Whole episodes instead of frames: trajs_per_batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector, RewardNormalizer
from tests.collectors.test_collector import Wander, in_one, make_policy

POLICY = make_policy(3, 3, OneHotCategorical)


def collector_of(make_env: Any = Wander, **options: Any) -> GymCollector:
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
    expected = episodes_of(list(collector_of()))
    batches = list(collector_of(trajs_per_batch=number))
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
        ({"trajs_per_batch": 0}, "trajs_per_batch must be 1 or more episodes, got 0"),
        ({"trajs_per_batch": 2.0}, "trajs_per_batch must be 1 or more episodes, got 2.0"),
        ({"trajs_per_batch": True}, "trajs_per_batch must be 1 or more episodes, got True"),
        (
            {"trajs_per_batch": 2, "replay_buffer": ReplayBuffer(storage=LazyTensorStorage(10))},
            "replay_buffer .* trajs_per_batch, not both",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str):
    envs: list[gym.Env] = []

    def make_env() -> gym.Env:
        envs.append(Wander())
        return envs[-1]

    with pytest.raises(ValueError, match=message):
        collector_of(make_env, **options)
    assert all(env.closed for env in envs)


def test_vector_environments_have_steps_of_no_episode():
    with pytest.raises(ValueError, match="a vector environment may belong"):
        collector_of(in_one(Wander, 3), trajs_per_batch=2)


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

    found = list(collector_of(trajs_per_batch=2, step_count=True, postproc=keep))
    assert len(found) == len(seen) > 2
    for number, (batch, before) in enumerate(zip(found, seen, strict=True), 1):
        assert_whole(batch)
        assert (batch["seen"] == number).all()
        assert (batch.exclude("seen") == before).all()
    normalizer, frames = RewardNormalizer(0.9), 0
    for batch in collector_of(trajs_per_batch=2, postproc=normalizer):
        frames += int(batch["collector", "mask"].sum())
    assert normalizer.count == frames


def test_new_loops_states_and_resets_begin_new_episodes():
    collector = collector_of(trajs_per_batch=2, step_count=True, total_frames=-1)
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
