"""torchrl's DistributedCollector feeds the blocks: its workers normalise their own rewards."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedCollector
from torchrl.envs import ExplorationType, GymEnv, TransformedEnv

from ppokit import KLEarlyStopper, PPOUpdate, RewardNormalizer
from tests.blocks import ppo_update
from tests.update.parts import make_parts

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


def make_update() -> tuple[Any, PPOUpdate]:
    # a group of this process: the default one holds the workers, which do not answer
    group = dist.new_group([0], use_local_synchronization=True) if dist.is_initialized() else None
    loss, gae, optimizer = make_parts(normalize_advantage=True, group=group)
    options: Any = {"stopper": KLEarlyStopper(0.5, group=group), "group": group, "seed": 0}
    return loss.actor_network, ppo_update(
        loss, optimizer, advantage=gae, minibatch_size=100, **options
    )


def free_port() -> int:
    """Return a free port; torchrl's store takes the next one, which is most likely free."""
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


def test_rewards_and_updates_are_those_of_collectors_here(make_collector: Any):
    actor, _ = make_update()
    collector = make_collector(actor, sync=True, batches=3)
    pair = make_update(), make_update()
    (actor_, update), (twin, expected) = pair
    options: Any = {"frames_per_batch": FRAMES, "total_frames": -1}
    options["exploration_type"] = ExplorationType.DETERMINISTIC
    own = [Collector(partial(make_env, seed), twin, **options) for seed in range(WORKERS)]
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
            TensorDict.from_module(actor_).data, TensorDict.from_module(twin).data
        )
        collector.update_policy_weights_(actor_)


def test_asynchronous_batches(make_collector: Any):
    """Each worker's rewards are normalised by the statistics of all its frames."""
    actor, _ = make_update()
    collector = make_collector(actor, sync=False, batches=6)
    actor, update = make_update()
    scales = []
    for batch in collector:
        assert batch.shape == (FRAMES,)
        assert batch.names == ["time"]
        scales.append((batch["next", "reward"] / batch["next", "raw_reward"])[-1].item())
        assert update(batch)["grad_norm"] > 0
        collector.update_policy_weights_(actor)
    assert len(scales) == 6
    assert max(scales) < 1  # returns of 10 and more
