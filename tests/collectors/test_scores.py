"""The log-probability of an action is that of the action as it is stored."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from ppokit import DualClipPPOLoss, GymCollector, TensorActor
from ppokit.networks import actor_critic


class Still(gym.Env):
    """Observes 0, for episodes of 50 steps."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, low: float, high: float) -> None:
        self.action_space = spaces.Box(low, high, (2,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.zeros(1, np.float32), 1.0, False, self.time == 50, {}


def policy_at(mean: float, low: float, high: float, scale: float = 0.6) -> Any:
    """Return a tanh-normal policy with these means before the tanh, and a critic."""
    torch.manual_seed(0)
    actor, critic = actor_critic(Still(low, high), squash=True, log_scale=math.log(scale))
    layers: Any = [x for x in actor.modules() if isinstance(x, nn.Linear)]
    with torch.no_grad():
        layers[-1].bias.fill_(mean)
    return actor, critic


def score(action: np.ndarray, mean: float, low: float, high: float, scale: float = 0.6) -> float:
    """Return the log-density of a stored action, one number after the other in float64."""
    total, middle, half = 0.0, (low + high) / 2, (high - low) / 2
    edge = float(1 - np.float32(1e-6))
    for a in action.tolist():
        inner = min(max((a - middle) / half, -edge), edge)
        x = math.atanh(inner)
        total += -0.5 * ((x - mean) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)
        total -= math.log(half) + math.log1p(-inner * inner)
    return total


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 4.0), (1000.0, 1001.0)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 4.0, -6.0, 8.0, 12.0])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_first_kl_of_a_tanh_normal_is_0(mean: float, bounds: tuple[float, float], compiled):
    actor, critic = policy_at(mean, *bounds)
    graph: Any = {"compile_policy": {"backend": "aot_eager"}} if compiled else {}
    collector = GymCollector(lambda: Still(*bounds), actor, frames_per_batch=128, **graph)
    batch = collector.rollout()
    batch["advantage"] = torch.randn(*batch.shape, 1)
    batch["value_target"] = torch.zeros(*batch.shape, 1)
    losses = DualClipPPOLoss(actor, critic, entropy_bonus=False)(batch.reshape(-1))
    assert losses["kl"].abs() < 1e-6
    assert losses["max_ratio"].item() == pytest.approx(1, abs=1e-3)
    expected = [score(a, mean, *bounds) for a in batch["action"].reshape(-1, 2).numpy()]
    found = batch["action_log_prob"].flatten().double()
    # float32 has 7 digits: of a latent of 7 standard deviations some 1e-4 nats
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-4, atol=2e-3)
    low, high = bounds
    assert batch["action"].min() >= low
    assert batch["action"].max() <= high


@pytest.mark.parametrize("mean", [0.0, 12.0])
def test_a_tensor_actor_scores_the_stored_action(mean: float):
    actor, _ = policy_at(mean, -1.0, 1.0)
    data = GymCollector(lambda: Still(-1, 1), actor, frames_per_batch=8).rollout().reshape(-1)
    found = TensorActor(actor)(data.select("observation"))
    expected = [score(a, mean, -1.0, 1.0) for a in found["action"].numpy()]
    torch.testing.assert_close(
        found["action_log_prob"], torch.tensor(expected), rtol=1e-4, atol=2e-3
    )
