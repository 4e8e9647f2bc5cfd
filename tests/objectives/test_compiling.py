"""The loss in a graph: captured whole and once, and the same numbers as in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ppokit import DualClipPPOLoss, TrainingStep
from tests.blocks import make_critic, outcome
from tests.objectives.common import make_actor, make_minibatch, shared_networks

# tensordict asks for an option of torch._dynamo that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt:FutureWarning")
ALL = {"dual_clip": 1.5, "clip_value": 0.2, "critic_loss_clip": 1.0, "kl_coeff": 0.1}


def assert_same(compiled: Any, loss: DualClipPPOLoss, batch: TensorDict) -> None:
    tolerance = 1e-11 if batch["advantage"].dtype == torch.float64 else 1e-5
    expected, found = outcome(loss, batch), outcome(compiled, batch)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


SLOW = ("tanh-normal, one upper bound each", "unknown normal")
KINDS: list[Any] = ["tanh-normal", "categorical"]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW]


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_values_of_the_coefficients(kind: str):
    torch._dynamo.reset()
    options = {"dual_clip": 5.0, "clip_value": 0.2, "critic_loss_clip": 9.0, "kl_coeff": 0.1}
    actor = make_actor(kind)
    loss = DualClipPPOLoss(actor, make_critic(), entropy_bonus=False, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same(compiled, loss, make_minibatch(actor, 16))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(10):
            loss.clip_epsilon = 0.2 - seed * 1e-3
            loss.critic_coeff = 1 + seed * 0.01
            loss.dual_clip, loss.kl_coeff, loss.clip_value = 5.0 - seed * 0.01, seed * 0.1, 0.3
            assert_same(compiled, loss, make_minibatch(actor, 16, seed=seed))


def test_a_value_head_and_separate_losses_in_a_graph():
    torch._dynamo.reset()
    actor, head, _ = shared_networks()
    loss = DualClipPPOLoss(actor, head, separate_losses=True, entropy_bonus=False)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same(compiled, loss, make_minibatch(actor, 16))


@pytest.mark.slow
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("normal", torch.float32, ALL),
        ("tanh-normal", torch.float64, {"entropy_bonus": False, **ALL}),
        ("categorical", torch.float32, {"normalize_advantage": True}),
        ("one-hot", torch.float64, ALL),
    ],
)
def test_it_is_the_same(kind: str, dtype: torch.dtype, options: dict[str, Any], functional: bool):
    torch._dynamo.reset()
    actor = make_actor(kind, dtype)
    loss = DualClipPPOLoss(actor, make_critic(dtype=dtype), functional=functional, **options)
    loss.to(dtype)
    batch = make_minibatch(actor, 16, dtype=dtype).clone()  # else an action can be its own mean
    compiled = torch.compile(loss, fullgraph=True)
    for _ in range(3):
        assert_same(compiled, loss, batch)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [True, {"options": {"cpp_wrapper": False}}])
def test_a_step_on_minibatches_of_many_sizes_and_masks(compile: Any):
    torch._dynamo.reset()
    steps: list[TrainingStep] = []
    for option in (False, compile):
        loss = DualClipPPOLoss(make_actor("categorical"), make_critic(), **ALL)
        optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
        steps.append(TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=option))
    eager, compiled = steps
    for size in (16, 7, 33, 64):
        batch = make_minibatch(make_actor("categorical"), size)
        masked = batch.clone()
        masked["collector", "mask"] = torch.arange(size) % 3 > 0
        masked["advantage"][0] = float("nan")
        for minibatch in (batch, masked):
            found, expected = compiled(minibatch).to_dict(), eager(minibatch).to_dict()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "compiled" in compiled.extra_repr()
