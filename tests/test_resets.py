"""Steps that only reset an environment (gymnasium's NEXT_STEP) have no influence on any number."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    LSTMModule,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from tests import reference
from tests.blocks import categorical_actor

MASK = ("collector", "mask")
CLOCKS = {"seconds_collecting", "seconds_updating", "frames_per_second"}


def collect(recurrent: bool) -> tuple[Any, Any, list[TensorDictBase]]:
    """Return actor, critic and batches of environments that are reset in a step of their own."""
    torch.manual_seed(0)
    key, size = ("features", 5) if recurrent else ("observation", 4)
    lstm = [LSTMModule(4, 5, in_key="observation", out_key="features")] if recurrent else []
    actor = categorical_actor(*lstm, nn.Linear(size, 2), in_key=key)
    critic = TensorDictSequential(*lstm, ValueOperator(nn.Linear(size, 1), [key]))
    env = SyncVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=12)] * 3,
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    options: Any = {"frames_per_batch": 90, "categorical_action_encoding": True}
    with GymCollector(env, actor, **options) as collector:
        collector.set_seed(1)
        batches = [collector.rollout() for _ in range(3)]
    assert all(not batch[MASK].all() for batch in batches)
    return actor, critic, batches


def train(actor: Any, critic: Any, batches: list[TensorDictBase]) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    actor, critic = copy.deepcopy((actor, critic))
    loss = DualClipPPOLoss(actor, critic, dual_clip=3.0)
    is_recurrent = any(isinstance(module, LSTMModule) for module in actor.modules())
    batcher = SequenceBatcher(5) if is_recurrent else None
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.SGD(loss.parameters(), 0.1)),
        advantage=GAE(gamma=0.9, lmbda=0.8, value_network=critic, average_gae=True),
        reward_normalizer=RewardNormalizer(0.9),
        batcher=batcher,
        epochs=2,
        minibatch_size=16,
        seed=0,
    )
    statistics = [update(batch.clone()) for batch in batches]
    return statistics, [p.detach() for p in loss.parameters()]


def poisoned(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch with NaN in every number of the steps that reset."""
    batch = batch.clone()
    for value in batch.values(True, True):
        if value.is_floating_point():
            value[~batch[MASK]] = torch.nan
    return batch


@pytest.mark.parametrize("recurrent", [False, True])
def test_no_statistic_and_no_parameter_depends_on_steps_that_reset(recurrent: bool):
    actor, critic, batches = collect(recurrent)
    expected, parameters = train(actor, critic, batches)
    found, others = train(actor, critic, [poisoned(batch) for batch in batches])
    for one, other in zip(expected, found, strict=True):
        for name in one.keys() - CLOCKS:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(others, parameters)
    frames = [float(batch[MASK].sum()) for batch in batches]
    assert [statistics["frames"] for statistics in found] == frames


def test_advantages_are_those_of_the_episodes_alone():
    _, critic, batches = collect(True)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    for batch in batches:
        with torch.no_grad():
            estimated = gae(batch.clone())
        for row in estimated:
            valid = row[MASK]
            starts = valid & ~torch.cat([valid.new_zeros(1), valid[:-1]])
            for run in row[valid].split(
                valid.cumsum(0)[starts].diff(append=valid.sum().view(1) + 1).tolist()
            ):
                keys = ("reward", "state_value", "done", "terminated")
                reward, after, done, end = (run["next", key] for key in keys)
                value = run["state_value"].double()
                want, _ = reference.gae(
                    reward.double(), value, after.double(), done, end, gamma=0.9, lmbda=0.8
                )
                torch.testing.assert_close(run["advantage"].double(), want, atol=1e-5, rtol=0)
