"""Whatever is done to a block in between, it goes on as one that was only called.

Two of a block run side by side: one is saved, loaded, copied, moved and offered bad batches at
random, the other is not. After each operation their states are equal, bit for bit.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensordict import TensorDict
from torch import nn

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from ppokit.testing import BlockCase as Case
from ppokit.testing import assert_equal, call
from tests.blocks import make_actor, make_critic, make_minibatch
from tests.fuzz.disguises import damages
from tests.test_contract import CASES
from tests.test_state import assert_same_state, flat

SEEDS = st.integers(0, 5)


def through_a_file(state: Any) -> Any:
    """Return what a file gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class SideBySide(RuleBasedStateMachine):
    """The operations that change nothing, on one of the two."""

    def make(self) -> Any:
        """Return a block."""
        raise NotImplementedError

    def call(self, block: Any, seed: int) -> Any:
        """Return what the block makes of a batch."""
        raise NotImplementedError

    def outcome(self, block: Any, seed: int) -> Any:
        """Return that, or what it raises: it may have taken a batch of other environments."""
        try:
            return self.call(block, seed)
        except ValueError as error:
            return str(error)

    def __init__(self) -> None:
        super().__init__()
        self.block, self.straight = self.make(), self.make()

    @rule(seed=SEEDS)
    def both_are_called(self, seed: int) -> None:
        found, expected = self.outcome(self.block, seed), self.outcome(self.straight, seed)
        if isinstance(expected, TensorDict):
            assert_equal(found, expected)
        else:
            assert repr(found) == repr(expected)

    @rule()
    def save_and_load(self) -> None:
        state = through_a_file(self.block.state_dict())
        self.block = self.make()
        self.block.load_state_dict(state)

    @rule()
    def load_over_what_is_there(self) -> None:
        state = through_a_file(self.block.state_dict())
        self.outcome(self.block, 7)
        self.block.load_state_dict(state)

    @rule()
    def look(self) -> None:
        repr(self.block)
        self.block.state_dict()

    @invariant()
    def states_are_equal(self) -> None:
        states = (flat(x.state_dict()) for x in (self.block, self.straight))
        assert_same_state(*states)


class Modules(SideBySide):
    """What can be done to a module besides."""

    case: Case
    operations: tuple[str, ...] = ()

    def make(self) -> Any:
        return self.case.make()

    def call(self, block: Any, seed: int) -> Any:
        return call(block, self.case.batch(seed))

    @rule(copier=st.sampled_from([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]))
    def copy_it(self, copier: Callable[[Any], Any]) -> None:
        self.block = copier(self.block)

    @rule(training=st.booleans())
    def change_mode(self, training: bool) -> None:
        self.block.train(training)

    @rule(device=st.sampled_from(["cpu"] + ["cuda", "cpu"] * torch.cuda.is_available()))
    def move(self, device: str) -> None:
        self.block.to(device).to("cpu")

    @precondition(lambda self: self.operations)
    @rule(data=st.data())
    def both_are_told(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.operations))
        for block in (self.block, self.straight):
            getattr(block, name)()

    @rule(data=st.data(), seed=SEEDS)
    def a_damaged_batch(self, data: st.DataObject, seed: int) -> None:
        """Refused with the state that was there, or else taken, and then by both."""
        batch = data.draw(damages(self.case.batch(seed)))
        try:
            call(self.block, batch.clone())
        except Exception:
            return  # the invariant compares the states
        call(self.straight, batch.clone())


OPERATIONS = {
    "RewardNormalizer": ("freeze", "unfreeze", "reset_returns"),
    "ObservationNormalizer": ("freeze", "unfreeze"),
    "KLEarlyStopper": ("reset",),
}


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_modules(name: str):
    class Machine(Modules):
        case = CASES[name]
        operations = OPERATIONS.get(name.split(",")[0], ())

    run(Machine)


class Coefficients(SideBySide):
    """AdaptiveKLCoeff: its state is its own and the loss's."""

    def make(self) -> Any:
        loss = DualClipPPOLoss(make_actor(), make_critic(), kl_coeff=0.1)
        return nn.ModuleDict({"loss": loss, "adaptive": AdaptiveKLCoeff(loss)})

    def call(self, block: Any, seed: int) -> float:
        return block["adaptive"].update(0.004 * seed)


class Updates(SideBySide):
    """PPOUpdate with all that it may hold."""

    def make(self) -> PPOUpdate:
        loss = DualClipPPOLoss(make_actor(), make_critic(), kl_coeff=0.1)
        optimizer = torch.optim.Adam(loss.parameters(), 0.05)
        return PPOUpdate(
            TrainingStep(
                loss,
                optimizer,
                stopper=KLEarlyStopper(0.05),
                nonfinite="skip" if self.skips else "raise",
            ),
            advantage=GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network),
            reward_normalizer=RewardNormalizer(),
            batcher=SequenceBatcher(3) if self.recurrent else None,
            adaptive_kl=AdaptiveKLCoeff(loss),
            scheduler=ParameterScheduler(
                {"lr": (optimizer, InterpSchedule([(0, 0.05), (100, 0.01)]))}
            ),
            epochs=2,
            minibatch_size=2 if self.recurrent else 4,
            seed=0,
        )

    recurrent = False
    skips = False

    def call(self, block: PPOUpdate, seed: int) -> dict[str, float]:
        said = block(make_batch(seed))
        clock = ("seconds_", "frames_per_second")
        return {name: x for name, x in said.items() if not any(c in str(name) for c in clock)}

    @rule(data=st.data(), seed=SEEDS)
    def a_damaged_batch(self, data: st.DataObject, seed: int) -> None:
        batch = data.draw(damages(make_batch(seed)))
        before = copy.deepcopy(flat(self.block.state_dict()))
        try:
            self.block.validate(batch.clone())
        except Exception:
            assert_same_state(flat(self.block.state_dict()), before)


def make_batch(seed: int) -> TensorDict:
    batch = CASES["GAE"].batch(seed)
    whole = make_minibatch(make_actor(), *batch.shape, spread=0.1, seed=seed)
    for key in ("observation", "action", "action_log_prob"):
        batch[key] = whole[key]
    return batch


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("machine", [Coefficients, Updates])
def test_what_holds_other_blocks(machine: type[SideBySide]):
    run(machine)


@pytest.mark.parametrize("flag", ["recurrent", "skips"])
def test_updates_of_other_kinds(flag: str):
    run(type("Machine", (Updates,), {flag: True}))


def run(machine: type[SideBySide]) -> None:
    """Run a machine of 20 steps in a twentieth of the profile's examples."""
    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test

    examples = max(settings.default.max_examples // 20, 1)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=20)
    )
