"""Errors of torch that are explained, and errors of other code, which pass unchanged."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    KLEarlyStopper,
    ObservationNormalizer,
    evaluate,
)
from ppokit.networks import actor_critic


def test_a_critic_that_does_not_say_what_it_reads():
    actor, critic = actor_critic("CartPole-v1")[0], cast("Any", nn.Linear(4, 1))
    with pytest.raises(TypeError, match=r"critic is a Linear, .*ValueOperator"):
        DualClipPPOLoss(actor, critic)
    with pytest.raises(TypeError, match=r"critic is a Linear, .*ValueOperator"):
        GAE(gamma=0.9, lmbda=0.9, value_network=critic)


class Failing(nn.Module):
    """A layer whose own code fails inside of torch."""

    def __init__(self, fail: Any) -> None:
        super().__init__()
        self.fail, self.layer = fail, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fail()
        return self.layer(x)


def rank() -> None:
    torch.distributed.get_rank()


def load() -> None:
    nn.Linear(2, 2).load_state_dict({})


def backward() -> None:
    torch.ones(()).backward()


def not_there() -> None:
    nn.Module()(torch.ones(2))


@pytest.mark.parametrize("fail", [rank, load, backward, not_there], ids=lambda x: x.__name__)
def test_errors_of_a_networks_own_code_pass_unchanged(fail: Any):
    with pytest.raises(Exception) as plain:  # noqa: PT011  # any
        fail()
    network = Failing(fail)
    policy: Any = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    loss = DualClipPPOLoss(policy, ValueOperator(nn.Linear(4, 1), in_keys=["observation"]))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=ValueOperator(network, in_keys=["observation"]))
    actor, critic = actor_critic("CartPole-v1")
    batch = GymCollector("CartPole-v1", actor, frames_per_batch=8).rollout()
    minibatch = GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch.clone()).reshape(-1)
    for call in (
        lambda: GymCollector("CartPole-v1", policy, frames_per_batch=8).rollout(),
        lambda: loss(minibatch),
        lambda: gae(batch),
    ):
        with pytest.raises(type(plain.value)) as error:
            call()
        assert str(error.value) == str(plain.value)


def test_the_advice_on_dtypes_is_given_for_dtypes_alone():
    actor, critic = actor_critic("CartPole-v1")
    assert isinstance(actor, ProbabilisticTensorDictSequential)
    loss = DualClipPPOLoss(actor, critic)
    batch = GymCollector("CartPole-v1", actor, frames_per_batch=8).rollout()
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch).reshape(-1)
    batch["observation"] = torch.zeros(8, 5)
    with pytest.raises(ValueError, match=r"'observation' \[8, 5\].*layer takes 4") as error:
        loss(batch)
    assert "dtype." not in str(error.value)


ACTOR, CRITIC = actor_critic("CartPole-v1")
BOX, CHOICE = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
SWAPPED: dict[str, tuple[Any, type[Exception], str]] = {
    "actor and critic": (
        *(lambda: DualClipPPOLoss(CRITIC, ACTOR), TypeError),  # pyright: ignore
        r"a policy with get_dist\(\).*ValueOperator.*\(actor, critic\)",
    ),
    "policy and environment": (
        *(lambda: evaluate(ACTOR, "CartPole-v1"), TypeError, "make_env must be the id of"),
    ),
    "a negative size": (lambda: ObservationNormalizer(-1), ValueError, r"such as \(4,\); got -1"),
    "a space as shape": (
        *(lambda: ObservationNormalizer(BOX), ValueError),  # pyright: ignore
        r"such as \(4,\); got Box",
    ),
    "a loss as limit": (
        *(lambda: KLEarlyStopper(CRITIC), ValueError),  # pyright: ignore
        "target_kl must be positive, got a ValueOperator",
    ),
    "spaces apart": (
        *(lambda: actor_critic(BOX, CHOICE), TypeError),  # pyright: ignore
        r"as a pair: actor_critic\(\(observations, actions\)\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), SWAPPED.values(), ids=SWAPPED.keys())
def test_swapped_arguments_are_named(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


def test_one_key_need_not_be_a_list():
    actor, critic = actor_critic("CartPole-v1", in_keys="observation")
    assert actor.in_keys == critic.in_keys == ["observation"]


class WorldModel(gym.Env):
    """An environment whose step is a network that fails."""

    observation_space, action_space = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        return nn.Linear(3, 1)(torch.zeros(1, 2))


def test_errors_of_an_environments_step_pass_unchanged():
    policy, _ = actor_critic("CartPole-v1")
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        GymCollector(WorldModel, policy, frames_per_batch=8).rollout()


class FailsInReset(WorldModel):
    """An environment whose own code fails in ``reset``."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        return np.zeros(len(seed), np.float32), {}


def test_errors_of_an_environments_reset_pass_unchanged():
    policy, _ = actor_critic("CartPole-v1")
    with pytest.raises(TypeError, match=r"^object of type '\w+' has no len\(\)"):
        GymCollector(FailsInReset, policy, frames_per_batch=8)
    env = WorldModel()
    collector = GymCollector(lambda: env, policy, frames_per_batch=8)
    env.reset = FailsInReset.reset.__get__(env)
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)"):
        collector.set_seed(0)
