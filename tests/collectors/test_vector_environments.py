"""Vector environments that reset in the next step, and all forms of make_env."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector, LSTMModule, ObservationNormalizer
from tests.collectors.test_collector import Wander, assert_same, collect, make_policy
from tests.collectors.test_environments import POLICY, Native, collector_of


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
    mode = AutoresetMode.NEXT_STEP
    options: Any = {"steps": 40, "batches": 3, "observation_transform": transform}
    late = collect(
        SyncVectorEnv([make_env] * 3, autoreset_mode=mode), policy, 1, **options | {"steps": 120}
    )
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


def test_frames_of_resets_are_not_counted():
    native = Native(2, AutoresetMode.NEXT_STEP)
    collector = GymCollector(native, POLICY, frames_per_batch=40, total_frames=120)
    batches = list(collector)
    frames = [int(batch["collector", "mask"].sum()) for batch in batches]
    assert sum(frames[:-1]) < 120 <= sum(frames)
    assert collector.stats()["frames"] == sum(frames)
    assert collector.closed
    assert native.closed


def test_recurrent_states_begin_after_the_reset():
    lstm = LSTMModule(3, 4, in_key="observation", out_key="logits")
    head = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    policy = ProbabilisticTensorDictSequential(
        lstm, TensorDictModule(nn.Linear(4, 3), ["logits"], ["logits"]), head
    )
    native = Native(3, AutoresetMode.NEXT_STEP)
    with GymCollector(native, policy, frames_per_batch=90) as collector:
        batch = torch.cat([collector.rollout(), collector.rollout()], 1)
    mask, is_init = batch["collector", "mask"], batch["is_init"].squeeze(-1)
    assert not mask.all()
    assert torch.equal(is_init[:, 1:], ~mask[:, :-1])
    state = batch["recurrent_state_h"].flatten(2)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"make_env": [Wander, partial(Wander, actions="box")]},
            r"Environment 1 has action_space Box.* environment 0 has",
        ),
        ({"make_env": [], "num_envs": 1}, "make_env is an empty list"),
        ({"make_env": [Wander]}, "make_env holds 1 environments, and num_envs is 2"),
        (
            {"make_env": Native(2), "num_envs": 3},
            "make_env holds 2 environments, and num_envs is 3",
        ),
        (
            {"make_env": Native(2, AutoresetMode.DISABLED)},
            r"has autoreset mode .*DISABLED.* Make it with",
        ),
        ({"make_env": Silent(2)}, r"Silent says .* no 'final_obs'.* NEXT_STEP"),
    ],
)
def test_bad_environments(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        collector_of(**{"frames_per_batch": 100} | options).rollout()


def test_observation_statistics_leave_out_the_steps_that_reset():
    norm = ObservationNormalizer(3)
    native = Native(2, AutoresetMode.NEXT_STEP)
    options: Any = {"frames_per_batch": 60, "observation_transform": norm}
    policy = make_policy(3, 3, OneHotCategorical)
    with GymCollector(native, policy, **options) as collector:
        collector.set_seed(0)
        batch = collector.rollout()
    assert not batch["collector", "mask"].all()
    assert (norm.module.count == batch["collector", "mask"].sum()).all()


def test_a_list_of_vector_environments_raises():
    for make_env in ([Native(2), Native(2)], [partial(Native, 2)]):
        with pytest.raises(TypeError, match=r"a list of these|A list holds single environments"):
            GymCollector(make_env, make_policy(3, 3, OneHotCategorical), frames_per_batch=4)
