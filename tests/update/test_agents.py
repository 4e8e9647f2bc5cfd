"""Updates of several agents: the blocks, torchrl's own losses and GAE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.multiagent import IPPOLoss, MAPPOLoss
from torchrl.objectives.value import MultiAgentGAE

from ppokit import GAE, DualClipPPOLoss, KLEarlyStopper, PPOUpdate, RewardNormalizer
from tests.blocks import ppo_update
from tests.objectives.test_agents import KEYS, make_networks
from tests.update.parts import parameters_of

B, T, A = 4, 16, 3
REWARD = ("next", "agents", "reward")


def collect(actor: Any, *, team: bool = False) -> TensorDict:
    """Return a batch as torchrl's multi-agent environments write it: done flags at the root."""
    torch.manual_seed(0)
    observation = torch.randn(B, T + 1, A, 4)
    terminated, truncated = torch.rand(2, B, T, 1) < 0.1
    done = terminated | truncated
    following = torch.where(done.unsqueeze(-1), torch.randn(B, T, A, 4), observation[:, 1:])
    group = TensorDict({"observation": observation[:, :-1]}, [B, T, A])
    with torch.no_grad():
        batch = actor(TensorDict({"agents": group}, [B, T], names=[None, "time"]))
    after = TensorDict({"observation": following}, [B, T, A])
    flags = {"done": done, "terminated": terminated, "truncated": truncated}
    batch["next"] = TensorDict({"agents": after, **flags}, [B, T])
    batch[("next", "reward") if team else REWARD] = torch.randn(B, T, *[A] * (not team), 1)
    return batch


def make_update(kind: Any, gae: Any = GAE, **options: Any) -> PPOUpdate:
    actor, critic = make_networks("categorical", A)
    team, of_loss = (options.pop(name, None) for name in ("team", "of_loss"))
    loss = kind(actor, critic, functional=False, **(of_loss or {}))
    loss.set_keys(**KEYS)
    advantage = gae(
        gamma=0.97,
        lmbda=0.9,
        value_network=critic,
        **({"deactivate_vmap": True} if gae is MultiAgentGAE else {}),
    )
    advantage.set_keys(**{name: KEYS[name] for name in ("advantage", "value_target", "value")})
    if not team:
        advantage.set_keys(reward=("agents", "reward"))
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    defaults: dict[str, Any] = {"epochs": 2, "minibatch_size": 16, "seed": 0}
    return ppo_update(loss, optimizer, advantage=advantage, **(defaults | options))


def assert_episodes(statistics: dict[str, float], batch: TensorDict, reward: torch.Tensor) -> None:
    """Raise unless the statistics are those of the episodes, summed one number at a time."""
    returns, lengths = [], []
    for row in range(B):
        total = length = 0.0
        for step in range(T):
            total += reward[row, step].mean().item()
            length += 1
            if batch["next", "done"][row, step]:
                returns.append(total)
                lengths.append(length)
                total = length = 0.0
    count = len(returns)
    assert statistics["episodes"] == count
    assert statistics["episode_return"] == pytest.approx(sum(returns) / count, rel=1e-5, abs=1e-5)
    assert statistics["episode_length"] == pytest.approx(sum(lengths) / count)


LOSSES = [(DualClipPPOLoss, GAE), (DualClipPPOLoss, MultiAgentGAE), (ClipPPOLoss, GAE)]
LOSSES += [(IPPOLoss, GAE), (MAPPOLoss, MultiAgentGAE)]


@pytest.mark.parametrize("team", [False, True])
@pytest.mark.parametrize(("kind", "gae"), LOSSES)
def test_statistics_and_parameters(kind: Any, gae: Any, team: bool):
    kl_key = "kl" if kind is DualClipPPOLoss else "kl_approx"
    update = make_update(kind, gae, stopper=KLEarlyStopper(1.0, kl_key=kl_key), team=team)
    batch = collect(update.step.loss.actor_network, team=team)
    reward = batch["next", "reward"] if team else batch[REWARD]
    update.validate(batch.clone())
    before = parameters_of(update.step.loss)
    statistics = update(batch)
    assert all(torch.tensor(value).isfinite() for value in statistics.values()), statistics
    assert_episodes(statistics, batch, reward)
    assert (statistics["minibatches"], statistics["frames"]) == (8, B * T)
    assert not torch.equal(before, parameters_of(update.step.loss))


def test_the_parameters_are_those_of_mappo():
    of_loss = {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-2,)}
    results = []
    for kind, gae, options in (
        (MAPPOLoss, MultiAgentGAE, {}),
        (MAPPOLoss, GAE, {}),
        (DualClipPPOLoss, GAE, {"of_loss": of_loss}),
    ):
        update = make_update(kind, gae, **options)
        update(collect(update.step.loss.actor_network))
        results.append(parameters_of(update.step.loss))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-4)


def test_the_raw_reward_of_the_agents_makes_the_return():
    normalizer = RewardNormalizer(0.97, reward_key=REWARD, traj_key=None)
    update, other = make_update(DualClipPPOLoss, reward_normalizer=normalizer), None
    batch = collect(update.step.loss.actor_network)
    raw = 10 * batch[REWARD].clone()
    batch[REWARD] = raw.clone()
    statistics = update(batch)
    assert not torch.allclose(batch[REWARD], raw)
    assert_episodes(statistics, batch, raw)
    other = make_update(DualClipPPOLoss)(batch)  # a batch that was normalized elsewhere
    assert other["episode_return"] == pytest.approx(statistics["episode_return"])


def test_done_flags_of_the_agents():
    update = make_update(DualClipPPOLoss, stopper=KLEarlyStopper(1e-6), epochs=5)
    update.advantage.set_keys(done=("agents", "done"), terminated=("agents", "terminated"))
    batch = collect(update.step.loss.actor_network)
    expected = batch.clone()
    for name in ("done", "terminated", "truncated"):
        flag = batch["next"].pop(name)
        batch["next", "agents", name] = flag.unsqueeze(-2).expand(B, T, A, 1).clone()
    statistics = update(batch)
    assert_episodes(statistics, expected, expected[REWARD])
    assert statistics["stopped"] == 1.0  # the KL is the mean over frames and agents
    assert statistics["steps"] < 20


def test_forgotten_keys_of_the_loss():
    update = make_update(DualClipPPOLoss)
    update.step.loss.set_keys(advantage="advantage")
    match = r"reads 'advantage'.*There is.*\('agents', 'advantage'\).*\(set_keys\)"
    with pytest.raises(KeyError, match=match):
        update.validate(collect(update.step.loss.actor_network))
