"""The state of every class: round trips, states that raise and change nothing, resumed runs."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.modules import ValueOperator

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ObservationNormalizer,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
    load_checkpoint,
    save_checkpoint,
)
from ppokit.networks import actor_critic
from ppokit.testing import assert_equal, call
from tests.blocks import make_actor, make_critic
from tests.test_contract import CASES


def assert_same_state(a: Any, b: Any) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        if isinstance(value, dict):
            assert_same_state(value, b[name])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, torch.as_tensor(b[name])), name
        else:
            assert value == b[name], name


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return copies of the leaves of a nested state, by their paths."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {prefix: state.clone() if isinstance(state, torch.Tensor) else state}
    return {k: v for name, x in items for k, v in flat(x, f"{prefix}/{name}").items()}


# -- every block ------------------------------------------------------------------------


def adaptive() -> AdaptiveKLCoeff:
    return AdaptiveKLCoeff(CASES["DualClipPPOLoss"].make())


def scheduler() -> ParameterScheduler:
    return CASES["ParameterScheduler"].make()  # pyright: ignore


HAVE_STATE: dict[str, Callable[[], nn.Module]] = {
    name: case.make
    for name, case in CASES.items()
    if not name.startswith(("TensorActor", "SequenceBatcher"))
} | {"AdaptiveKLCoeff": adaptive}


def used(name: str) -> nn.Module:
    """Return a block whose state has changed."""
    block = HAVE_STATE[name]()
    if name == "AdaptiveKLCoeff":
        block.update(1.0)  # pyright: ignore
    else:
        call(block, CASES[name].batch(1))
    return block


def tensors_of(block: nn.Module) -> list[torch.Tensor]:
    return [x for part in block.modules() for x in [*part.parameters(), *part.buffers()]]


def refuse(block: nn.Module, state: Any, message: str) -> None:
    """Loading raises with and without ``assign``, and no tensor and no value changes.

    A RewardNormalizer has new tensors after each change.
    """
    before, tensors = copy.deepcopy(block.state_dict()), tensors_of(block)
    for assign in (False, True):
        with pytest.raises((RuntimeError, ValueError, KeyError), match=message):
            block.load_state_dict(state, assign=assign)
        assert_same_state(block.state_dict(), before)
        if not isinstance(block, RewardNormalizer):
            assert all(x is y for x, y in zip(tensors_of(block), tensors, strict=True))


@pytest.mark.parametrize("name", HAVE_STATE)
def test_a_state_that_does_not_fit_raises_and_changes_nothing(name: str):
    block, fresh = used(name), HAVE_STATE[name]()
    state: Any = copy.deepcopy(fresh.state_dict())
    state._metadata[""]["version"] = 99
    kind = type(block).__name__
    refuse(block, state, rf"state of {kind} has version 99, and .* reads version 1")
    refuse(block, fresh.state_dict() | {"unknown": torch.zeros(3)}, "unknown")
    *_, last = state = fresh.state_dict()
    del state[last]
    refuse(block, state, last.split(".")[-1])
    state = fresh.state_dict()
    key = next(key for key, value in state.items() if isinstance(value, torch.Tensor))
    shape = ", ".join(map(str, state[key].shape))
    state[key] = torch.zeros((*state[key].shape, 7), dtype=state[key].dtype)
    refuse(block, state, rf"(?s)(\[{shape}\].*7\]|7\].*\[{shape}\])")
    for key in fresh.state_dict():
        refuse(block, block.state_dict() | {key: 0.5}, "(?s)float|got 0.5")


BAD_VALUES: list[tuple[Callable[[], nn.Module], dict[str, torch.Tensor], str]] = [
    (CASES["GAE"].make, {"gamma": torch.tensor(-5.0)}, "gamma must lie in"),
    (CASES["GAE"].make, {"lmbda": torch.tensor(math.nan)}, "lmbda must lie in"),
    (RewardNormalizer, {"open_returns": torch.zeros(7, 1)}, "as many as open_ids"),
    (adaptive, {"_extra_state": torch.tensor(math.nan)}, "kl_coeff must lie in .* got nan"),
    (adaptive, {"_extra_state": torch.tensor(-0.5)}, "kl_coeff must lie in .* got -0.5"),
]


@pytest.mark.parametrize(("make", "values", "message"), BAD_VALUES)
def test_values_that_a_constructor_rejects_raise(
    make: Callable[[], nn.Module], values: dict[str, torch.Tensor], message: str
):
    block = make()
    refuse(block, block.state_dict() | values, message)
    whole = nn.ModuleList([make()])
    before = copy.deepcopy(whole.state_dict())
    state = {f"0.{name}": value for name, value in (block.state_dict() | values).items()}
    with pytest.raises(RuntimeError, match=message):
        whole.load_state_dict(state)
    assert_same_state(whole.state_dict(), before)


def test_a_state_that_raises_moves_no_optimizer_and_no_scheduled_value():
    loss = CASES["DualClipPPOLoss"].make()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    moved = {k: x + (1 if "network" in k else 0) for k, x in loss.state_dict().items()}
    refuse(loss, moved | {"more": torch.zeros(1)}, "more")
    trained = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert trained == {id(parameter) for parameter in loss.parameters()}
    block = ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1.0), (100, 0.0)]))})
    state = {"frames": torch.tensor(50), "more": torch.zeros(1)}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match="more"):
            block.load_state_dict(state, assign=assign)
        assert (optimizer.param_groups[0]["lr"], int(block.frames)) == (1.0, 0)
    block.load_state_dict({"frames": torch.tensor(50)}, assign=True)
    assert (optimizer.param_groups[0]["lr"], int(block.frames)) == (0.5, 50)


# -- whole runs -------------------------------------------------------------------------


def make_run(**options: Any) -> dict[str, Any]:
    """Every class that has a state, on CartPole."""
    torch.manual_seed(0)
    actor, critic = actor_critic("CartPole-v1", (16,))
    loss = DualClipPPOLoss(actor, critic, functional=False, kl_coeff=0.2, dual_clip=3.0)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True)
    schedules = {"lr": (optimizer, InterpSchedule([(0, 1e-2), (1000, 1e-3)]))}
    schedules["entropy_coeff"] = (loss, InterpSchedule([(0, 0.01), (1000, 0.0)]))
    update = PPOUpdate(
        TrainingStep(loss, optimizer, stopper=KLEarlyStopper(0.05), max_grad_norm=0.5),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        reward_normalizer=RewardNormalizer(0.99),
        adaptive_kl=AdaptiveKLCoeff(loss),
        scheduler=ParameterScheduler(schedules),
        minibatch_size=32,
        seed=0,
    )
    collector = GymCollector(
        "CartPole-v1",
        actor,
        num_envs=2,
        frames_per_batch=128,
        total_frames=-1,
        categorical_action_encoding=True,
        observation_transform=ObservationNormalizer(4),
        **options,
    )
    return {"update": update, "collector": collector}


def train(parts: dict[str, Any], *, frames: int) -> None:
    """Begin new episodes, seeded by the frames so far, and train on two batches."""
    torch.manual_seed(frames)
    parts["collector"].set_seed(frames)
    for _ in range(2):
        parts["update"](parts["collector"].rollout())


def save_with_torch(path: Any, parts: dict[str, Any]) -> None:
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def load_with_torch(path: Any, parts: dict[str, Any]) -> None:
    states = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(states[name])


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ppokit": (save_checkpoint, load_checkpoint),
    "torch": (save_with_torch, load_with_torch),
    "torchrl": (
        lambda path, parts: Checkpoint(**parts).save(path),
        lambda path, parts: Checkpoint(**parts).load(path),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Any, way: str):
    save, load = WAYS[way]
    whole, resumed = make_run(), make_run()
    train(whole, frames=0)
    save(tmp_path / "saved", whole)
    train(whole, frames=256)
    load(tmp_path / "saved", resumed)
    train(resumed, frames=256)
    for name in ("loss", "optimizer", "reward_normalizer", "scheduler", "adaptive_kl", "order"):
        found, expected = (run["update"].state_dict()[name] for run in (resumed, whole))
        if name == "reward_normalizer":  # the ids of trajectories differ
            found, expected = ({"moments": state["moments"]} for state in (found, expected))
        assert_same_state(flat(found), flat(expected))
    found, expected = (run["collector"].state_dict() for run in (resumed, whole))
    assert_same_state(found["env_state_dict"], expected["env_state_dict"])
    assert found["frames"] == expected["frames"] == 512


@pytest.mark.parametrize("format", ["directory", "archive"])
def test_torchrls_checkpoint_holds_every_block(tmp_path: Any, format: Any):
    for name, case in CASES.items():
        block, fresh, path = case.make(), case.make(), tmp_path / name.replace(", ", "_")
        call(block, case.batch(1))
        Checkpoint(format=format, block=block).save(path)
        expected = call(block, case.batch(2))
        Checkpoint(block=fresh).load(path)
        assert_equal(call(fresh, case.batch(2)), expected)
    Checkpoint(norm=ObservationNormalizer(4)).save(tmp_path / "norm")
    with pytest.raises(CheckpointError, match=r"(?s)norm.*\[4\].*\[3\]"):
        Checkpoint(norm=ObservationNormalizer(3)).load(tmp_path / "norm")


def test_an_update_loads_a_state_completely_or_not_at_all():
    run, other = make_run(), make_run()
    train(run, frames=0)
    state = run["update"].state_dict()
    before = flat(other["update"].state_dict())
    moments = state["reward_normalizer"] | {"moments": 1.0}
    for part, entries, message in (
        ("scheduler", {"frames": torch.zeros(2, dtype=torch.int64)}, r"\[2\]"),
        ("order", {"generator": torch.zeros(3)}, "torch.ByteTensor"),
        ("order", {}, r"has no \['generator'\]"),
        ("episodes", {"open": None}, r"has no \['ids'\]"),
        ("reward_normalizer", moments, "float"),
        ("optimizer", {}, "KeyError: 'param_groups'"),
    ):
        with pytest.raises(ValueError, match=f"(?s)'{part}' rejects its state.*{message}"):
            other["update"].load_state_dict(state | {part: entries})
        assert_same_state(flat(other["update"].state_dict()), before)


def test_a_collector_saves_its_postproc_and_raises_for_another_state():
    options = {"frames_per_batch": 64, "policy_factory": lambda: actor_critic("Pendulum-v1")[0]}
    collector, resumed = (
        GymCollector("Pendulum-v1", None, postproc=RewardNormalizer(0.99), **options)
        for _ in range(2)
    )
    for _ in range(3):
        collector.rollout()
    file = io.BytesIO()
    torch.save(collector.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.postproc.count == collector.postproc.count == 3 * 64
    assert resumed.postproc.scale == collector.postproc.scale != 1
    with pytest.raises(KeyError, match=r"postproc_state_dict.* no module to load it into"):
        GymCollector("Pendulum-v1", None, **options).load_state_dict(collector.state_dict())
    collector = make_run()["collector"]
    state = copy.deepcopy(collector.state_dict())
    with pytest.raises(KeyError, match=r"has no \['frames'\]: a GymCollector has"):
        collector.load_state_dict({k: v for k, v in state.items() if k != "frames"})
    state["env_state_dict"]["module.mean"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"(?s)'env_state_dict' rejects its state.*\[7\].*\[4\]"):
        collector.load_state_dict(state)


def test_a_critic_that_only_the_advantage_module_holds_is_in_the_state():
    def make() -> PPOUpdate:
        actor, critic = make_actor(), make_critic()
        loss = DualClipPPOLoss(actor, critic)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=copy.deepcopy(critic))
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
        return PPOUpdate(step, advantage=gae, seed=0)

    update, resumed = make(), make()
    with torch.no_grad():
        for parameter in update.advantage.value_network.parameters():
            parameter.mul_(3)
    update.advantage.gamma.fill_(0.5)
    resumed.load_state_dict(update.state_dict())
    assert resumed.advantage.gamma == 0.5
    parameters = (x.advantage.value_network.parameters() for x in (update, resumed))
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_a_critic_that_the_loss_holds_is_in_the_state_once():
    """States of functional and other losses load into each other."""

    def make(functional: bool) -> PPOUpdate:
        norm = ObservationNormalizer(4, out_key="normal")
        critic = TensorDictSequential(norm, ValueOperator(nn.Linear(4, 1), in_keys=["normal"]))
        loss = DualClipPPOLoss(make_actor(), critic, functional=functional)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        return PPOUpdate(TrainingStep(loss, torch.optim.Adam(loss.parameters())), advantage=gae)

    for functional in (True, False):
        state = make(functional).state_dict()
        assert "value_network" not in state
        make(not functional).load_state_dict(state)
