"""Steps that only reset an environment have no influence on any number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.modules import OneHotCategorical, ValueOperator

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
from tests.collectors.test_collector import Wander, make_policy

MASK = ("collector", "mask")


class Agent:
    """Networks, and batches of environments that are reset in a step of its own."""

    def __init__(self, *, recurrent: bool) -> None:
        torch.manual_seed(0)
        self.recurrent = recurrent
        if recurrent:
            lstm = LSTMModule(3, 4, in_key="observation", out_key="features")
            head = ProbabilisticTensorDictModule(
                ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
            )
            logits = TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"])
            self.actor: Any = ProbabilisticTensorDictSequential(lstm, logits, head)
            value = ValueOperator(nn.Linear(4, 1), ["features"])
            self.critic: Any = TensorDictSequential(lstm, value)
        else:
            self.actor = make_policy(3, 3, OneHotCategorical)
            self.critic = ValueOperator(nn.Linear(3, 1), ["observation"])
        env = SyncVectorEnv([Wander] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
        with GymCollector(env, self.actor, frames_per_batch=60) as collector:
            collector.set_seed(1)
            self.batches = [collector.rollout() for _ in range(4)]

    def train(self, batches: list[TensorDictBase]) -> tuple[list[dict[str, float]], list[Any]]:
        torch.manual_seed(0)
        actor, critic = copy.deepcopy((self.actor, self.critic))
        loss = DualClipPPOLoss(actor, critic, dual_clip=3.0)
        update = PPOUpdate(
            TrainingStep(loss, torch.optim.SGD(loss.parameters(), 0.1)),
            advantage=GAE(gamma=0.9, lmbda=0.8, value_network=critic, average_gae=True),
            reward_normalizer=RewardNormalizer(0.9),
            batcher=SequenceBatcher(5) if self.recurrent else None,
            epochs=2,
            minibatch_size=16,
            seed=0,
        )
        statistics = [update(batch.clone()) for batch in batches]
        return statistics, [p.detach() for p in loss.parameters()]


def poisoned(batch: TensorDictBase) -> TensorDictBase:
    """The batch with NaN in every number of the steps that reset."""
    batch = batch.clone()
    for value in batch.values(True, True):
        if value.is_floating_point():
            value[~batch[MASK]] = torch.nan
    return batch


@pytest.mark.parametrize("recurrent", [False, True])
def test_no_number_depends_on_them(recurrent: bool):
    agent = Agent(recurrent=recurrent)
    assert all(not batch[MASK].all() for batch in agent.batches)
    poison = [poisoned(batch) for batch in agent.batches]
    (expected, parameters), (found, others) = agent.train(agent.batches), agent.train(poison)
    for one, other in zip(expected, found, strict=True):
        for name in one.keys() - {"seconds_collecting", "seconds_updating", "frames_per_second"}:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    for one, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(one, other)
    frames = [float(batch[MASK].sum()) for batch in agent.batches]
    assert [statistics["frames"] for statistics in found] == frames


@pytest.mark.parametrize("recurrent", [False, True])
def test_advantages_and_returns_are_those_of_the_episodes_alone(recurrent: bool):
    agent = Agent(recurrent=recurrent)
    normalizer = RewardNormalizer(0.9)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic)
    open_returns, seen = [0.0] * 3, []
    for batch in agent.batches:
        with torch.no_grad():
            estimated = gae(batch.clone())
        for row, frames in enumerate(batch):
            for frame in frames[frames[MASK]]:
                open_returns[row] = 0.9 * open_returns[row] + frame["next", "reward"].item()
                seen.append(open_returns[row])
                open_returns[row] *= not frame["next", "done"].item()
            run: list[int] = []
            for time in range(20):
                if frames[MASK][time]:
                    run.append(time)
                if run and (time == 19 or not frames[MASK][time]):
                    part = estimated[row][run]
                    keys = ["reward", "state_value", "done", "terminated"]
                    reward, after, done, end = (part["next", key].double() for key in keys)
                    value = part["state_value"].double()
                    want, _ = reference.gae(
                        reward, value, after, done.bool(), end.bool(), gamma=0.9, lmbda=0.8
                    )
                    torch.testing.assert_close(part["advantage"].double(), want, atol=1e-5, rtol=0)
                    run = []
        normalizer(batch.clone())
    spread = torch.tensor(seen, dtype=torch.float64).var(correction=0)
    count, _, m2, *_ = normalizer.moments.unbind(-1)
    assert int(count) == len(seen)
    torch.testing.assert_close((m2 / count).squeeze(), spread)
