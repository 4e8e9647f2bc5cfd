"""What the loss warns of: once, and not by chance."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import distributions as d
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import DualClipPPOLoss
from tests.blocks import make_actor, make_critic, make_minibatch

PATIENCE = 10  # minibatches


def make_loss(*, shared: bool = False, **options) -> DualClipPPOLoss:
    if not shared:
        return DualClipPPOLoss(make_actor(), make_critic(), **options)
    body = TensorDictModule(nn.Linear(4, 5), ["observation"], ["hidden"])
    actor = ProbabilisticActor(
        TensorDictSequential(body, TensorDictModule(nn.Linear(5, 3), ["hidden"], ["logits"])),
        in_keys=["logits"],
        distribution_class=d.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(body, ValueOperator(nn.Linear(5, 1), in_keys=["hidden"]))
    return DualClipPPOLoss(actor, critic, **options)


def warnings_of(loss: DualClipPPOLoss, batch: TensorDict, calls: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            loss(batch)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("functional", [False, True])
def test_each_is_told_once_and_only_when_it_lasts(fast: bool, functional: bool):
    common = {"fast": fast, "functional": functional}
    cases = {
        "effective sample size is": (make_loss(**common), {"action_log_prob": -30.0}),
        "critic_loss_clip=0.1 clamps nearly every frame": (
            make_loss(critic_loss_clip=0.1, **common),
            {"value_target": 50.0},
        ),
        "actor and critic share parameters": (
            make_loss(shared=True, **common),
            {"value_target": 500.0},
        ),
    }
    for message, (loss, entries) in cases.items():
        shared = "share" in message
        batch = (
            make_minibatch(loss.actor_network, 64) if shared else make_minibatch(make_actor(), 64)
        )
        usual = batch.clone()
        for key, value in entries.items():
            rows = slice(0, 2) if key == "action_log_prob" else slice(None)
            batch[key][rows] = value
        assert warnings_of(loss, batch, PATIENCE - 1) == []
        assert warnings_of(loss, usual, 1) == []  # and the count starts anew
        assert warnings_of(loss, batch, PATIENCE - 1) == []
        (told,) = warnings_of(loss, batch, 1)
        assert message in told
        assert warnings_of(loss, batch, 3 * PATIENCE) == []
        assert warnings_of(make_loss(shared=shared, **common), usual, 3 * PATIENCE) == []


@pytest.mark.parametrize("fast", [False, True])
def test_a_kl_that_is_not_finite_is_told_at_once_and_once(fast: bool):
    loss = make_loss(fast=fast)
    batch = make_minibatch(make_actor(), 8)
    batch["action_log_prob"][0] = -1e4
    (told,) = warnings_of(loss, batch, 3)
    assert "KL divergence is inf" in told
    assert warnings_of(copy.deepcopy(loss), batch, 3) == []


def test_separate_networks_may_have_a_large_critic_loss():
    loss = make_loss()
    batch = make_minibatch(make_actor(), 64)
    batch["value_target"] += 500
    assert warnings_of(loss, batch, 3 * PATIENCE) == []


def test_the_caller_may_look_himself():
    loss = make_loss()
    batch = make_minibatch(make_actor(), 8)
    losses = loss(batch)
    losses["kl"] = torch.tensor(torch.nan)
    with pytest.warns(RuntimeWarning, match="KL divergence is nan"):
        loss.watch(losses)
