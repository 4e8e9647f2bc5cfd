"""States of losses that hold their parameters apart from the networks, and of those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from tests.blocks import make_actor, make_critic, make_minibatch


def make(kind: Any, *, scale: float = 1.0, **options: Any) -> nn.Module:
    loss = kind(make_actor(), make_critic(), **options)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.mul_(scale)
    return loss


def outputs(loss: nn.Module) -> dict[str, torch.Tensor]:
    out = loss(make_minibatch(make_actor(), 16))
    return {name: out[name].detach() for name in ("loss_objective", "loss_critic", "kl_approx")}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("kind", [ClipPPOLoss, DualClipPPOLoss])
def test_they_are_loaded_across_both(kind: Any, written: bool, functional: bool, assign: bool):
    source = make(kind, scale=0.5, functional=written)
    state = dict(source.state_dict())
    names = list(state)
    for nested in (False, True):
        loss: Any = make(DualClipPPOLoss, functional=functional)
        whole = nn.ModuleDict({"loss": loss}) if nested else loss
        given = {f"loss.{name}": x for name, x in state.items()} if nested else state
        whole.load_state_dict(given, assign=assign)
        expected, found = outputs(source), outputs(loss)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert len(list(loss.parameters())) == 4
    assert list(state) == names


def test_the_default_needs_no_second_set_of_parameters():
    actor, critic = make_actor(), make_critic()
    loss = DualClipPPOLoss(actor, critic)
    assert not loss.functional
    assert [*map(id, loss.parameters())] == [*map(id, [*actor.parameters(), *critic.parameters()])]
    assert DualClipPPOLoss(actor, critic, delay_actor=True).functional
    assert DualClipPPOLoss(actor, critic, functional=True).functional


@pytest.mark.parametrize("functional", [False, True])
def test_a_state_of_other_networks_is_refused(functional: bool):
    state = make(ClipPPOLoss, functional=not functional).state_dict()
    loss = make(DualClipPPOLoss, functional=functional)
    before = [p.clone() for p in loss.parameters()]
    lacking = {name: x for name, x in state.items() if not name.endswith("0.bias")}
    with pytest.raises((KeyError, RuntimeError), match=r"0\.bias"):
        loss.load_state_dict(lacking)
    assert all(torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
