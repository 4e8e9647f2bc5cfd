"""The findings of diagnose in runs with a fault, in healthy runs, and in rows made by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn
from torchrl.record.loggers import CSVLogger

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    RewardNormalizer,
    diagnose,
)
from ppokit.networks import actor_critic
from tests.blocks import ppo_update
from tests.marks import slow

History = list[dict[str, float]]


def train(
    env: str = "CartPole-v1",
    *,
    updates: int = 20,
    gamma: float = 0.98,
    lr: float = 1e-3,
    critic_lr: float | None = None,
    annealed: bool = False,
    entropy_coeff: float = 1e-3,
    normalize_advantage: bool = True,
    scale_rewards: bool = True,
    reward_factor: float = 1.0,
    dropout: float = 0.0,
    target_kl: float | None = 0.05,
    critic_loss_clip: float | None = None,
    nonfinite: bool = False,
    epochs: int = 4,
    seed: int = 0,
) -> History:
    """Return the statistics of a run."""
    torch.manual_seed(seed)

    def make_env() -> gym.Env:
        return gym.wrappers.TransformReward(gym.make(env), lambda r: float(r) * reward_factor)

    actor, critic = actor_critic(env, squash=True)
    actor.module[0][0].module.insert(3, nn.Dropout(dropout))
    actor.register_buffer("policy_version", torch.tensor(0))
    loss = DualClipPPOLoss(
        actor,
        critic,
        entropy_coeff=entropy_coeff,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=normalize_advantage,
        critic_loss_clip=critic_loss_clip,
    )
    rates = {actor: lr, critic: lr if critic_lr is None else critic_lr}
    groups = [{"params": network.parameters(), "lr": rate} for network, rate in rates.items()]
    optimizer = torch.optim.Adam(groups, fused=True)
    schedule = InterpSchedule([(0, lr), (512 * updates, 0.0)])
    update = ppo_update(
        loss,
        optimizer,
        stopper=None if target_kl is None else KLEarlyStopper(target_kl),
        max_grad_norm=0.5,
        nonfinite="skip",
        advantage=GAE(gamma=gamma, lmbda=0.95, value_network=critic),
        reward_normalizer=RewardNormalizer(gamma) if scale_rewards else None,
        scheduler=ParameterScheduler({"lr": (optimizer, schedule)}) if annealed else None,
        epochs=epochs,
        minibatch_size=128,
        seed=seed,
    )
    history = []
    options: Any = {"frames_per_batch": 512, "num_envs": 8, "categorical_action_encoding": True}
    with GymCollector(make_env, actor, total_frames=-1, **options) as collector:
        collector.set_seed(seed)
        for batch in collector:
            if nonfinite:
                batch["action_log_prob"][0, 0] = math.nan
            history.append(update(batch))
            if len(history) == updates:
                return history
    raise AssertionError


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "learning rate times 30": ("kl_stops_in_first_epoch", {"lr": 0.03, "target_kl": 0.02}),
    "learning rate times 30, no KL stop": (
        "policy_moves_too_far",
        {"env": "Pendulum-v1", "gamma": 0.9, "lr": 0.03, "target_kl": None, "epochs": 10},
    ),
    "learning rate times 1,000, no KL stop": ("entropy_collapsed", {"lr": 1.0, "target_kl": None}),
    "learning rate over 10,000": ("policy_does_not_move", {"lr": 1e-7}),
    "KL stop a thousand times too early": ("kl_stops_in_first_epoch", {"target_kl": 5e-5}),
    "no advantage normalization": (
        "advantages_not_normalized",
        {"normalize_advantage": False, "scale_rewards": False},
    ),
    "reward times 10,000": (
        "value_targets_are_large",
        {"reward_factor": 1e4, "scale_rewards": False},
    ),
    "a clamp below the returns": (
        "critic_clamped",
        {"critic_loss_clip": 1.0, "reward_factor": 100.0, "scale_rewards": False},
    ),
    "a critic that does not learn": ("critic_explains_nothing", {"critic_lr": 0.0}),
    "entropy coefficient times 1,000": ("entropy_bonus_dominates", {"entropy_coeff": 1.0}),
    "dropout in the actor": ("actions_scored_differently", {"dropout": 0.3}),
    "numbers that are not finite": ("not_finite", {"nonfinite": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str):
    name, options = FAULTS[fault]
    findings = diagnose(train(**options), last=10)
    assert name in [finding.name for finding in findings], [str(x) for x in findings]


def test_the_how_to_describes_all_findings():
    page = Path(__file__).parents[1] / "docs" / "howto" / "reading_a_run.md"
    _, table = page.read_text().split("## Findings", 1)
    told = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert told == {name for name, _ in FAULTS.values()}


HEALTHY: dict[str, dict[str, Any]] = {
    "CartPole": {"updates": 30},
    "CartPole, annealed, no stop": {"annealed": True, "target_kl": None, "seed": 1, "updates": 30},
    "Pendulum": {"env": "Pendulum-v1", "gamma": 0.9, "updates": 20, "epochs": 10},
}


@pytest.mark.parametrize("run", ["CartPole", *map(slow, [*HEALTHY][1:])])
def test_nothing_is_found_in_a_healthy_run(run: str):
    history = train(**HEALTHY[run])
    returns = [row["episode_return"] for row in history if row["episodes"]]
    assert sum(returns[-5:]) > sum(returns[:5])  # it learns
    for end in range(5, len(history) + 1, 5):  # and at no time
        assert [str(x) for x in diagnose(history[:end])] == []


def found(rows: Any, **options: Any) -> list[str]:
    return [finding.name for finding in diagnose(rows, **options)]


WELL: dict[str, Any] = {
    "frames": 100.0,
    "kl": 0.01,
    "entropy": 0.6,
    "loss_entropy": -0.006,
    "clip_fraction": 0.1,
}
STOPPED = WELL | {"stopped": 1.0, "epochs": 1.0}
STILL = {"kl": 0.0, "entropy": 0.0, "loss_entropy": 0.0, "clip_fraction": 0.0}
HEADS = WELL | {
    "entropy": -1.0,
    "composite_entropy/gear": 1.0,
    "composite_entropy/steer": -2.0,
    "loss_entropy": -0.01,
}
SKIPPED = WELL | {"skipped": 3.0}
EVALUATED = {"frames": 0.0, "eval_return": 1.0}
NOTHING = WELL | {"steps": 0.0, "minibatches": 1.0, "stopped": 1.0, "grad_norm": math.nan}

ROWS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "only the last updates": ([STOPPED] * 20 + [WELL] * 20, []),
    "too few updates": ([STOPPED] * 4, []),
    "evaluations are no updates": ([STOPPED, EVALUATED] * 4, []),
    "evaluations between": ([STOPPED, EVALUATED] * 10, ["kl_stops_in_first_epoch"]),
    "a large entropy": ([WELL | {"entropy": 24.0, "loss_entropy": -0.24}] * 30, []),
    "a negative entropy": (
        [WELL | {"entropy": -3.0, "loss_entropy": 0.9}] * 30,
        ["entropy_bonus_dominates"],
    ),
    "warm-up": ([WELL | {"kl": 0.0, "lr/a": 1e-7 * n, "lr/b": 0.0} for n in range(12)], []),
    "annealed to 0": ([WELL | {"lr": 1e-3}] * 20 + [WELL | {"kl": 0.0, "lr": 1e-6}] * 20, []),
    "no movement": ([WELL | {"kl": 0.0, "lr/a": 1e-3}] * 20, ["policy_does_not_move"]),
    "collapsed": ([WELL] * 10 + [WELL | STILL] * 20, ["entropy_collapsed"]),
    "a density": ([WELL | {"entropy": 8.0 - 0.02 * n} for n in range(400)], []),
    "a clip of 0": ([WELL | {"clip_fraction": 0.9, "kl": 1e-5}] * 20, []),
    "far ratios": ([WELL | {"clip_fraction": 0.9}] * 20, ["policy_moves_too_far"]),
    "stop after a whole epoch": ([STOPPED | {"minibatches": 8.0, "steps": 8.0}] * 20, []),
    "stop within an epoch": (
        [STOPPED | {"minibatches": 8.0, "steps": 3.0}] * 20,
        ["kl_stops_in_first_epoch"],
    ),
    "healthy heads": ([HEADS] * 30, []),
    "one head collapsed": (
        [HEADS] * 10 + [HEADS | {"composite_entropy/gear": 0.0003}] * 20,
        ["entropy_collapsed"],
    ),
    "first steps in float16": ([SKIPPED] + [WELL] * 10, []),
    "later skipped steps": ([SKIPPED] + [WELL] * 9 + [SKIPPED], ["not_finite"]),
    "one odd row": ([WELL] * 25 + [WELL | {"kl": 9.0, "loss_critic": 1e9}], []),
    "not finite": ([WELL, WELL | {"kl": math.nan}] * 15, ["not_finite"]),
    "infinite": ([WELL, WELL | {"loss_critic": math.inf}] * 15, ["not_finite"]),
    "the mean of no step": ([NOTHING] * 30, []),
    "not finite with steps": ([NOTHING | {"steps": 1.0}] * 30, ["not_finite"]),
    "no numbers": (
        [WELL | {"kl": 0.0, "phase": "train", "entropy": None} for _ in range(20)],
        ["policy_does_not_move"],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_findings_in_rows_by_hand(name: str):
    rows, expected = ROWS[name]
    assert found(iter(rows)) == expected


def test_a_finding_has_meaning_advice_and_source():
    (finding,) = diagnose([{"frames": 100.0, "stopped": 1.0, "epochs": 1.0}] * 6)
    assert "6 of the last 6 updates" in finding.meaning
    assert "learning rate" in finding.advice
    assert "Dossa" in finding.source
    for part in (finding.name, finding.meaning, finding.advice, finding.source):
        assert part in str(finding)


def test_a_log_is_read(tmp_path: Path):
    logger = CSVLogger("run", log_dir=str(tmp_path))
    for number in range(8):
        logger.log_scalar("first_kl", 0.5, step=100 * number)
    assert found(tmp_path) == ["actions_scored_differently"]


def test_bad_input_raises():
    bad: Any = [
        ([WELL], 3, ValueError, "at least 5, got 3"),
        ({"frames": 1.0}, 20, TypeError, "dictionaries that PPOUpdate returned"),
    ]
    for rows, last, error, message in bad:
        with pytest.raises(error, match=message):
            diagnose(rows, last=last)
