"""TrainingStep against the lines of a training loop, and compiled against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ppokit import DualClipPPOLoss, KLEarlyStopper, TrainingStep
from tests.blocks import make_actor, make_critic, make_minibatch
from tests.update.step_cases import make_case, run


def make_loss() -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic())


def test_a_step_is_the_lines_of_a_loop():
    loss, other = make_loss(), make_loss()
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=0.01), max_grad_norm=0.1)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for _ in range(3):
        minibatch = make_minibatch(make_actor(), 8)
        outputs = step(minibatch.clone())
        losses: Any = other(minibatch)
        sum(x for name, x in losses.items() if name.startswith("loss_")).backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(outputs["grad_norm"], norm)
        assert outputs["stepped"]
        assert not any(x.requires_grad for x in outputs.values())
    for own, expected in zip(loss.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def test_after_a_stop_nothing_steps_until_reset():
    loss = make_loss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    step = TrainingStep(loss, optimizer, stopper=KLEarlyStopper(1e-9))
    minibatch = make_minibatch(make_actor(), 8)
    minibatch["action_log_prob"] -= 1.0
    before = [p.detach().clone() for p in loss.parameters()]
    assert not step(minibatch)["stepped"]
    assert step.stopped
    assert not step(minibatch)["stepped"]
    for own, expected in zip(loss.parameters(), before, strict=True):
        assert torch.equal(own, expected)
    step.reset()
    assert not step.stopped


def test_a_step_that_is_not_finite_raises_and_keeps_the_minibatch():
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    minibatch = make_minibatch(make_actor(), 8)
    minibatch["advantage"][0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"not finite.*'advantage'"):
        step(minibatch)
    assert step.nonfinite_minibatch is not None
    assert all(p.isfinite().all() for p in loss.parameters())


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("seed", [0, 3, 9])
def test_compiled_steps_are_eager_steps(seed: int):
    """Networks, losses, optimizers, stops and changes between calls are drawn."""
    expected = run(make_case(seed, compile=False))
    case = make_case(seed, compile={"backend": "aot_eager"})
    found = run(case)
    assert "compiled" in case.step.extra_repr()
    pairs = [*zip(found["parameters"], expected["parameters"], strict=True)]
    for own, of_eager in zip(found["outputs"], expected["outputs"], strict=True):
        assert own.keys() == of_eager.keys()
        pairs += [(own[key], of_eager[key]) for key in own.keys()]
    for own, of_eager in pairs:
        assert isinstance(own, Tensor)
        torch.testing.assert_close(
            own, of_eager, rtol=1e-7, atol=1e-9, equal_nan=True, check_dtype=False
        )


def test_a_hook_makes_the_step_eager_and_is_named():
    loss = make_loss()
    options = {"backend": "aot_eager"}
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile=options)
    minibatch, calls = make_minibatch(make_actor(), 8), []
    step(minibatch)
    layer = next(m for m in loss.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(RuntimeWarning, match="runs eagerly: .*hook"):
        step(minibatch)
    assert calls
    assert "eager: a module" in repr(step.extra_repr())
