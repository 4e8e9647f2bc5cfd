"""The assemblies of rl8, RLlib and AgileRL compute what these systems compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.modules import ValueOperator

from ppokit import DualClipPPOLoss, GymCollector
from tests.blocks import categorical_actor
from tests.tutorial_runs import play

Names = dict[str, Any]


def total_loss(losses: Any) -> Any:
    return sum(losses[name] for name in losses.keys() if name.startswith("loss_"))


def assert_same_loss(loss: Any, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Values and gradients are equal."""
    torch.testing.assert_close(found, expected)
    parameters = list(loss.parameters())
    gradients = (torch.autograd.grad(x, parameters) for x in (found, expected))
    torch.testing.assert_close(*gradients)


# -- rl8 --------------------------------------------------------------------------------

SMALL = ["--num-envs", "8", "--horizon", "8", "--total-frames", "64", "--minibatch-size", "64"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Names:
    """Run the script for one small batch."""
    return play("rl8_vectorized", tmp_path_factory.mktemp("rl8") / "run", *SMALL)


def collect(names: Names) -> Any:
    """Return a batch of the script's environments and policy."""
    collector = Collector(
        names["env"],
        names["policy"],
        frames_per_batch=names["frames_per_batch"],
        total_frames=names["frames_per_batch"],
        auto_register_policy_transforms=False,
    )
    (batch,) = collector
    collector.shutdown()
    return batch


def test_rl8s_environments_move_as_gymnasiums(plain: Names):
    env: Any = CartPoleEnv()
    env.force_mag = 5.0
    rng = np.random.default_rng(0)
    states, actions = rng.uniform(-0.2, 0.2, (50, 4)), rng.integers(2, size=50)
    moved, reward = plain["move_cart"](torch.tensor(states), torch.tensor(2 * actions))
    x, speed, angle, spin = moved.abs().unbind(-1)
    cost = x + speed + spin + angle.sin() + (1 - angle.cos())
    torch.testing.assert_close(reward, -cost.unsqueeze(-1))
    assert (plain["move_cart"](torch.zeros(1, 4), torch.tensor([1]))[0] == 0).all()
    for row, (state, action) in enumerate(zip(states, actions, strict=True)):
        env.reset()
        env.state = state
        env.step(int(action))
        np.testing.assert_allclose(moved[row], env.state, rtol=1e-6)


def test_rl8s_gae_bootstraps_at_the_end_of_a_horizon(plain: Names):
    plain["update"].advantage.average_gae = False
    batch = collect(plain)
    with torch.no_grad():
        plain["update"].advantage(batch)
        value, following = (
            plain["critic"].module(x[:, -1])
            for x in (batch["observation"], batch["next", "observation"])
        )
    expected = batch["next", "reward"][:, -1] + 0.95 * following - value
    torch.testing.assert_close(batch["advantage"][:, -1], expected)


# -- RLlib ------------------------------------------------------------------------------


def rllib_networks(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The example's: a linear layer of 32 that policy and value share."""
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 32, dtype=dtype), ["observation"], ["features"])
    actor = categorical_actor(encoder, nn.Linear(32, 2, dtype=dtype), in_key="features")
    value = ValueOperator(nn.Linear(32, 1, dtype=dtype), in_keys=["features"])
    return actor, TensorDictSequential(encoder, value)


RLLIB: dict[str, Any] = {
    "clip_epsilon": 0.3,
    "kl_coeff": 0.2,
    "entropy_coeff": 0.01,
    "critic_coeff": 0.01,
    "critic_loss_clip": 10.0,
    "loss_critic_type": "l2",
}


def test_the_loss_is_rllibs():
    """Term by term as in RLlib's ``PPOTorchLearner.compute_loss_for_module``."""
    actor, critic = rllib_networks(torch.float64)
    loss = DualClipPPOLoss(actor, critic, **RLLIB)
    generator = torch.Generator().manual_seed(1)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    batch = TensorDict({"observation": normal(200, 4)}, [200])
    with torch.no_grad():
        actor(batch)
        for parameter in loss.parameters():  # as after some updates
            parameter += 0.3 * normal(parameter.shape)
    batch["advantage"], batch["value_target"] = normal(200, 1), 4 * normal(200, 1)

    inputs = batch.select("observation")
    before = torch.distributions.Categorical(logits=batch["logits"])
    now = actor.get_dist(inputs.clone())
    ratio = (now.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"].squeeze(-1)
    surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(0.7, 1.3))
    error = (critic(inputs.clone())["state_value"].squeeze(-1) - target) ** 2
    kl = torch.distributions.kl_divergence(before, now)
    expected = (-surrogate + 0.01 * error.clamp(0, 10.0) - 0.01 * now.entropy()).mean()
    expected = expected + 0.2 * kl.mean()
    assert 0.1 < (error > 10).double().mean() < 0.9
    assert 0.05 < ((ratio - 1).abs() > 0.3).double().mean() < 0.95
    assert_same_loss(loss, total_loss(loss(batch)), expected)


# -- AgileRL ----------------------------------------------------------------------------


def test_the_loss_is_agilerls(tmp_path: Path):
    """Term by term as in AgileRL's ``PPO._learn_from_rollout_buffer_flat``."""
    options = "--settings", "agilerl", "--env", "CartPole-v1", "--total-frames", "512"
    names = play("agilerl_ppo", tmp_path / "run", *options)
    policy, critic, loss = names["policy"], names["critic"], names["loss"]
    sizes = {"num_envs": 4, "frames_per_batch": 256}
    with GymCollector("CartPole-v1", policy, **sizes) as collector:
        collector.set_seed(3)
        torch.manual_seed(3)
        batch = collector.rollout().reshape(-1)
    with torch.no_grad():
        critic(batch)
        for parameter in loss.parameters():  # as after some updates
            parameter += 0.05 * torch.randn(parameter.shape)
    batch["advantage"] = torch.randn(256, 1)
    batch["value_target"] = batch["state_value"] + 0.3 * torch.randn(256, 1)

    now = policy.get_dist(batch.select("observation"))
    ratio = (now.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"].squeeze(-1)
    surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    old = batch["state_value"].squeeze(-1)
    value = critic(batch.select("observation"))["state_value"].squeeze(-1)
    clipped = old + (value - old).clamp(-0.2, 0.2)
    error = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
    expected = surrogate + 0.5 * error - 0.01 * now.entropy().mean()
    assert 0 < ((ratio - 1).abs() > 0.2).float().mean() < 1
    assert 0 < ((value - old).abs() > 0.2).float().mean() < 1
    assert_same_loss(loss, total_loss(loss(batch)), expected)
