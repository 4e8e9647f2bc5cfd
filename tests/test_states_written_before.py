"""States that an earlier commit wrote are loaded as they are (``tests/data/states.pt``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
)
from tests.blocks import make_actor, make_critic
from tests.test_contract import CASES, rollout
from tests.test_state import assert_same_state

STATES = torch.load(Path(__file__).parent / "data" / "states.pt", weights_only=True)


def make_update() -> PPOUpdate:
    """An update with every block that has a state."""
    torch.manual_seed(0)
    actor, critic = make_actor(), make_critic()
    loss = DualClipPPOLoss(actor, critic, functional=False, kl_coeff=0.1, dual_clip=3.0)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    schedule = InterpSchedule([(0, 1e-3), (1000, 0.0)])
    return PPOUpdate(
        loss,
        optimizer,
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        reward_normalizer=RewardNormalizer(),
        stopper=KLEarlyStopper(10.0),
        adaptive_kl=AdaptiveKLCoeff(loss, target_kl=0.01),
        scheduler=ParameterScheduler({"lr": (optimizer, schedule)}),
        epochs=2,
        minibatch_size=4,
        seed=0,
    )


def make_batch(seed: int) -> TensorDict:
    """A batch of 2 rows of 6 steps, with actions of the policy."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return make_actor()(rollout(seed))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_of_a_block(name: str, assign: bool):
    block = CASES[name].make()
    block.load_state_dict(STATES[name], assign=assign)
    old = {"LeanActor": ("actor.", ""), "DualClipPPOLoss": ("_network_params.", "_network.")}
    before, after = old.get(name, ("", ""))
    written = {key.replace(before, after, 1): value for key, value in STATES[name].items()}
    assert_same_state(block.state_dict(), written)


def test_of_an_update_that_trains_on():
    update, state = make_update(), STATES["PPOUpdate"]
    update.load_state_dict(state["before"])
    statistics = update(make_batch(2))
    after: Any = {name: value.clone() for name, value in update.loss.state_dict().items()}
    for name, value in state["after"].items():
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert statistics["frames"] == 12
