"""Updates of several agents: the blocks, torchrl's own losses and GAE, and recurrent agents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules import PopArtValueNorm
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.multiagent import IPPOLoss, MAPPOLoss
from torchrl.objectives.value import MultiAgentGAE

from ppokit import GAE, DualClipPPOLoss, KLEarlyStopper, PPOUpdate, RewardNormalizer
from tests.blocks import ppo_update
from tests.objectives.test_agents import KEYS, make_networks, with_keys

B, T, A = 4, 16, 3
REWARD = ("next", "agents", "reward")


def collect(actor: Any, *, seed: int = 0, rewards: str = "agents") -> TensorDict:
    """A batch as torchrl's multi-agent environments write it: ends at the root."""
    torch.manual_seed(seed)
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
    if rewards == "agents":
        batch[REWARD] = torch.randn(B, T, A, 1)
    else:
        batch["next", "reward"] = torch.randn(B, T, 1)
    return batch


def make_advantage(kind: Any, critic: Any, rewards: str = "agents") -> Any:
    options = {"deactivate_vmap": True} if kind is MultiAgentGAE else {}
    module = kind(gamma=0.97, lmbda=0.9, value_network=critic, **options)
    names = ("advantage", "value_target", "value")
    module.set_keys(**{name: KEYS[name] for name in names})
    if rewards == "agents":
        module.set_keys(reward=("agents", "reward"))
    return module


def make_update(kind: Any, gae: Any = GAE, **options: Any) -> tuple[Any, PPOUpdate]:
    actor, critic = make_networks(share_params=options.pop("share_params", True))
    rewards = options.pop("rewards", "agents")
    loss = with_keys(kind(actor, critic, functional=False, **options.pop("of_loss", {})))
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    defaults: dict[str, Any] = {"epochs": 2, "minibatch_size": 16, "seed": 0}
    advantage = make_advantage(gae, critic, rewards)
    return actor, ppo_update(loss, optimizer, advantage=advantage, **(defaults | options))


def episode_returns(batch: TensorDict, reward: torch.Tensor) -> dict[str, float]:
    """Of rows that begin anew, one number at a time."""
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
    return {
        "episodes": float(len(returns)),
        "episode_return": sum(returns) / len(returns),
        "episode_length": sum(lengths) / len(lengths),
    }


@pytest.mark.parametrize("rewards", ["agents", "team"])
@pytest.mark.parametrize("gae", [GAE, MultiAgentGAE])
@pytest.mark.parametrize("kind", [DualClipPPOLoss, ClipPPOLoss, IPPOLoss, MAPPOLoss])
def test_statistics_and_parameters(kind: Any, gae: Any, rewards: str):
    is_ours = kind is DualClipPPOLoss
    stopper = KLEarlyStopper(1.0, kl_key="kl" if is_ours else "kl_approx")
    actor, update = make_update(kind, gae, stopper=stopper, rewards=rewards)
    batch = collect(actor, rewards=rewards)
    reward = batch[REWARD if rewards == "agents" else ("next", "reward")].clone()
    update.validate(batch.clone())
    before = torch.cat([p.detach().flatten() for p in update.step.loss.parameters()])
    statistics = update(batch)
    assert all(torch.tensor(value).isfinite() for value in statistics.values()), statistics
    for name, value in episode_returns(batch, reward).items():
        assert statistics[name] == pytest.approx(value, abs=1e-5), name
    assert statistics["minibatches"] == 8
    assert statistics["frames"] == B * T
    after = torch.cat([p.detach().flatten() for p in update.step.loss.parameters()])
    assert not torch.equal(before, after)


def test_ours_trains_as_mappo_does():
    """The same parameters after an update, with torchrl's two passes or with one."""
    of_loss = {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-2,)}
    results = []
    for kind, gae, options in (
        (MAPPOLoss, MultiAgentGAE, {}),
        (MAPPOLoss, GAE, {}),
        (DualClipPPOLoss, GAE, {"of_loss": of_loss}),
    ):
        actor, update = make_update(kind, gae, **options)
        update(collect(actor))
        results.append(torch.cat([p.detach().flatten() for p in update.step.loss.parameters()]))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-4)


def test_with_a_value_norm():
    """torchrl's PopArt inside of MAPPOLoss moves its statistics in every forward, and trains."""
    of_loss = {"value_norm": PopArtValueNorm(shape=1)}
    actor, update = make_update(MAPPOLoss, of_loss=of_loss)
    batch = collect(actor)
    update.validate(batch.clone())
    statistics = update(batch)
    assert torch.tensor(statistics["loss_critic"]).isfinite()


def test_the_raw_reward_of_the_agents_is_what_is_returned():
    normalizer = RewardNormalizer(0.97, reward_key=REWARD, traj_key=None)
    actor, update = make_update(DualClipPPOLoss, reward_normalizer=normalizer)
    batch = collect(actor)
    raw = 10 * batch[REWARD].clone()
    batch[REWARD] = raw.clone()
    statistics = update(batch)
    assert not torch.allclose(batch[REWARD], raw)
    for name, value in episode_returns(batch, raw).items():
        assert statistics[name] == pytest.approx(value, rel=1e-5), name
    # one that was normalised elsewhere is found beside it
    _, other = make_update(DualClipPPOLoss)
    assert other(batch)["episode_return"] == pytest.approx(statistics["episode_return"])


def test_ends_in_the_group_alone():
    actor, update = make_update(DualClipPPOLoss)
    update.advantage.set_keys(done=("agents", "done"), terminated=("agents", "terminated"))
    batch = collect(actor)
    expected = episode_returns(batch, batch[REWARD])
    for name in ("done", "terminated", "truncated"):
        flag = batch["next"].pop(name)
        batch["next", "agents", name] = flag.unsqueeze(-2).expand(B, T, A, 1).clone()
    statistics = update(batch)
    for name, value in expected.items():
        assert statistics[name] == pytest.approx(value, abs=1e-5), name


def test_the_stop_sees_the_agents():
    """The KL of a minibatch is the mean over its frames and agents."""
    actor, update = make_update(DualClipPPOLoss, stopper=KLEarlyStopper(1e-6), epochs=5)
    statistics = update(collect(actor))
    assert statistics["stopped"] == 1.0
    assert statistics["steps"] < 20


def test_forgotten_keys_of_the_loss():
    actor, update = make_update(DualClipPPOLoss)
    update.step.loss.set_keys(advantage="advantage")
    match = r"reads 'advantage'.*There is.*\('agents', 'advantage'\).*\(set_keys\)"
    with pytest.raises(KeyError, match=match):
        update.validate(collect(actor))
