"""Gradients of each term of the loss under Inductor, for every kind of action."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from ppokit import DualClipPPOLoss
from ppokit.networks import actor_critic

BOX = spaces.Box(-1, 1, (2,))
ACTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "choices": (spaces.MultiDiscrete([2, 3, 4]), {}),
    "one choice": (spaces.Discrete(3), {}),
    "bits": (spaces.MultiBinary(3), {}),
    "normal": (BOX, {}),
    "tanh-normal": (BOX, {"squash": True}),
    "parts": (spaces.Dict({"m": spaces.MultiDiscrete([2, 3, 4]), "b": BOX}), {}),
}
TERMS = "loss_objective", "loss_kl", "loss_entropy", "loss_critic"


def gradients(loss: Any, batch: TensorDict, how: Any) -> dict[str, Tensor]:
    """Return the gradient of each term, of all parameters."""
    found = {}
    for term in TERMS:
        loss.zero_grad()
        torch.manual_seed(0)
        how(loss)(batch.clone())[term].backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in loss.parameters()]
        found[term] = torch.cat([part.flatten() for part in parts])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ACTIONS)
def test_gradients_under_inductor_are_those_of_eager_mode(kind: str):
    torch.manual_seed(0)
    torch.compiler.reset()
    space, options = ACTIONS[kind]
    actor, critic = actor_critic((spaces.Box(-1, 1, (3,)), space), hidden=(), **options)
    with torch.no_grad():
        batch = actor(TensorDict({"observation": torch.randn(16, 3)}, [16]))
        for parameter in actor.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    batch["advantage"], batch["value_target"] = torch.randn(2, 16, 1)
    loss = DualClipPPOLoss(actor, critic, kl_coeff=1.0, entropy_coeff=0.1)
    found = gradients(loss, batch, torch.compile)
    expected = gradients(loss, batch, lambda loss: loss)
    if kind == "tanh-normal":  # its entropy is sampled, from other random numbers in a graph
        del found["loss_entropy"], expected["loss_entropy"]
    for term, gradient in expected.items():
        assert gradient.norm() > 1e-4, term
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
