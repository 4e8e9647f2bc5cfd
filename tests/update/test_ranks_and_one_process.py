"""Several ranks reach the parameters of one process on the union of their minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, pad
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GRUModule,
    GymCollector,
    KLEarlyStopper,
    RewardNormalizer,
    SequenceBatcher,
)
from tests.blocks import categorical_actor, ppo_update
from tests.ranks import run_on_two_ranks
from tests.recurrent.agents import make_agent

UPDATES, EPOCHS, STEPS, SEQ_LEN = 4, 3, 24, 8
ENVS = (4, 3)  # environments of each rank
CASES: dict[str, dict[str, Any]] = {
    "recurrent": {"recurrent": True},
    "stopped, recurrent": {"recurrent": True, "target_kl": 1e-3},
    "normalized": {"normalize_advantage": True},
    "accumulated, recurrent": {"recurrent": True, "accumulate_grads": True},
    "accumulated": {"accumulate_grads": True},
}


def make_networks(recurrent: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    actor, critic, *_ = make_agent("CartPole-v1", GRUModule)
    if not recurrent:
        policy, value = (
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, n)) for n in (2, 1)
        )
        actor, critic = categorical_actor(policy), ValueOperator(value, ["observation"])
    return actor.double(), critic.double()


def collect(rank: int, envs: int, recurrent: bool) -> list[TensorDict]:
    """Return the batches of a rank for all updates, with the initial policy."""
    actor, critic = make_networks(recurrent)
    # the states of a recurrent critic are stored, too
    policy = TensorDictSequential(actor, critic) if recurrent else actor
    collector = GymCollector(
        "CartPole-v1",
        policy,
        num_envs=envs,
        frames_per_batch=envs * STEPS,
        total_frames=envs * STEPS * UPDATES,
        observation_dtype=torch.float64,
        categorical_action_encoding=True,
    )
    collector.set_seed(rank)
    torch.manual_seed(rank)
    batches = [batch.exclude("state_value") for batch in collector]
    for batch in batches:
        batch["next", "reward"] = batch["next", "reward"].double()
    return batches


def make_blocks(case: dict[str, Any]) -> dict[str, Any]:
    actor, critic = make_networks(case.get("recurrent", False))
    target_kl = case.get("target_kl")
    loss = DualClipPPOLoss(
        actor,
        critic,
        dual_clip=3.0,
        entropy_coeff=0.01,
        normalize_advantage=case.get("normalize_advantage", False),
        functional=False,
    )
    return {
        "loss": loss,
        "optimizer": torch.optim.Adam(loss.parameters(), lr=3e-3),
        "advantage": GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        "reward_normalizer": RewardNormalizer(0.99),
        "batcher": SequenceBatcher(SEQ_LEN) if case.get("recurrent") else None,
        "stopper": None if target_kl is None else KLEarlyStopper(target_kl),
    }


def train_on_rank(rank: int) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        blocks = make_blocks(case)
        batches = collect(rank, ENVS[rank], case.get("recurrent", False))
        loss = blocks.pop("loss")
        update = ppo_update(
            loss,
            minibatch_size=32,
            epochs=EPOCHS,
            shuffle=False,
            max_grad_norm=0.3,
            accumulate_grads=case.get("accumulate_grads", False),
            **blocks,
        )
        statistics = [update(batch) for batch in batches]
        parameters = nn.utils.parameters_to_vector(loss.parameters()).detach()
        found[name] = {"parameters": parameters, "statistics": statistics}
    return found


def unions(parts: list[list[Any]]) -> Iterator[Any]:
    """Yield the unions of the ranks' minibatches."""
    for minibatches in zip(*parts, strict=True):
        if minibatches[0].ndim == 2:
            longest = max(x.shape[1] for x in minibatches)
            minibatches = [pad(x, [0, 0, 0, longest - x.shape[1]]) for x in minibatches]
        yield torch.cat(list(minibatches))


def shares(count: int, size: int, most: int) -> list[int]:
    """Return the sizes of a rank's minibatches: 32 and a rest, or even if others have more."""
    own = [min(size, count - start) for start in range(0, count, size)]
    if len(own) < most:
        own = [count // most + (i < count % most) for i in range(most)]
    return own


def train_in_one_process(case: dict[str, Any]) -> dict[str, Any]:
    """Train with a loop written out, on the union."""
    recurrent = case.get("recurrent", False)
    collected = [collect(rank, envs, recurrent) for rank, envs in enumerate(ENVS)]
    blocks = make_blocks(case)
    loss, optimizer, stopper = (blocks[name] for name in ("loss", "optimizer", "stopper"))
    statistics = []
    for batches in zip(*collected, strict=True):
        for rank, batch in enumerate(batches):
            batch["collector", "traj_ids"] += 1_000 * rank
        whole = blocks["advantage"](blocks["reward_normalizer"](torch.cat(list(batches))))
        of_ranks = whole.split(list(ENVS))
        ended = whole["next", "done"].sum().item()
        if recurrent:
            sequences = [blocks["batcher"](part) for part in of_ranks]
            most = max(-(-x.numel() // 32) for x in of_ranks)
            most = min(most, *map(len, sequences))
            # an advantage that the loss normalizes is normalized over sequences of any length
            parts = [list(blocks["batcher"].minibatches(x, most, shuffle=False)) for x in sequences]
        else:
            frames = [part.reshape(-1) for part in of_ranks]
            most = max(-(-len(x) // 32) for x in frames)
            parts = [list(x.split(shares(len(x), 32, most))) for x in frames]
        kls, weights, stopped = [], [], False
        for _ in range(EPOCHS):
            for minibatch in unions(parts):
                losses = loss(minibatch)
                valid = minibatch.get(("collector", "mask"), None)
                weights.append(float(minibatch.numel() if valid is None else valid.sum()))
                kls.append(losses["kl"].item())
                stopped = stopper is not None and stopper.update(losses["kl"])
                if stopped:
                    break
                total = sum(losses[x] for x in ("loss_objective", "loss_critic", "loss_entropy"))
                if case.get("accumulate_grads"):
                    total = total * weights[-1] / whole.numel()
                total.backward()
                if not case.get("accumulate_grads"):
                    step(loss, optimizer)
            if case.get("accumulate_grads"):
                step(loss, optimizer)
            if stopped:
                break
        if stopper is not None:
            stopper.reset()
        kl = sum(k * w for k, w in zip(kls, weights, strict=True)) / sum(weights)
        statistics.append({"kl": kl, "episodes": ended, "frames": whole.numel()})
    parameters = nn.utils.parameters_to_vector(loss.parameters()).detach()
    return {"parameters": parameters, "statistics": statistics}


def step(loss: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(loss.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two_ranks(train_on_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_reach_the_parameters_of_one_process(results: list[dict[str, Any]], name: str):
    case = CASES[name]
    expected = train_in_one_process(case)
    start = nn.utils.parameters_to_vector(make_blocks(case)["loss"].parameters())
    assert (expected["parameters"] - start).abs().max() > 3e-3
    for found in results:
        torch.testing.assert_close(
            found[name]["parameters"], expected["parameters"], rtol=1e-10, atol=1e-10
        )
        for own, one in zip(found[name]["statistics"], expected["statistics"], strict=True):
            assert own["kl"] == pytest.approx(one["kl"], rel=1e-7, abs=1e-12)
            assert own["episodes"] == one["episodes"]
            assert own["frames"] == one["frames"]
    stops = {row["stopped"] for row in results[0][name]["statistics"]}
    assert (1.0 in stops) == ("target_kl" in case)


def test_all_ranks_report_the_same(results: list[dict[str, Any]]):
    own = ("seconds_collecting", "seconds_updating", "frames_per_second")
    for name in CASES:
        rows = [
            [{k: str(v) for k, v in x.items() if k not in own} for x in found[name]["statistics"]]
            for found in results
        ]
        assert all(row == rows[0] for row in rows)
        assert {"episode_return", "episode_length", "kl"} <= rows[0][-1].keys()
        assert len({tuple(row) for row in rows[0]}) == 1
