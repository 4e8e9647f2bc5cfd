"""GymCollector as the worker of torchrl's RayCollector, on a local cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torchrl.envs import ExplorationType

from ppokit import GymCollector
from tests.collectors.test_workers import (
    ENVS,
    OPTIONS,
    STEPS,
    WORKERS,
    assert_trajectories_continue,
    make_policy,
)

if find_spec("ray") is None:
    pytest.skip("extra 'ray' is not installed", allow_module_level=True)

import ray  # pyright: ignore[reportMissingImports]

from torchrl.collectors.distributed import RayCollector  # isort: skip

# Ray's own, at import and where it starts processes
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:RayCollector iteration started before:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_collector(
    policy: Any, *, env: Any = "CartPole-v1", sync: bool = True, batches: int = 3, **options: Any
) -> Any:
    frames = ENVS * STEPS * (WORKERS if sync else 1)
    return RayCollector(
        [env] * WORKERS,
        policy,
        frames_per_batch=frames,
        total_frames=batches * frames,
        sync=sync,
        collector_class=GymCollector,
        collector_kwargs=OPTIONS | options.pop("collector_kwargs", {}),
        num_workers_per_collector=ENVS,
        remote_configs={"num_cpus": 1},
        **options,
    )


@pytest.mark.parametrize("recurrent", [False, True])
def test_workers_collect_what_collectors_here_do(recurrent: bool):
    policy = make_policy(recurrent)
    deterministic: Any = {"exploration_type": ExplorationType.DETERMINISTIC}
    collector = make_collector(policy, **deterministic)
    collector.update_policy_weights_(policy)
    options = {"num_envs": ENVS, "frames_per_batch": ENVS * STEPS, **deterministic, **OPTIONS}
    own = [GymCollector("CartPole-v1", policy, **options) for _ in range(WORKERS)]
    seed = 5
    for one in own:
        seed = one.set_seed(seed)
    assert collector.set_seed(5) == seed
    ids = []
    for batch in collector:
        assert batch.shape == (WORKERS, ENVS, STEPS)
        assert batch.names[-1] == "time"
        for worker, here in zip(batch, own, strict=True):
            expected = here.rollout()
            ids.append((worker.pop(("collector", "traj_ids")), expected["collector", "traj_ids"]))
            del expected["collector", "traj_ids"]
            torch.testing.assert_close(worker.to_dict(), expected.to_dict())
    of_worker = [[x for x, _ in ids[worker::WORKERS]] for worker in range(WORKERS)]
    theirs = [torch.stack(x).flatten() for x in of_worker]
    assert not set(theirs[0].tolist()) & set(theirs[1].tolist())
    for worker in range(WORKERS):  # the same trajectories, by other numbers
        expected = torch.stack([y for _, y in ids[worker::WORKERS]]).flatten()
        numbers = [x.unique(return_inverse=True)[1] for x in (theirs[worker], expected)]
        assert torch.equal(*numbers)


def test_weights_and_their_version_reach_the_workers():
    policy = make_policy()
    collector = make_collector(policy, batches=4)
    collector.update_policy_weights_(policy)
    for count, batch in enumerate(collector):
        assert (batch["policy_version"] == count).all()
        with torch.no_grad():
            logits = policy(batch.select("observation"))["logits"]
            torch.testing.assert_close(batch["logits"], logits)
            for parameter in policy.parameters():
                parameter.add_(0.1)
            policy.policy_version += 1
        collector.update_policy_weights_(policy)


def test_returns_and_sequences_stay_with_their_trajectory():
    policy = make_policy(recurrent=True)
    collector = make_collector(policy, sync=False, batches=6)
    collector.update_policy_weights_(policy)
    assert_trajectories_continue(collector, WORKERS)


def test_a_worker_that_dies_ends_the_collector_with_an_error():
    policy = make_policy()
    collector = make_collector(policy, batches=1_000)
    collector.update_policy_weights_(policy)
    batches = iter(collector)
    assert next(batches).shape == (WORKERS, ENVS, STEPS)
    ray.kill(collector.remote_collectors[1])
    with pytest.raises(ray.exceptions.RayActorError):
        next(batches)
    collector.shutdown()
