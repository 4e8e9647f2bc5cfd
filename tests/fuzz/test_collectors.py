"""Frames of any environments hold what the environments returned, step by step.

An observation holds the number of its environment, the episode, the step and the action before.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from ppokit import GymCollector

FIELDS = 4  # environment, episode, step, sum of the action before
OBSERVATIONS: dict[str, spaces.Space] = {
    "float32": spaces.Box(-1e6, 1e6, (FIELDS,), np.float32),
    "float64": spaces.Box(-1e6, 1e6, (2, 2), np.float64),
    "int64": spaces.Box(-999, 10**9, (FIELDS,), np.int64),
    "uint8": spaces.Box(0, 255, (FIELDS,), np.uint8),
    "dict": spaces.Dict(
        {
            "who": spaces.Box(0, 99, (2,), np.float32),
            "when": spaces.Dict({"step": spaces.Box(0, 255, (2,), np.uint8)}),
        }
    ),
}
ACTIONS: dict[str, spaces.Space] = {
    "one of some": spaces.Discrete(3),
    "numbers": spaces.Box(0, 3, (2,), np.float32),
    "some of some": spaces.MultiDiscrete([2, 3]),
}


class Told(gym.Env):
    """Reports its number, episode, step and last action in each observation."""

    def __init__(
        self, number: int, observation: str, action: str, lengths: list[int], reuses: bool
    ) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.number, self.lengths, self.reuses = number, lengths, reuses
        self.episode = -1
        self.last: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        super().reset(**kwargs)
        self.episode, self.step_number = self.episode + 1, 0
        return self.say(0), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.step_number += 1
        total = int(np.sum(action))
        ends = self.step_number == self.lengths[self.episode % len(self.lengths)]
        terminated, truncated = (ends and bool(bit & self.episode % 3 + 1) for bit in (1, 2))
        return self.say(total), self.step_number + total / 8, terminated, truncated, {}

    def say(self, action: int) -> Any:
        numbers = [self.number, self.episode, self.step_number, action]
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            parts = np.array(numbers[:2], np.float32), np.array(numbers[2:], np.uint8)
            said = {"who": parts[0], "when": {"step": parts[1]}}
        else:
            said = np.array(numbers, space.dtype).reshape(space.shape or ())
        if self.reuses and self.last is not None and isinstance(said, np.ndarray):
            self.last[...] = said
            return self.last
        self.last = said
        return said


def numbers_of(batch: TensorDictBase) -> torch.Tensor:
    """Return the numbers of the observations ``[B, T, 4]``."""
    keys = ["who", ("when", "step")] if "who" in batch.keys() else ["observation"]
    return torch.cat([batch[key].double().flatten(2) for key in keys], -1)


def act(observation: torch.Tensor, kind: str, as_index: bool) -> torch.Tensor:
    """Return random actions."""
    space, rows = ACTIONS[kind], len(observation)
    if isinstance(space, spaces.Discrete):
        choice = torch.randint(0, int(space.n), (rows,))
        return choice if as_index else torch.nn.functional.one_hot(choice, int(space.n))
    if isinstance(space, spaces.Box):
        return torch.randint(0, 4, (rows, 2)).float()
    assert isinstance(space, spaces.MultiDiscrete)
    sizes = space.nvec.tolist()
    parts = [torch.randint(0, size, (rows,)) for size in sizes]
    if as_index:
        return torch.stack(parts, -1)
    each = zip(parts, sizes, strict=True)
    return torch.cat([torch.nn.functional.one_hot(part, size) for part, size in each], -1)


def total_of(action: torch.Tensor, kind: str, as_index: bool) -> torch.Tensor:
    """Return the sum of the numbers that the environment got ``[B, T]``."""
    space = ACTIONS[kind]
    if isinstance(space, spaces.Box) or (as_index and isinstance(space, spaces.MultiDiscrete)):
        return action.double().sum(-1)
    if as_index:
        return action.double()
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
    return sum(part.double().argmax(-1) for part in action.split(sizes, -1)).double()


def check(batch: TensorDictBase, kind: str, as_index: bool, lengths: list[int]) -> None:
    """Compare each frame with the one before, and with what the environment does."""
    said, following = numbers_of(batch), numbers_of(batch["next"])
    number, episode, step, _ = said.unbind(-1)
    done = batch["next", "done"].squeeze(-1)
    valid = batch.get(("collector", "mask"), torch.ones_like(done))
    total = total_of(batch["action"], kind, as_index)
    assert (number == torch.arange(len(batch)).unsqueeze(1)).all()
    expected = torch.stack([number, episode, step + 1, total], -1)
    assert torch.equal(following[valid], expected[valid])
    reward = (step + 1 + total / 8).float()
    assert torch.equal(batch["next", "reward"].squeeze(-1)[valid], reward[valid])
    ends = step + 1 == torch.tensor(lengths).double()[episode.long() % len(lengths)]
    for bit, name in ((1, "terminated"), (2, "truncated")):
        flag = ends & ((episode.long() % 3 + 1) & bit).bool()
        assert torch.equal(batch["next", name].squeeze(-1)[valid], flag[valid]), name
    assert torch.equal(done[valid], ends[valid])
    for row in range(len(batch)):
        frames = valid[row].nonzero().flatten().tolist()
        for before, after in pairwise(frames):
            if done[row, before]:
                where = [float(row), float(episode[row, before]) + 1, 0.0]
                assert said[row, after, :3].tolist() == where
            else:
                assert torch.equal(said[row, after], following[row, before])
    ids = batch["collector", "traj_ids"][valid].tolist()
    places = list(zip(number[valid].tolist(), episode[valid].tolist(), strict=True))
    assert len(set(ids)) == len(set(places)) == len(set(zip(ids, places, strict=True)))


def collect_and_check(mode: str, data: st.DataObject) -> None:
    """Draw environments, collect from them and read the batches."""
    observation = data.draw(st.sampled_from(list(OBSERVATIONS)))
    kind, as_index = data.draw(st.sampled_from(list(ACTIONS))), data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    num_envs, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    reuses = data.draw(st.booleans()) and mode != "next step"  # gymnasium's own is not copied
    told = partial(Told, observation=observation, action=kind, lengths=lengths, reuses=reuses)
    makers: Any = [partial(told, number) for number in range(num_envs)]
    options: Any = {"vectorization": mode}
    if mode == "next step":
        makers = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        options = {}
    key: Any = "who" if observation == "dict" else "observation"
    policy = TensorDictModule(partial(act, kind=kind, as_index=as_index), [key], ["action"])
    with GymCollector(
        makers,
        policy,
        frames_per_batch=num_envs * steps,
        num_envs=num_envs,
        observation_dtype=None,
        categorical_action_encoding=as_index,
        **options,
    ) as collector:
        batches = [collector.rollout().clone() for _ in range(data.draw(st.integers(1, 3)))]
    whole = torch.cat(batches, 1)
    check(whole, kind, as_index, lengths)


@pytest.mark.parametrize("mode", ["serial", "sync", "next step"])
@settings(max_examples=max(settings.default.max_examples // 10, 20))
@given(data=st.data())
def test_frames_hold_what_the_environments_returned(mode: str, data: st.DataObject):
    collect_and_check(mode, data)


@pytest.mark.slow
@settings(max_examples=max(settings.default.max_examples // 50, 3))
@given(data=st.data())
def test_frames_of_processes_hold_what_the_environments_returned(data: st.DataObject):
    collect_and_check("async", data)
