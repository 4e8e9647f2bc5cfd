"""The assemblies of rl8, RLlib and AgileRL compute what these systems compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import DualClipPPOLoss, GymCollector
from tests.tutorial_runs import play

Names = dict[str, Any]
Tutorial = Callable[..., Names]


def total_loss(losses: Any) -> Any:
    return sum(losses[name] for name in losses.keys() if name.startswith("loss_"))


def assert_same_loss(loss: Any, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Values and gradients are equal."""
    torch.testing.assert_close(found, expected)
    parameters = list(loss.parameters())
    gradients = (torch.autograd.grad(x, parameters) for x in (found, expected))
    torch.testing.assert_close(*gradients)


# -- rl8 --------------------------------------------------------------------------------

SMALL = ["--num-envs", "8", "--horizon", "8", "--total-frames", "64"]


@pytest.fixture(scope="module")
def rl8(tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    """Run the script for one small batch."""

    def run(*options: str) -> Names:
        return play("rl8_vectorized", tmp_path_factory.mktemp("rl8") / "run", *SMALL, *options)

    return run


@pytest.fixture(scope="module")
def plain(rl8: Tutorial) -> Names:
    return rl8()


def collect(names: Names, batches: int) -> list[Any]:
    """Return batches of the script's environments and policy."""
    collector = Collector(
        names["env"],
        names["policy"],
        frames_per_batch=names["frames_per_batch"],
        total_frames=batches * names["frames_per_batch"],
        auto_register_policy_transforms=False,
    )
    found = [batch.clone() for batch in collector]
    collector.shutdown()
    return found


@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_rl8s_environments_move_as_gymnasiums(plain: Names, task: str):
    rng = np.random.default_rng(0)
    if task == "cartpole":
        env: Any = CartPoleEnv()
        env.force_mag = 5.0
        states, actions = rng.uniform(-0.2, 0.2, (50, 4)), rng.integers(2, size=50)
        moved, reward = plain["move_cart"](torch.tensor(states), torch.tensor(2 * actions))
        x, speed, angle, spin = moved.abs().unbind(-1)
        cost = x + speed + spin + angle.sin() + (1 - angle.cos())
        torch.testing.assert_close(reward, -cost.unsqueeze(-1))
        assert (plain["move_cart"](torch.zeros(1, 4), torch.tensor([1]))[0] == 0).all()
    else:
        env = PendulumEnv()
        states = rng.uniform([-9.0, -8.0], [9.0, 8.0], (50, 2))
        actions = rng.uniform(-3.0, 3.0, (50, 1))  # beyond the bounds of the torque
        moved, reward = plain["move_pendulum"](torch.tensor(states), torch.tensor(actions))
    for row, (state, action) in enumerate(zip(states, actions, strict=True)):
        env.reset()
        env.state = state
        _, pay, *_ = env.step(int(action) if task == "cartpole" else action)
        np.testing.assert_allclose(moved[row], env.state, rtol=1e-6)
        if task == "pendulum":
            assert reward[row].item() == pytest.approx(float(pay))


@pytest.mark.parametrize("horizons", ["1", "2"])
def test_rl8s_gae_bootstraps_at_the_end_of_a_horizon(rl8: Tutorial, horizons: str):
    names = rl8("--horizons-per-env-reset", horizons)
    names["update"].advantage.average_gae = False
    (batch,) = collect(names, 1)
    with torch.no_grad():
        names["update"].advantage(batch)
        value, following = (
            names["critic"].module(x[:, -1])
            for x in (batch["observation"], batch["next", "observation"])
        )
    expected = batch["next", "reward"][:, -1] + 0.95 * following - value
    torch.testing.assert_close(batch["advantage"][:, -1], expected)


@pytest.mark.parametrize(("kind", "middle"), [("step", 1e-3), ("interp", 5.5e-4)])
def test_rl8s_schedules_count_environments_times_collections(
    rl8: Tutorial, kind: str, middle: float
):
    options = "--lr-schedule", "0:1e-3,16:1e-4", "--lr-schedule-kind", kind
    rows = rl8(*options, "--total-frames", "192")["run"].history
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, middle, 1e-4])


def test_rl8s_recurrent_states_are_reset_after_so_many_sequences(rl8: Tutorial):
    options = "--recurrent", "--seq-len", "2", "--horizons-per-env-reset", "2"
    names = rl8(*options, "--seqs-per-state-reset", "2")
    actor, update = names["actor"], names["update"]
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.uniform_(-1, 1)
    batches = collect(names, 2)
    for batch in batches:
        assert batch["is_init"].squeeze(-1).nonzero()[:, 1].unique().tolist() == [0, 4]
        sequences = update.batcher(update.advantage(batch))
        assert sequences.shape == (8 * 4, 2)
        # The sequences hold the states that the LSTM saw: the policy is that of the collection.
        assert update.step.loss(sequences)["kl"] == pytest.approx(0, abs=1e-9)
    for step, is_remembered in ((4, False), (5, True)):
        frames = batches[1][:, step].select(*actor.in_keys, strict=False).clone()
        frames["is_init"] = torch.zeros(8, 1, dtype=torch.bool)
        with torch.no_grad():
            logits = actor(frames.clone())["logits"]
            for name in ("recurrent_state_h", "recurrent_state_c"):
                frames[name] = torch.ones_like(frames[name])
            assert torch.equal(logits, actor(frames)["logits"]) is not is_remembered
    first, second = collect(rl8(*options, "--seqs-per-state-reset", "-1"), 2)
    assert first["is_init"].sum() == 8
    assert not second["is_init"].any()
    assert second["recurrent_state_h"][:, 0].abs().sum() > 0


# -- RLlib ------------------------------------------------------------------------------


def rllib_networks(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The example's: a linear layer of 32 that policy and value share."""
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 32, dtype=dtype), ["observation"], ["features"])
    head = TensorDictModule(nn.Linear(32, 2, dtype=dtype), ["features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(encoder, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
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


@pytest.fixture(scope="module")
def agilerl(tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    """Run the script for one batch of 512 frames."""

    def run(*options: str) -> Names:
        out = tmp_path_factory.mktemp("agilerl") / "run"
        return play("agilerl_ppo", out, "--total-frames", "512", *options)

    return run


def ids_of(module: Any) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def rollout(names: Names, frames: int = 256, agent: str = "agent") -> Any:
    policy = names[agent].policy
    options: Any = {"num_envs": 4, "frames_per_batch": frames, "categorical_action_encoding": True}
    with GymCollector(names["make_env"], policy, **options) as collector:
        collector.set_seed(3)
        torch.manual_seed(3)
        return collector.rollout()


def test_the_loss_is_agilerls(agilerl: Tutorial):
    """Term by term as in AgileRL's ``PPO._learn_from_rollout_buffer_flat``."""
    names = agilerl("--settings", "agilerl", "--env", "CartPole-v1")
    agent = names["agent"]
    batch = rollout(names).reshape(-1)
    with torch.no_grad():
        agent.critic(batch)
        for parameter in agent.loss.parameters():  # as after some updates
            parameter += 0.05 * torch.randn(parameter.shape)
    batch["advantage"] = torch.randn(256, 1)
    batch["value_target"] = batch["state_value"] + 0.3 * torch.randn(256, 1)

    now = agent.policy.get_dist(batch.select("observation"))
    ratio = (now.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"].squeeze(-1)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    old = batch["state_value"].squeeze(-1)
    value = agent.critic(batch.select("observation"))["state_value"].squeeze(-1)
    clipped = old + (value - old).clamp(-0.2, 0.2)
    critic = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
    expected = policy + 0.5 * critic - 0.01 * now.entropy().mean()
    assert 0 < ((ratio - 1).abs() > 0.2).float().mean() < 1
    assert 0 < ((value - old).abs() > 0.2).float().mean() < 1
    assert_same_loss(agent.loss, total_loss(agent.loss(batch)), expected)


def test_agilerls_masked_actions_are_never_drawn(agilerl: Tutorial):
    names = agilerl("--env", "Taxi-v4")
    batch = rollout(names, 1024)
    mask = batch["action_mask"]
    assert 0.2 < mask.float().mean() < 0.8
    assert mask.gather(-1, batch["action"].unsqueeze(-1)).all()
    dist = names["agent"].policy.get_dist(batch.select("observation", "action_mask"))
    assert dist.probs[~mask].max() < 1e-6
    names["agent"].update.advantage(batch)
    assert all(x.isfinite().all() for x in names["agent"].loss(batch.reshape(-1)).values())
    assert names["run"].history[-1]["score"] < 0  # an evaluation without a time limit ends


def test_agilerls_clones_and_loaded_agents_act_alike_and_learn_apart(agilerl: Tutorial):
    names = agilerl("--encoders", "shared", "--env", "CartPole-v1")
    agent, clone, loaded = (names[name] for name in ("agent", "clone", "loaded"))
    batches = [rollout(names, agent=name) for name in ("agent", "clone", "loaded")]
    assert all(torch.equal(batches[0]["action"], batch["action"]) for batch in batches)
    assert ids_of(clone.policy) & ids_of(clone.critic)  # shared parameters stay shared
    assert not ids_of(clone.loss) & ids_of(agent.loss)
    before = {k: v.clone() for k, v in agent.loss.state_dict().items()}
    state = json.dumps(agent.update.state_dict(), default=str)
    clone.update(batches[1])
    assert all(torch.equal(before[name], x) for name, x in agent.loss.state_dict().items())
    assert json.dumps(agent.update.state_dict(), default=str) == state
    assert not all(torch.equal(before[k], v) for k, v in clone.loss.state_dict().items())
    # A copy learns as the original: optimizer, statistics and order of minibatches included.
    agent.update(batches[0])
    loaded.update(batches[2])
    for other in (clone, loaded):
        then = other.loss.state_dict()
        assert all(torch.equal(x, then[name]) for name, x in agent.loss.state_dict().items())
