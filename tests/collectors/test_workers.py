"""GymCollector in the processes of torchrl's multi-process collectors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import ExplorationType, GymEnv
from torchrl.modules import ProbabilisticActor

from ppokit import GRUModule, GymCollector, RewardNormalizer, SequenceBatcher
from tests.blocks import categorical_actor

WORKERS, ENVS, STEPS = 2, 3, 40
OPTIONS: dict[str, Any] = {"categorical_action_encoding": True}


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_policy(recurrent: bool = False) -> ProbabilisticActor:
    torch.manual_seed(0)
    body: list[Any] = [TensorDictModule(nn.Linear(4, 8), ["observation"], ["features"])]
    if recurrent:
        body.append(GRUModule(8, 8, in_key="features", out_key="features"))
    actor = categorical_actor(*body, nn.Linear(8, 2), in_key="features")
    actor.register_buffer("policy_version", torch.tensor(0))
    return actor


@pytest.fixture
def make_collector() -> Iterator[Any]:
    """Makes collectors, and shuts them down: their processes would keep this one from ending."""
    made = []
    yield lambda *args, **kwargs: made.append(collector_over(*args, **kwargs)) or made[-1]
    for collector in made:
        collector.shutdown()


def collector_over(kind: Any, policy: Any, batches: int, **options: Any) -> Any:
    frames = ENVS * STEPS * (WORKERS if kind is MultiSyncCollector else 1)
    if kind is MultiSyncCollector:
        options["cat_results"] = "stack"
    return kind(
        [make_env] * WORKERS,
        policy,
        frames_per_batch=frames,
        total_frames=batches * frames,
        collector_class=partial(GymCollector, num_envs=ENVS, **OPTIONS),
        **options,
    )


def test_workers_collect_what_collectors_here_do(make_collector: Any):
    """Weights that are changed in between included."""
    policy = make_policy(recurrent=True)
    deterministic: Any = {"exploration_type": ExplorationType.DETERMINISTIC}
    collector = make_collector(MultiSyncCollector, policy, 4, **deterministic)
    frames = {"num_envs": ENVS, "frames_per_batch": ENVS * STEPS}
    frames |= OPTIONS | deterministic
    own = [GymCollector(make_env, policy, **frames) for _ in range(WORKERS)]
    seed = 5
    for one in own:
        seed = one.set_seed(seed)
        one.reset()  # as torchrl's do once more
    assert collector.set_seed(5) == seed
    ids, keys = [set(), set()], ("collector", "traj_ids")
    for count, batch in enumerate(collector):
        assert batch.shape == (WORKERS, ENVS, STEPS)
        assert (batch["policy_version"] == count).all()
        for number, (worker, here) in enumerate(zip(batch, own, strict=True)):
            expected = here.rollout()
            both = (x.exclude(keys).to_dict() for x in (worker, expected))
            torch.testing.assert_close(*both)
            numbers = [x[keys].unique(return_inverse=True)[1] for x in (worker, expected)]
            assert torch.equal(*numbers)
            ids[number] |= set(worker[keys].unique().tolist())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
            policy.policy_version += 1
        collector.update_policy_weights_(policy)
    assert not ids[0] & ids[1]
    # torchrl 0.15 adds up what the workers have counted
    frames, stats = 4 * WORKERS * ENVS * STEPS, collector.stats()
    assert stats["frames"] == stats.get("stepped_frames", frames) == frames


def assert_trajectories_continue(batches: Iterable[Any], workers: int) -> None:
    """In any order of batches, returns and sequences are those of each worker's trajectories."""
    normalizer, batcher, seen = RewardNormalizer(0.9), SequenceBatcher(16), {}
    for batch in batches:
        worker = int(batch["collector", "traj_ids"][0, 0]) >> 51
        seen.setdefault(worker, []).append(batch["next"].select("reward", "done").clone())
        normalizer(batch)
        assert int(batcher(batch)["collector", "mask"].sum()) == ENVS * STEPS
    assert len(seen) == workers
    returns = []
    for of_worker in seen.values():
        so_far = torch.zeros(ENVS, dtype=torch.float64)
        for step in torch.cat(of_worker, 1).unbind(1):
            so_far = 0.9 * so_far + step["reward"].squeeze(-1)
            returns.append(so_far)
            so_far = so_far * ~step["done"].squeeze(-1)
    assert normalizer.count == sum(map(len, returns))
    torch.testing.assert_close(normalizer.moments[1], torch.cat(returns).mean())


@pytest.mark.slow
def test_returns_and_sequences_stay_with_their_trajectory(make_collector: Any):
    collector = make_collector(MultiAsyncCollector, make_policy(recurrent=True), 8)
    assert_trajectories_continue(collector, WORKERS)


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_and_another_collector_goes_on(make_collector: Any):
    policy = make_policy()
    collector = make_collector(MultiSyncCollector, policy, 100)
    first = set(next(iter(collector))["collector", "traj_ids"].flatten().tolist())
    collector.procs[1].kill()
    # torchrl ends the other worker, and raises a ValueError where that takes longer than 0.1 s.
    said = r"worker 1 \(exit code -9\)|while it is still running"
    with pytest.raises((RuntimeError, ValueError), match=said):
        list(collector)
    time.sleep(1)  # ids tell workers of one number apart that were started a second apart
    for batch in make_collector(MultiSyncCollector, policy, 2):
        assert not first & set(batch["collector", "traj_ids"].flatten().tolist())
