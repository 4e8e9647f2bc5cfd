"""Advantages without a critic or without GAE: rewards-to-go of whole episodes, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ValueOperator

from ppokit import GAE, AdaptiveKLCoeff, DualClipPPOLoss, PPOUpdate, SequenceBatcher
from tests.blocks import categorical_actor, ppo_update


def make_gae(**options: Any) -> GAE:
    arguments: dict[str, Any] = {"gamma": 0.9, "lmbda": 1.0, "value_network": None}
    return GAE(**arguments | {"use_critic": False} | options)


def make_batch(lengths: list[list[int]], steps: int, seed: int = 0) -> TensorDict:
    """Rows of terminated episodes of these lengths, padded with frames that are not valid."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    reward = torch.randn(rows, steps, 1, generator=generator, dtype=torch.float64)
    done, mask = (torch.zeros(rows, steps, 1, dtype=torch.bool) for _ in range(2))
    for row, of_row in enumerate(lengths):
        ends = torch.tensor(of_row).cumsum(0)
        done[row, ends - 1] = True
        mask[row, : ends[-1]] = True
    reward[~mask] = torch.nan  # padding is never read
    following = {"reward": reward, "done": done, "terminated": done.clone()}
    following["observation"] = torch.randn(rows, steps, 3, generator=generator)
    observation = torch.randn(rows, steps, 3, generator=generator)
    collector = {"mask": mask.squeeze(-1)}
    batch = {"observation": observation, "next": following, "collector": collector}
    return TensorDict(batch, [rows, steps], names=[None, "time"])


def rewards_to_go(batch: TensorDict, gamma: float, after: torch.Tensor) -> torch.Tensor:
    """Sum the rewards after each step; ``after`` is the value of the next observation."""
    reward, done = batch["next", "reward"], batch["next", "done"]
    terminated, mask = batch["next", "terminated"], batch["collector", "mask"]
    out = torch.zeros_like(reward)
    for row in range(len(reward)):
        valid = int(mask[row].sum())
        for step in range(valid):
            discount, total = 1.0, 0.0
            for t in range(step, valid):
                total += discount * reward[row, t].item()
                discount *= gamma
                if done[row, t] or t == valid - 1:
                    total += 0.0 if terminated[row, t] else discount * after[row, t].item()
                    break
            out[row, step] = total
    return out


@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 100),
)
def test_without_a_critic_it_is_the_reward_to_go(lengths: list[list[int]], seed: int):
    batch = make_batch(lengths, 12, seed)
    expected = rewards_to_go(batch, 0.9, torch.zeros(len(lengths), 12))
    make_gae()(batch)
    torch.testing.assert_close(batch["advantage"], expected)
    torch.testing.assert_close(batch["value_target"], expected)
    assert "state_value" not in batch.keys()


@given(seed=st.integers(0, 100))
def test_without_gae_it_is_the_bootstrapped_reward_to_go_minus_the_value(seed: int):
    batch = make_batch([[3, 4], [7]], 7, seed)
    batch["next", "terminated"][0, 2] = batch["next", "terminated"][1, 6] = False  # truncated
    critic = ValueOperator(nn.Linear(3, 1), ["observation"])
    with torch.no_grad():
        value, after = (critic.module(x["observation"]) for x in (batch, batch["next"]))
        expected = rewards_to_go(batch, 0.9, after)
        make_gae(value_network=critic, use_critic=True)(batch)
    torch.testing.assert_close(batch["value_target"].double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch["advantage"].double(), expected - value, atol=1e-5, rtol=1e-5)


def test_truncated_episodes_raise_and_nothing_is_written():
    batch = make_batch([[3, 4], [7]], 8)
    batch["next", "terminated"][0, 2] = False
    before = batch.clone()
    with pytest.raises(ValueError, match=r"^1 trajectories .* at step \[0, 2\] of \[2, 8\].*whole"):
        make_gae()(batch)
    assert set(batch.keys(True)) == set(before.keys(True))


@pytest.mark.parametrize("masked", [True, False])
def test_episodes_that_continue_after_the_batch_raise(masked: bool):
    batch = make_batch([[3, 4], [7]], 8 if masked else 7)
    batch["next", "done"][1, 6] = batch["next", "terminated"][1, 6] = False
    if not masked:
        del batch["collector"]
    with pytest.raises(ValueError, match=r"go on after the batch, the first at step \[1, 6\]"):
        make_gae()(batch)


def test_every_agent_must_terminate():
    batch = make_batch([[3, 4]], 7)
    del batch["collector"]
    for key in ("reward", "done", "terminated"):
        batch["next", key] = batch["next", key].unsqueeze(-2).repeat(1, 1, 2, 1)
    batch["next", "done"][0, 2, 0] = batch["next", "terminated"][0, 2, 0] = False  # it continues
    make_gae()(batch)
    assert batch["advantage"].shape == (1, 7, 2, 1)
    reward = batch["next", "reward"][0, :, 0, 0]
    discounts = 0.9 ** torch.arange(7, dtype=torch.float64)
    torch.testing.assert_close(batch["advantage"][0, 0, 0, 0], (reward * discounts).sum())
    batch["next", "terminated"][0, 6, 1] = False
    with pytest.raises(ValueError, match=r"the first at step \[0, 6\]"):
        make_gae()(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lmbda": 0.95}, "lmbda=0.95 and no value_network"),
        ({"value_network": ValueOperator(nn.Linear(3, 1))}, "lmbda=1.0 and a value_network"),
    ],
)
def test_options_that_need_a_critic_raise(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_gae(**options)


def make_update(**options: Any) -> PPOUpdate:
    torch.manual_seed(0)
    actor = categorical_actor(nn.Linear(3, 2))
    loss = DualClipPPOLoss(actor, None, kl_coeff=0.2, entropy_bonus=False)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    adaptive = AdaptiveKLCoeff(loss, target_kl=0.01)
    return ppo_update(loss, optimizer, advantage=make_gae(), adaptive_kl=adaptive, **options)


@pytest.mark.parametrize("batcher", [None, SequenceBatcher(3, cut_keys=())])
def test_an_update_without_a_critic_is_the_policy_gradient(batcher: SequenceBatcher | None):
    """At the first step the ratio is 1 and the KL 0: the gradient is that of log-probabilities."""
    update = make_update(epochs=1, batcher=batcher, seed=0)
    actor: Any = update.step.loss.actor_network
    batch = make_batch([[3, 9], [11]], 12)
    batch["next", "reward"] = batch["next", "reward"].nan_to_num().float()
    with torch.no_grad():
        actor(batch)
    advantage = rewards_to_go(batch, 0.9, torch.zeros(2, 12))
    update.validate(batch)  # on whole episodes: their first steps alone would be refused
    before = [p.clone() for p in update.step.loss.parameters()]
    log_prob = actor.get_dist(batch.select("observation")).log_prob(batch["action"])
    valid = batch["collector", "mask"]
    objective = (log_prob * advantage.squeeze(-1))[valid].mean()
    gradients = torch.autograd.grad(objective, list(actor.parameters()))
    statistics = update(batch)
    for old, new, gradient in zip(before, update.step.loss.parameters(), gradients, strict=True):
        torch.testing.assert_close(new, old + 0.1 * gradient, atol=1e-5, rtol=1e-4)
    assert "loss_critic" not in statistics
    assert statistics["frames"] == 23
    assert update.step.loss.kl_coeff == pytest.approx(0.1)  # the KL was 0


def test_a_state_with_another_lambda_raises():
    gae = GAE(gamma=0.9, lmbda=1.0, value_network=None, use_critic=False)
    with pytest.raises(RuntimeError, match="With use_critic=False lmbda must be 1"):
        gae.load_state_dict(gae.state_dict() | {"lmbda": torch.tensor(0.5)})
