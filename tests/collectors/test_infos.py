"""GymCollector(info_keys=): entries of info beside each step, of the right one."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

from ppokit import GymCollector
from ppokit.networks import actor_critic

MODES = [None, AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


class Lives(gym.Env):
    """The observation is what info says: the number of the reset or step, and of the episode."""

    observation_space = spaces.Box(-9, 999, (2,), np.float32)
    action_space = spaces.Discrete(2)
    episode, tells_at_reset, told = 0, True, ("lives", "place")

    def told_of(self, time: int) -> tuple[np.ndarray, dict]:
        info = {"lives": 100 * self.episode + time, "place": np.array([time, self.episode], "i2")}
        return np.array([time, self.episode], np.float32), {k: info[k] for k in self.told}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time, self.episode = 0, self.episode + 1
        observation, info = self.told_of(0)
        return observation, info if self.tells_at_reset else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.time += 1
        observation, info = self.told_of(self.time)
        ends = self.time == 2 + self.episode % 3
        return (
            observation,
            0.0,
            ends and self.episode % 2 == 0,
            ends and self.episode % 2 == 1,
            info,
        )


def batches(mode: Any, make_env: Any = Lives, **options: Any) -> list[Any]:
    actor, _ = actor_critic(Lives())
    if mode is not None:
        make_env = partial(SyncVectorEnv, [make_env] * 2, autoreset_mode=mode)
    frames = {"frames_per_batch": 14, "total_frames": 28}
    options = {"info_keys": ["lives", "place"], "num_envs": 2} | options
    with GymCollector(make_env, actor, **frames, **options) as collector:
        return list(collector)


@pytest.mark.parametrize("mode", MODES)
def test_info_is_that_of_the_observation_beside_it(mode: Any):
    for batch in batches(mode):
        valid = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        assert batch["next", "done"].sum() >= 2
        for td in (batch, batch["next"]):
            assert td["place"].dtype is torch.int16
            assert td["lives"].shape == (2, 7, 1)
            assert td["lives"].dtype is torch.int64
            time, episode = td["observation"].unbind(-1)
            assert torch.equal(td["place"].float()[valid], td["observation"][valid])
            assert torch.equal(td["lives"][..., 0][valid], (100 * episode + time).long()[valid])


class Silent(Lives):
    """Tells nothing at a reset."""

    tells_at_reset = False


@pytest.mark.parametrize("mode", MODES)
def test_what_a_reset_does_not_tell_is_0(mode: Any):
    batch, *_ = batches(mode, Silent, info_keys=["lives"])
    valid = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
    is_start = (batch["observation"][..., 0] == 0) & valid
    assert is_start.sum() >= 2
    assert (batch["lives"][is_start] == 0).all()
    assert (batch["lives"][valid & ~is_start] > 0).all()
    assert (batch["next", "lives"][valid] > 0).all()


class Changing(Lives):
    """Other info from the fifth step on."""

    value: Any = None
    count = 0

    def step(self, action: Any) -> Any:
        *returned, info = super().step(action)
        self.count += 1
        if self.count > 4:
            info["lives"] = self.value
            if self.value is None:
                del info["lives"]
        return (*returned, info)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "step returned no 'lives' in its info"),
        ([1, 2], r"'lives' in info.*array\(\[1, 2\]\).*is int64 of shape \[1\]"),
        ([[1], [2, 3]], r"'lives' in info.*\[\[1\], \[2, 3\]\]"),
        (1.5, r"array\(1.5\)"),
        ("three", "three"),
        (2**70, str(2**70)),
    ],
)
def test_info_that_changes(value: Any, words: str):
    make = type("Own", (Changing,), {"value": value})
    with pytest.raises(ValueError, match=words):
        batches(None, make, info_keys=["lives"])


class Own(gym.Env):
    """Tells values in turn, in an array that it writes to again."""

    observation_space, action_space = Lives.observation_space, Lives.action_space

    def __init__(self, *values: Any) -> None:
        self.values, self.array = values, None

    def told(self) -> dict:
        value = self.values[min(self.time, len(self.values) - 1)]
        if isinstance(value, np.ndarray):
            self.array = value.copy() if self.array is None else self.array
            self.array[...] = value
            value = self.array
        return {"x": value}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), self.told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.time += 1
        return np.zeros(2, np.float32), 0.0, False, False, self.told()


def told(*values: Any) -> Any:
    return batches(None, partial(Own, *values), info_keys=["x"], num_envs=1)


def test_arrays_that_an_environment_writes_to_again():
    first, second = told(*[np.array([n, -n]) for n in range(40)])
    for start, batch in ((0, first), (14, second)):
        numbers = torch.arange(start, start + 15)
        expected = torch.stack([numbers, -numbers], -1)
        assert torch.equal(batch["x"][0], expected[:-1])
        assert torch.equal(batch["next", "x"][0], expected[1:])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((0, 0.5, 1.5), torch.float64),
        ((1, True, False), torch.bool),
        ((np.float32(1), np.float32(2), 3.25), torch.float32),
        ((np.array(1, ">i4"), np.array(2, ">i4")), torch.int32),
        ((np.longdouble(1), np.longdouble(2)), torch.float64),
    ],
)
def test_numbers_of_another_dtype_that_fit(values: Any, dtype: torch.dtype):
    batch, _ = told(*values)
    found = [*batch["x"][0, : len(values), 0].tolist()]
    assert found == [float(x) for x in values]
    assert batch["x"].dtype is batch["next", "x"].dtype is dtype


@pytest.mark.parametrize("values", [(np.int8(1), np.int8(3), 1000), (1.0, np.float32(1), 1e300)])
def test_numbers_that_do_not_fit(values: Any):
    with pytest.raises(ValueError, match="first one that a step returned is"):
        told(*values)


@pytest.mark.parametrize("value", ["a", 1j, {"a": 1}, [[1], [2, 3]], object()])
def test_entries_that_are_no_numbers(value: Any):
    with pytest.raises(ValueError, match=r"info has 'x' as.*numbers, flags or arrays"):
        told(value)


def test_a_native_environment_without_final_info():
    """ALE's, whose infos at an end are those of the next episode."""

    class NoFinalInfo(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *returned, infos = super().step(actions)
            infos.pop("final_info", None)
            return (*returned, infos)

    env = NoFinalInfo([Lives] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=r"NoFinalInfo returns no 'final_info'.*NEXT_STEP"):
        batches(None, env)


@pytest.mark.parametrize("mode", MODES[1:])
def test_members_that_tell_nothing(mode: Any):
    class Mute(Lives):
        told = ("place",)

    with pytest.raises(ValueError, match="no 'lives'"):
        batches(mode, Mute)


@pytest.mark.parametrize("value", [3, np.arange(3), np.float32(1)])
def test_a_native_environment_with_one_entry_for_all(value: Any):
    class Native(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *returned, infos = super().step(actions)
            return (*returned, infos | {"lives": value})

    env = Native([Lives] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    with pytest.raises(ValueError, match=r"'lives' in info as .*array of 2 entries"):
        batches(None, env)


def test_a_mask_for_all_members_that_nobody_reads():
    class Native(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *returned, infos = super().step(actions)
            return (*returned, infos | {"action_mask": np.ones(7, bool)})

    env = Native([Lives] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    assert "lives" in batches(None, env)[0].keys()


@pytest.mark.parametrize("kind", [tuple, lambda x: dict(enumerate(x)), list])
def test_masks_of_several_choices_that_nobody_reads(kind: Any):
    """gymnasium's masks of a MultiDiscrete or a Dict are no arrays."""

    class Masked(Lives):
        action_space = spaces.MultiDiscrete([3, 4])
        told = ("lives", "action_mask")

        def told_of(self, time: int) -> Any:
            mask = kind([np.ones(3, np.int8), np.ones(4, np.int8)])
            observation = np.array([time, self.episode], np.float32)
            return observation, {"lives": time, "action_mask": mask}

    actor, _ = actor_critic(Masked())
    with GymCollector(Masked, actor, frames_per_batch=8, info_keys=["lives"]) as collector:
        assert "action_mask" not in collector.rollout()


def test_keys_of_any_iterable():
    *_, last = batches(None, info_keys=(key for key in ("lives", "place")))
    assert {"lives", "place"} <= {*last.keys()}


def test_info_of_a_list():
    """gymnasium's wrapper returns one dictionary for each member."""
    env = SyncVectorEnv([Lives] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    actor, _ = actor_critic(Lives())
    with GymCollector(
        DictInfoToList(env), actor, frames_per_batch=14, info_keys=["lives"]
    ) as collector:
        batch = collector.rollout()
    time, episode = batch["next", "observation"].unbind(-1)
    valid = batch["collector", "mask"]
    expected = (100 * episode + time).long()[valid]
    assert torch.equal(batch["next", "lives"][..., 0][valid], expected)


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ("lives", TypeError, r"names such as \['lives'\]"),
        (None, TypeError, "names such as"),
        (3, TypeError, "names such as"),
        ([("a", "b")], TypeError, "names such as"),
        (["action"], ValueError, "another entry 'action'"),
        (["observation"], ValueError, "another entry 'observation'"),
        (["done"], ValueError, "another entry 'done'"),
        (["state_value"], ValueError, "another entry 'state_value'"),
        (["step_count"], ValueError, "another entry 'step_count'"),
        ([""], ValueError, "another entry ''"),
    ],
)
def test_bad_keys(keys: Any, error: Any, words: str):
    with pytest.raises(error, match=words):
        batches(None, info_keys=keys)
