"""The log-probability of an action is that of the action as it is stored."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictSequential, set_composite_lp_aggregate
from torch import nn
from torchrl.modules import GRUModule, ProbabilisticActor, TanhNormal

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


class StillDict(Still):
    """The same with a choice beside the action."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(low, high)
        self.action_space = spaces.Dict(steer=self.action_space, gear=spaces.Discrete(3))


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("mean", [0.0, 6.0, -8.0, 12.0])
def test_the_first_kl_of_a_dict_with_a_tanh_normal_is_0(mean: float, summed: bool):
    torch.manual_seed(0)
    with set_composite_lp_aggregate(summed):
        actor, critic = actor_critic(StillDict(-1, 1), squash=True, log_scale=math.log(0.6))
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if name.endswith("bias") and parameter.shape == (2,):
                    parameter.fill_(mean)
        batch = GymCollector(lambda: StillDict(-1, 1), actor, frames_per_batch=128).rollout()
        batch["advantage"] = torch.randn(*batch.shape, 1)
        batch["value_target"] = torch.zeros(*batch.shape, 1)
        loss = DualClipPPOLoss(actor, critic, entropy_bonus=False)
        assert loss(batch.reshape(-1))["kl"].abs() < 1e-6
    expected = [score(a, mean, -1, 1) for a in batch["steer"].reshape(-1, 2).numpy()]
    if summed:
        logits = batch["params", "gear", "logits"].reshape(-1, 3).double().log_softmax(-1)
        chosen = logits.gather(-1, batch["gear"].reshape(-1, 1)).squeeze(-1)
        found = batch["sample_log_prob"].flatten().double() - chosen
    else:
        found = batch["steer_log_prob"].flatten().double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-4, atol=2e-3)


class SubclassOfTanhNormal(TanhNormal):
    pass


@pytest.mark.parametrize("how", ["hook", "partial", "subclass", "recurrent"])
@pytest.mark.parametrize("mean", [0.0, 8.0, -12.0])
def test_a_tanh_normal_that_is_not_called_on_tensors_scores_the_stored_action(
    mean: float, how: str
):
    actor, _ = policy_at(mean, -1.0, 1.0)
    head = actor.module[-1]
    if how == "hook":
        actor.register_forward_hook(lambda *_: None)
    elif how == "partial":
        head.distribution_class = partial(TanhNormal, low=-1.0)
    elif how == "subclass":
        head.distribution_class = SubclassOfTanhNormal
    else:
        gru = GRUModule(input_size=1, hidden_size=3, in_key="observation", out_key="memory")
        actor = ProbabilisticActor(
            TensorDictSequential(gru, *list(actor.module)[:-1]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            return_log_prob=True,
        )
    batch = GymCollector(lambda: Still(-1, 1), actor, frames_per_batch=64).rollout()
    expected = [score(a, mean, -1, 1) for a in batch["action"].reshape(-1, 2).numpy()]
    found = batch["action_log_prob"].flatten().double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("mean", [0.0, 12.0])
def test_a_tensor_actor_scores_the_stored_action(mean: float):
    actor, _ = policy_at(mean, -1.0, 1.0)
    data = GymCollector(lambda: Still(-1, 1), actor, frames_per_batch=8).rollout().reshape(-1)
    found = TensorActor(actor)(data.select("observation"))
    expected = [score(a, mean, -1.0, 1.0) for a in found["action"].numpy()]
    torch.testing.assert_close(
        found["action_log_prob"], torch.tensor(expected), rtol=1e-4, atol=2e-3
    )
