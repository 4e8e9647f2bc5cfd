"""Compiled losses and steps over recurrent networks equal eager ones, without recompiling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch._dynamo.utils import counters
from torchrl.modules import GRUModule, LSTMModule

from ppokit import GAE, DualClipPPOLoss
from tests.recurrent.agents import Agent, collect_ours, make_agent, make_loss

pytestmark = pytest.mark.filterwarnings(
    # torch._dynamo makes an instance of each autograd function that it traces, and looks at the
    # gradients of what comes into a graph; it hides the warning, but not where that is an error.
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:torch._dynamo.config.inline_inbuilt_nn_mod:FutureWarning",
)
ENVS = {LSTMModule: "Pendulum-v1", GRUModule: "CartPole-v1"}


def given(kind: type, backend: str, *, shared: bool = False) -> tuple[Agent, TensorDictBase]:
    """Networks some steps after they collected a batch, and the batch with advantages."""
    torch._dynamo.reset()
    counters.clear()
    env = ENVS[kind]
    agent = make_agent(env, kind, shared=shared, recurrent_backend=backend)
    (batch,) = collect_ours(env, agent.policy, batches=1, frames=240)
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return agent, batch


def outcome(loss: Any, minibatch: TensorDictBase, parameters: list[Tensor]) -> tuple:
    """Losses and diagnostics, and the gradients of their sum, but for an entropy of samples."""
    found = {name: x for name, x in loss(minibatch.clone()).items() if "entropy" not in name}
    total = sum(value for name, value in found.items() if name.startswith("loss_"))
    return {name: x.detach() for name, x in found.items()}, torch.autograd.grad(total, parameters)


def compiled_and_eager(
    agent: Agent, of_loss: dict[str, Any], **options: Any
) -> tuple[Any, DualClipPPOLoss]:
    # A copy of a functional loss would not share what actor and critic share.
    eager = make_loss(copy.deepcopy(agent), **of_loss)
    return torch.compile(make_loss(agent, **of_loss), **options), eager


def assert_same(compiled: Any, eager: DualClipPPOLoss, minibatches: list[Any]) -> list[int]:
    """Compare on each minibatch; return how many graphs were captured until then."""
    graphs = []
    for minibatch in minibatches:
        found, gradients = outcome(compiled, minibatch, list(compiled.parameters()))
        expected, theirs = outcome(eager, minibatch, list(eager.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients, theirs, rtol=1e-5, atol=1e-5)
        assert all(gradient.any() for gradient in gradients)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_a_compiled_loss_uses_a_mask_that_appears_later():
    agent, batch = given(GRUModule, "pad")
    compiled, eager = compiled_and_eager(agent, {}, backend="eager")
    masked = batch.clone()
    assert "collector" in masked.keys()
    masked["collector", "mask"] = torch.arange(batch.shape[1]).expand(batch.shape) < 100
    assert_same(compiled, eager, [batch, masked])
