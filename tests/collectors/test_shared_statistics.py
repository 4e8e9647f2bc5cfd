"""Statistics of observations that several worker processes, or several ranks, share."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    ObservationNormalizer,
    PPOUpdate,
    TrainingStep,
)
from tests.ranks import run_on_two_ranks

ENVS, STEPS, BATCHES = 2, 50, 6
FRAMES = 2 * ENVS * STEPS
is_late = False


def make_late_env() -> GymEnv:
    """Make an environment in a process that begins each batch late."""
    global is_late
    is_late = True
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_prompt_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def wait() -> None:
    time.sleep(0.15 * is_late)


def make_actor(*before: Any, key: str = "normal") -> ProbabilisticActor:
    torch.manual_seed(0)
    head = TensorDictModule(nn.Linear(4, 2), [key], ["logits"])
    return ProbabilisticActor(
        TensorDictSequential(*before, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


@pytest.fixture
def make_collector() -> Iterator[Any]:
    """Makes collectors that are shut down: their processes would keep this one from ending."""
    made = []

    def make(kind: Any, policy: Any, transform: Any, batches: int = BATCHES) -> Any:
        is_sync = kind is MultiSyncCollector
        frames = FRAMES if is_sync else FRAMES // 2
        options = {"num_envs": ENVS, "categorical_action_encoding": True}
        made.append(
            kind(
                [make_prompt_env, make_late_env],
                policy,
                frames_per_batch=frames,
                total_frames=batches * frames,
                collector_class=partial(GymCollector, observation_transform=transform, **options),
                pre_collect_hook=wait,
                **({"cat_results": "stack"} if is_sync else {}),
            )
        )
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def assert_normalised(batch: Any, raw: torch.Tensor | None) -> None:
    """Raise unless all frames are normalised by the statistics of these raw observations."""
    mean, std = torch.zeros(4).double(), torch.ones(4).double()
    if raw is not None:
        x = raw.double()
        mean, std = x.mean(0), (x.var(0, correction=0) + 1e-8).sqrt()
    for nested in (batch, batch["next"]):
        expected = ((nested["observation"].double() - mean) / std).float()
        torch.testing.assert_close(nested["normal"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("known", [False, True])
def test_a_batch_of_several_workers_has_the_statistics_of_those_before_it(
    make_collector: Any, known: bool
):
    """One worker ends its batch before the other begins its own; no frame is lost."""
    norm, seen = ObservationNormalizer(4, out_key="normal", clip=None), []
    collector = make_collector(MultiSyncCollector, make_actor(), norm)
    if known:  # as where a checkpoint is loaded after the workers have started
        other, x = ObservationNormalizer(4), 5 * torch.randn(100, 4) + 3
        other.update(TensorDict({"observation": x}, [100]))
        norm.load_state_dict(other.state_dict())
        seen.append(x)
    for batch in collector:
        assert_normalised(batch, torch.cat(seen) if seen else None)
        seen.append(batch["observation"].reshape(-1, 4).clone())
        assert norm.count == len(torch.cat(seen))
        collector.update_policy_weights_()
    torch.testing.assert_close(norm.mean, torch.cat(seen).double().mean(0))
    torch.testing.assert_close(norm.variance, torch.cat(seen).double().var(0, correction=0))
    collector.shutdown()
    for batch in make_collector(MultiSyncCollector, make_actor(), norm, batches=2):
        assert_normalised(batch, torch.cat(seen))  # other workers go on from there
        seen.append(batch["observation"].reshape(-1, 4).clone())


def test_the_state_of_workers_goes_on(make_collector: Any):
    norm = ObservationNormalizer(4, out_key="normal")
    collector = make_collector(MultiSyncCollector, make_actor(), norm, batches=2)
    states = [collector.state_dict() for _ in collector]
    other = ObservationNormalizer(4, out_key="normal")
    resumed = make_collector(MultiSyncCollector, make_actor(), other, batches=4)
    resumed.load_state_dict(states[-1])
    assert other.count == norm.count == 2 * FRAMES
    assert torch.equal(other.mean, norm.mean)
    next(iter(resumed))
    assert other.count == 3 * FRAMES


def test_an_asynchronous_batch_has_one_map_and_no_frame_is_lost(make_collector: Any):
    norm, counted = ObservationNormalizer(4, out_key="normal", clip=None), 0
    for batch in make_collector(MultiAsyncCollector, make_actor(), norm, batches=12):
        counted += batch.numel()
        assert norm.count >= counted
        raw, normal = (
            torch.cat([x[key].double().reshape(-1, 4) for x in (batch, batch["next"])])
            for key in ("observation", "normal")
        )
        for x, y in zip(raw.T, normal.T, strict=True):
            line = torch.stack([x, torch.ones_like(x)], 1)
            fit = line @ torch.linalg.lstsq(line, y.unsqueeze(1)).solution.squeeze(1)
            torch.testing.assert_close(fit, y, rtol=1e-4, atol=1e-4)
    assert norm.count % (ENVS * STEPS) == 0


def test_within_the_networks_the_statistics_come_with_the_weights(make_collector: Any):
    norm = ObservationNormalizer(4, out_key="normal", clip=None)
    actor, seen = make_actor(norm), []
    critic = TensorDictSequential(norm, ValueOperator(nn.Linear(4, 1), ["normal"]))
    loss = DualClipPPOLoss(actor, critic)
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.Adam(loss.parameters())), advantage=gae, epochs=1
    )
    collector = make_collector(MultiSyncCollector, actor, None, batches=4)
    for batch in collector:
        x = torch.cat(seen) if seen else None
        assert_normalised_by_policy(batch, x)
        seen.append(batch["observation"].reshape(-1, 4).clone())
        assert abs(update(batch.clone())["first_kl"]) < 1e-6
        norm.update(batch)
        collector.update_policy_weights_(actor)
    assert norm.count == 4 * FRAMES
    collector = GymCollector(make_prompt_env, make_actor(copy.deepcopy(norm)), frames_per_batch=20)
    norm.update(TensorDict({"observation": torch.randn(9, 4)}, [9]))
    collector.update_policy_weights_(TensorDict.from_module(actor))
    assert collector.policy.module[0][0].count == norm.count == 4 * FRAMES + 9


def assert_normalised_by_policy(batch: Any, raw: torch.Tensor | None) -> None:
    mean, std = torch.zeros(4).double(), torch.ones(4).double()
    if raw is not None:
        mean, std = raw.double().mean(0), (raw.double().var(0, correction=0) + 1e-8).sqrt()
    expected = ((batch["observation"].double() - mean) / std).float()
    torch.testing.assert_close(batch["normal"], expected, rtol=1e-5, atol=1e-5)


def test_copies_have_statistics_of_their_own():
    norm, batch = ObservationNormalizer(2), TensorDict({"observation": torch.randn(5, 2)}, [5])
    norm.update(batch)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        twin.update(batch)
        assert (norm.count, twin.count) == (5, 10)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_agents_and_their_mask(shape: tuple[int, ...]):
    norm, x = ObservationNormalizer(shape), torch.randn(2, 6, 4, *shape)
    mask = torch.rand(2, 6) < 0.5
    norm.update(TensorDict({"observation": x, ("collector", "mask"): mask}, [2, 6]))
    valid = x[mask].reshape(-1, *shape).double()
    assert norm.count == len(valid)
    torch.testing.assert_close(norm.mean, valid.mean(0))


def test_a_cast_does_not_round_the_statistics():
    norm = ObservationNormalizer((), clip=None)
    x = torch.tensor([1e4 - 0.01, 1e4 + 0.01])
    batch = TensorDict({"observation": x}, [2])
    norm.update(batch)
    mean = norm.mean.clone()
    nn.Sequential(norm).to(torch.bfloat16)
    assert torch.equal(norm.mean, mean)
    norm.update(batch)
    assert norm.count == 4
    torch.testing.assert_close(norm(batch.clone())["observation"], ((x - mean) / x.std()).float(),
                               rtol=0.5, atol=0.0)  # fmt: skip


def test_a_worker_number_alone_makes_no_worker():
    norm, policy = ObservationNormalizer(4, out_key="normal"), make_actor()
    collector = GymCollector(
        "CartPole-v1",
        policy,
        frames_per_batch=20,
        worker_idx=3,
        observation_transform=norm,
        categorical_action_encoding=True,
    )
    collector.rollout()
    assert norm.count == 20


# -- ranks ------------------------------------------------------------------------------


def on_rank(rank: int) -> dict[str, Any]:
    norm = ObservationNormalizer(3, mask_key="valid")
    torch.manual_seed(rank)
    seen = []
    for number in range(3):
        batch = TensorDict({"observation": 4 * rank + torch.randn(2, 5 + rank + number, 3)})
        batch.auto_batch_size_(2)
        batch["valid"] = torch.rand(batch.shape) < 0.8
        norm.update(batch)
        seen.append(batch["observation"][batch["valid"]])
    state = {name: value.clone() for name, value in norm.state_dict().items()}
    errors = []
    batch = TensorDict({"observation": torch.full((2, 3), torch.nan if rank else 0.0)}, [2])
    for bad in (batch, batch.exclude("observation") if rank else batch):
        with pytest.raises((ValueError, KeyError, RuntimeError)) as error:
            norm.update(bad)
        errors.append(str(error.value))
    same = all(torch.equal(value, state[name]) for name, value in norm.state_dict().items())
    norm.freeze()
    if rank:
        norm.update(batch)  # exchanges nothing
    norm.unfreeze()
    norm.load_state_dict({name: x + rank * (name == "module.mean") for name, x in state.items()})
    with pytest.raises(RuntimeError, match="statistics differ before this batch"):
        norm.update(TensorDict({"observation": torch.zeros(2, 3)}, [2]))
    return {"state": state, "seen": torch.cat(seen), "errors": errors, "same": same}


def test_ranks_share_the_statistics(tmp_path: Path):
    one, other = run_on_two_ranks(on_rank, tmp_path)
    for name, value in one["state"].items():
        assert torch.equal(value, other["state"][name])
    x = torch.cat([one["seen"], other["seen"]]).double()
    torch.testing.assert_close(one["state"]["module.mean"], x.mean(0))
    m2 = one["state"]["module.m2"] / len(x)
    torch.testing.assert_close(m2, x.var(0, correction=0))
    assert one["state"]["module.count"].unique().item() == len(x)
    assert all(error.startswith("Rank 1 cannot use its batch") for error in one["errors"])
    assert "beyond 1e+150" in other["errors"][0]
    assert "'observation' is not in the batch" in other["errors"][1]
    assert one["same"]
    assert other["same"]
