"""What diagnose says of runs with a fault put in on purpose, and of healthy ones."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.record.loggers import CSVLogger

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
    diagnose,
)

History = list[dict[str, float]]


class Growing(gym.RewardWrapper):
    """A reward that grows by so much in each step of the run."""

    def __init__(self, env: gym.Env, growth: float) -> None:
        super().__init__(env)
        self.growth, self.factor = growth, 1.0

    def reward(self, reward: Any) -> float:
        self.factor *= self.growth
        return float(reward) * self.factor


def layers(inputs: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Dropout(dropout)]
    last = nn.Linear(64, outputs)
    nn.init.orthogonal_(last.weight, 0.01)
    return nn.Sequential(*hidden, nn.Linear(64, 64), nn.Tanh(), last)


def make_networks(env: gym.Env, dropout: float) -> tuple[ProbabilisticActor, ValueOperator]:
    space: Any = env.action_space
    assert env.observation_space.shape is not None
    size = env.observation_space.shape[0]
    if isinstance(space, gym.spaces.Box):
        network: nn.Module = nn.Sequential(layers(size, 2, dropout), NormalParamExtractor())
        keys, distribution = ["loc", "scale"], TanhNormal
        bounds = {"low": torch.as_tensor(space.low), "high": torch.as_tensor(space.high)}
    else:
        network = layers(size, int(space.n), dropout)
        keys, distribution, bounds = ["logits"], torch.distributions.Categorical, {}
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    actor.register_buffer("policy_version", torch.tensor(0))
    return actor, ValueOperator(layers(size, 1), in_keys=["observation"])


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
    growth: float = 1.0,
    dropout: float = 0.0,
    target_kl: float | None = 0.05,
    critic_loss_clip: float | None = None,
    lag: int = 0,
    nonfinite: bool = False,
    epochs: int = 4,
    seed: int = 0,
) -> History:
    """Return the statistics of a run."""
    torch.manual_seed(seed)

    def make_env() -> gym.Env:
        one = gym.wrappers.TransformReward(gym.make(env), lambda r: float(r) * reward_factor)
        return Growing(one, growth)

    actor, critic = make_networks(gym.make(env), dropout)
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
    schedule = InterpSchedule.linear(lr, 0.0, frames=512 * updates)
    update = PPOUpdate(
        TrainingStep(
            loss,
            optimizer,
            stopper=None if target_kl is None else KLEarlyStopper(target_kl),
            max_grad_norm=0.5,
            nonfinite="skip",
        ),
        advantage=GAE(gamma=gamma, lmbda=0.95, value_network=critic),
        reward_normalizer=RewardNormalizer(gamma) if scale_rewards else None,
        scheduler=ParameterScheduler({"lr": (optimizer, schedule)}) if annealed else None,
        epochs=epochs,
        minibatch_size=128,
        seed=seed,
    )
    history, waiting = [], []
    options: Any = {"frames_per_batch": 512, "num_envs": 8, "categorical_action_encoding": True}
    with GymCollector(make_env, actor, total_frames=-1, **options) as collector:
        collector.set_seed(seed)
        for batch in collector:
            waiting.append(batch)
            if len(waiting) > lag:
                batch = waiting.pop(0)
                if nonfinite:
                    batch["action_log_prob"][0, 0] = math.nan
                history.append(update(batch))
            if len(history) == updates:
                return history
    raise AssertionError


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "learning rate times 100": ("kl_stops_in_first_epoch", {"lr": 0.1}),
    "learning rate times 30, no KL stop": (
        "policy_moves_too_far",
        {"env": "Pendulum-v1", "gamma": 0.9, "lr": 0.03, "target_kl": None},
    ),
    "learning rate times 100, no KL stop": ("entropy_collapsed", {"lr": 0.1, "target_kl": None}),
    "learning rate over 10,000": ("policy_does_not_move", {"lr": 1e-7}),
    "KL stop a thousand times too early": ("kl_stops_in_first_epoch", {"target_kl": 5e-5}),
    "no advantage normalisation": (
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
    "batches four updates old": ("policy_is_old", {"lag": 4}),
    "a reward that grows": ("reward_scale_drifts", {"growth": 1.002, "updates": 30}),
    "numbers that are not finite": ("steps_skipped", {"nonfinite": True}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str):
    name, options = FAULTS[fault]
    findings = diagnose(train(**options), last=10)
    assert name in [finding.name for finding in findings], [str(x) for x in findings]


def test_sequences_that_are_mostly_padding_are_found():
    torch.manual_seed(0)
    actor, critic = make_networks(gym.make("CartPole-v1"), 0.0)
    loss = DualClipPPOLoss(actor, critic)
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-3)),
        advantage=GAE(gamma=0.98, lmbda=0.95, value_network=critic, average_gae=True),
        batcher=SequenceBatcher(64, cut_keys=()),
        epochs=1,
    )
    options: Any = {"frames_per_batch": 512, "num_envs": 8, "categorical_action_encoding": True}
    with GymCollector("CartPole-v1", actor, total_frames=512 * 5, **options) as collector:
        collector.set_seed(0)
        findings = diagnose([update(batch) for batch in collector])
    assert [finding.name for finding in findings] == ["mostly_padding"]


def test_the_how_to_tells_all_findings():
    page = Path(__file__).parents[1] / "docs" / "howto" / "reading_a_run.md"
    _, table = page.read_text().split("## What diagnose finds", 1)
    told = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert told == {name for name, _ in FAULTS.values()} | {"mostly_padding", "not_finite"}


HEALTHY: dict[str, dict[str, Any]] = {
    "CartPole": {"updates": 40},
    "CartPole, annealed, no stop": {"annealed": True, "target_kl": None, "seed": 1, "updates": 40},
    "Pendulum": {"env": "Pendulum-v1", "gamma": 0.9, "updates": 30, "epochs": 10},
}


@pytest.mark.parametrize("run", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(run: str):
    history = train(**HEALTHY[run])
    returns = [row["episode_return"] for row in history if row["episodes"]]
    assert sum(returns[-5:]) > sum(returns[:5])  # it learns
    for end in range(5, len(history) + 1, 5):  # and at no time
        assert [str(x) for x in diagnose(history[:end])] == []


def test_findings_are_told_in_one_paragraph_with_advice_and_source():
    rows = [{"frames": 100.0, "stopped": 1.0, "epochs": 1.0}] * 6
    (finding,) = diagnose(rows)
    assert "6 of the last 6 updates" in finding.meaning
    assert "learning rate" in finding.advice
    assert "Dossa" in finding.source
    for part in (finding.name, finding.meaning, finding.advice, finding.source):
        assert part in str(finding)


def test_only_the_last_updates_count():
    stopped, calm = {"frames": 1.0, "stopped": 1.0, "epochs": 1.0}, {"frames": 1.0, "stopped": 0.0}
    assert diagnose([stopped] * 20 + [calm] * 10, last=10) == []
    assert diagnose([calm] * 20 + [stopped] * 10, last=10)
    assert diagnose([stopped] * 4) == []  # too few to say


WELL = {"frames": 100.0, "kl": 0.01, "entropy": 0.6, "loss_entropy": -0.006, "clip_fraction": 0.1}


@pytest.mark.parametrize("name", ["kl", "entropy", "loss_critic", "loss_objective", "grad_norm"])
def test_what_is_not_finite_is_named_and_nothing_else(name: str):
    for bad in (math.nan, math.inf):
        rows = [WELL | {name: bad if number % 2 else WELL.get(name, 0.01)} for number in range(30)]
        (finding,) = diagnose(rows)
        assert finding.name == "not_finite"
        assert f"{name} was not finite in 10 of the last 20" in finding.meaning


@pytest.mark.parametrize("run", ["stopped before any step", "all steps skipped"])
def test_the_mean_of_nothing_is_not_called_not_finite(run: str):
    stopped = WELL | {"steps": 0.0, "minibatches": 1.0, "stopped": 1.0, "grad_norm": math.nan}
    skipped = WELL | {"steps": 0.0, "skipped": 4.0} | dict.fromkeys(("kl", "grad_norm"), math.nan)
    rows = [stopped if run == "stopped before any step" else skipped] * 30
    assert "not_finite" not in found(rows)
    assert found([row | {"steps": 1.0} for row in rows])[0] == "not_finite"


def found(rows: Any) -> list[str]:
    return [finding.name for finding in diagnose(rows)]


def test_an_entropy_coefficient_is_told_by_itself_and_not_by_the_entropy():
    """The entropy of many actions is large, and that of a density may be anything."""
    large = {"entropy": 24.0, "loss_entropy": -0.24}  # torchrl's coefficient of 0.01
    assert found([WELL | large] * 30) == []
    assert found([WELL | {"entropy": -3.0, "loss_entropy": 0.9}] * 30) == [
        "entropy_bonus_dominates"
    ]


def test_a_learning_rate_that_warms_up_or_ends_at_0_moves_nothing_and_is_no_fault():
    rows = [WELL | {"kl": 0.0, "lr/actor": 1e-7 * n, "lr/critic": 0.0} for n in range(12)]
    assert found(rows) == []
    ending = [WELL | {"lr/actor": 1e-3}] * 20 + [WELL | {"kl": 0.0, "lr/actor": 1e-6}] * 20
    assert found(ending) == []
    assert found([WELL | {"kl": 0.0, "lr/actor": 1e-3}] * 20) == ["policy_does_not_move"]


def test_a_policy_that_collapsed_is_not_said_to_need_a_higher_learning_rate():
    still = {"kl": 0.0, "entropy": 0.0, "loss_entropy": 0.0, "clip_fraction": 0.0}
    assert found([WELL] * 10 + [WELL | still] * 20) == ["entropy_collapsed"]


def test_a_density_may_pass_through_an_entropy_of_0_while_it_learns():
    assert found([WELL | {"entropy": 8.0 - 0.02 * n} for n in range(400)]) == []


def test_ratios_that_a_clip_of_0_clips_are_not_far_away():
    assert found([WELL | {"clip_fraction": 0.9, "kl": 1e-5}] * 20) == []
    assert found([WELL | {"clip_fraction": 0.9}] * 20) == ["policy_moves_too_far"]
    assert found([{"frames": 1.0, "clip_fraction": 0.9}] * 20) == ["policy_moves_too_far"]


def test_a_stop_at_the_end_of_the_first_epoch_has_trained_on_all_of_it():
    stopped = {"stopped": 1.0, "epochs": 1.0, "minibatches": 8.0}
    assert found([WELL | stopped | {"steps": 8.0}] * 20) == []
    assert found([WELL | stopped | {"steps": 3.0}] * 20) == ["kl_stops_in_first_epoch"]


def test_heads_are_looked_at_one_by_one():
    gear, steer = "composite_entropy/gear", "composite_entropy/steer"
    well = WELL | {"entropy": -1.0, gear: 1.0, steer: -2.0, "loss_entropy": -0.01}
    assert found([well] * 30) == []
    (finding,) = diagnose([well] * 10 + [well | {gear: 0.0003}] * 20)
    assert finding.name == "entropy_collapsed"
    assert gear in finding.meaning
    (finding,) = diagnose([well | {steer: -0.1 * n, "loss_entropy": -5.0} for n in range(30)])
    assert finding.name == "entropy_bonus_dominates"
    assert gear in finding.meaning


def test_a_scale_of_each_batch_varies_and_does_not_drift():
    assert found([WELL | {"reward_scale": 1.0 + n % 3} for n in range(90)]) == []
    assert found([WELL | {"reward_scale": 1.03**n} for n in range(90)]) == ["reward_scale_drifts"]


def test_steps_that_float16_skips_while_it_looks_for_its_scale():
    first = WELL | {"skipped": 3.0}
    assert found([first] + [WELL] * 10) == []
    assert found([first] + [WELL] * 9 + [first]) == ["steps_skipped"]


def test_rows_of_evaluations_are_not_counted_as_updates():
    stopped = WELL | {"stopped": 1.0, "epochs": 1.0}
    evaluated = {"frames": 0.0, "eval_return": 1.0}
    assert found([stopped, evaluated] * 10) == ["kl_stops_in_first_epoch"]
    assert found([stopped, evaluated] * 4) == []  # four updates


def test_a_single_odd_row_says_nothing():
    assert found([WELL] * 25 + [WELL | {"kl": 9.0, "loss_critic": 1e9}]) == []


def test_rows_of_no_number_of_frames():
    with pytest.raises(ValueError, match="Row 1 is of nan frames"):
        diagnose([WELL, WELL | {"frames": math.nan}])


def test_rows_may_come_one_by_one_and_hold_what_is_no_number():
    rows = [WELL | {"kl": 0.0, "phase": "train", "entropy": None} for _ in range(20)]
    assert found(iter(rows)) == ["policy_does_not_move"]
    assert found([WELL | {"reward_scale": 0.0}] * 90) == []


def test_a_log_is_read_as_well(tmp_path: Path):
    logger = CSVLogger("run", log_dir=str(tmp_path))
    for number in range(8):
        logger.log_scalar("first_kl", 0.5, step=100 * number)
    (finding,) = diagnose(tmp_path)
    assert finding.name == "actions_scored_differently"


def test_bad_input():
    with pytest.raises(ValueError, match="at least 5, got 3"):
        diagnose([{"frames": 1.0}], last=3)
    for last in (10.5, None):
        with pytest.raises(ValueError, match="last must be a number of updates"):
            diagnose([WELL], last=last)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="got NoneType"):
        diagnose(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="dictionaries that PPOUpdate returned"):
        diagnose({"frames": 1.0})
