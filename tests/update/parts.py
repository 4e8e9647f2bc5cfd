"""Networks, losses and batches that the tests of updates assemble."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import GAE, DualClipPPOLoss
from ppokit.networks import actor_critic
from tests.blocks import make_actor, make_critic, make_minibatch
from tests.test_contract import rollout


def make_networks() -> tuple[ProbabilisticActor, ValueOperator]:
    """Return a policy and a critic for CartPole."""
    torch.manual_seed(0)
    return actor_critic("CartPole-v1", (16,))


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
    signals = rollout(seed).select("next", "collector")
    signals["collector", "traj_ids"] += 100 * number
    return batch.update(signals)


def parameters_of(loss: nn.Module) -> torch.Tensor:
    """Return a copy of all parameters in one vector."""
    return nn.utils.parameters_to_vector(loss.parameters()).detach().clone()
