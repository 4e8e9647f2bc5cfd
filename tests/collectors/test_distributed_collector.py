"""torchrl's DistributedCollector, feeding the blocks: its workers normalise their own rewards."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedCollector
from torchrl.envs import ExplorationType, GymEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import GAE, DualClipPPOLoss, KLEarlyStopper, PPOUpdate, RewardNormalizer, TrainingStep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The env passed to Collector is missing:FutureWarning"),
]
WORKERS, FRAMES = 2, 200
TRAJ_IDS = ("collector", "traj_ids")


def make_env(seed: int) -> TransformedEnv:
    """Seeded here: torchrl 0.14.1's DistributedCollector.set_seed ends its workers."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env = TransformedEnv(env, RewardNormalizer(gamma=0.99))
    env.set_seed(seed)
    return env


def make_actor() -> ProbabilisticActor:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def make_update(actor: Any, group: Any) -> PPOUpdate:
    torch.manual_seed(1)
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    loss = DualClipPPOLoss(actor, critic, normalize_advantage=True, group=group)
    return PPOUpdate(
        TrainingStep(
            loss,
            torch.optim.Adam(loss.parameters(), 0.01),
            stopper=KLEarlyStopper(0.5, group=group),
            group=group,
        ),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        minibatch_size=100,
        seed=0,
    )


def free_port() -> int:
    """Return a free port whose successor, which torchrl's store takes, is most likely free."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture
def make_collector() -> Iterator[Any]:
    made = []

    def make(actor: Any, *, sync: bool, batches: int) -> DistributedCollector:
        frames = FRAMES * (WORKERS if sync else 1)
        collector = DistributedCollector(
            [partial(make_env, seed) for seed in range(WORKERS)],
            actor,
            frames_per_batch=frames,
            total_frames=batches * frames,
            sync=sync,
            exploration_type=ExplorationType.DETERMINISTIC if sync else ExplorationType.RANDOM,
            launcher="mp",
            tcp_port=free_port(),
        )
        made.append(collector)
        return collector

    yield make
    for collector in made:
        collector.shutdown()


def alone() -> Any:
    """Return a group of this process: the default one holds the workers, who answer nothing."""
    return dist.new_group([0], use_local_synchronization=True)


def test_rewards_and_updates_are_those_of_collectors_here(make_collector: Any):
    actor, twin = make_actor(), make_actor()
    collector = make_collector(actor, sync=True, batches=3)
    own = [
        Collector(
            partial(make_env, seed),
            twin,
            frames_per_batch=FRAMES,
            total_frames=-1,
            exploration_type=ExplorationType.DETERMINISTIC,
        )
        for seed in range(WORKERS)
    ]
    update, expected = make_update(actor, alone()), make_update(twin, alone())
    for batch in collector:
        assert batch.names == [None, "time"]
        here = torch.stack([one.next().clone() for one in own])
        torch.testing.assert_close(
            batch.exclude(TRAJ_IDS).to_dict(), here.exclude(TRAJ_IDS).to_dict()
        )
        here[TRAJ_IDS] = here[TRAJ_IDS] + torch.tensor([[0], [10**6]])
        said = update(batch)
        torch.testing.assert_close(said["loss_objective"], expected(here)["loss_objective"])
        torch.testing.assert_close(
            TensorDict.from_module(actor).data, TensorDict.from_module(twin).data
        )
        collector.update_policy_weights_(actor)


def test_batches_of_whichever_worker_is_ready(make_collector: Any):
    """Each worker's rewards are by its own statistics, of all frames that it has collected."""
    actor = make_actor()
    collector = make_collector(actor, sync=False, batches=6)
    update = make_update(actor, alone())
    scales = []
    for batch in collector:
        assert batch.shape == (FRAMES,)
        assert batch.names == ["time"]
        scales.append((batch["next", "reward"] / batch["next", "raw_reward"])[-1].item())
        assert update(batch)["grad_norm"] > 0
        collector.update_policy_weights_(actor)
    assert len(scales) == 6
    assert max(scales) < 1  # returns of 10 and more
