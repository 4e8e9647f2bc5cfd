"""Networks, losses and batches that the tests of updates assemble."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import GAE, DualClipPPOLoss
from tests.blocks import categorical_actor, make_actor, make_critic, make_minibatch


def make_networks() -> tuple[ProbabilisticActor, ValueOperator]:
    """Return a policy and a critic for CartPole."""
    torch.manual_seed(0)
    policy, value = (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size)) for size in (2, 1)
    )
    actor = categorical_actor(policy)
    return actor, ValueOperator(value, in_keys=["observation"])


def make_parts(**options: Any) -> tuple[DualClipPPOLoss, GAE, torch.optim.Optimizer]:
    """Return loss, GAE and fused Adam for CartPole."""
    actor, critic = make_networks()
    loss = DualClipPPOLoss(actor, critic, functional=False, **options)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    return loss, gae, torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True)


def make_loss(**options: Any) -> DualClipPPOLoss:
    """Return a loss of small networks, for :func:`make_batch`."""
    return DualClipPPOLoss(make_actor(), make_critic(), **options)


def make_batch(seed: int = 0, number: int = 0) -> TensorDict:
    """Return a batch [2, 6] with a termination and a truncation, with ids of batch ``number``."""
    batch = make_minibatch(make_actor(), 2, 6, seed=seed)
    batch = batch.exclude("advantage", "value_target", "state_value")
    terminated = torch.zeros(2, 6, 1, dtype=torch.bool)
    terminated[0, 2] = True
    done = terminated.clone()
    done[1, 3] = True
    ids = (done.cumsum(1) - done.long()).squeeze(-1) + torch.tensor([[10], [20]]) + 100 * number
    batch["collector", "traj_ids"] = ids
    reward, following = torch.randn(2, 6, 1), torch.randn(2, 6, 4)
    flags = {"done": done, "terminated": terminated}
    batch["next"] = TensorDict({"observation": following, "reward": reward, **flags}, [2, 6])
    return batch


def parameters_of(loss: nn.Module) -> torch.Tensor:
    """Return a copy of all parameters in one vector."""
    return nn.utils.parameters_to_vector(loss.parameters()).detach().clone()
