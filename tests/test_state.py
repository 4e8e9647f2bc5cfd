"""State: through torch's files, ours and torchrl's, whole or refused."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

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
from ppokit.testing import BlockCase as Case
from ppokit.testing import assert_equal, call
from tests.blocks import make_actor, make_critic
from tests.test_contract import CASES

every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def assert_same_state(a: Any, b: Any) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        if isinstance(value, dict):
            assert_same_state(value, b[name])
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[name])), name


# -- every block ----------------------------------------------------------------------------


@every_block
@pytest.mark.parametrize("format", ["directory", "archive"])
def test_torchrls_checkpoint_holds_a_block(case: Case, tmp_path: Path, format: Any):
    block, fresh = case.make(), case.make()
    call(block, case.batch(1))
    Checkpoint(format=format, block=block).save(tmp_path / "saved")
    expected = call(block, case.batch(2))
    Checkpoint(block=fresh).load(tmp_path / "saved")
    assert_equal(call(fresh, case.batch(2)), expected)


def tensors_of(block: nn.Module) -> list[torch.Tensor]:
    return [x for part in block.modules() for x in [*part.parameters(), *part.buffers()]]


def refuse(block: nn.Module, state: Any, message: str) -> None:
    """With and without ``assign``, and with the same tensors afterwards."""
    before, tensors = copy.deepcopy(block.state_dict()), tensors_of(block)
    for assign in (False, True):
        with pytest.raises((RuntimeError, ValueError, KeyError), match=message):
            block.load_state_dict(state, assign=assign)
        assert_same_state(block.state_dict(), before)
        assert all(x is y for x, y in zip(tensors_of(block), tensors, strict=True))


HAVE_STATE = [name for name in CASES if not name.startswith(("TensorActor", "SequenceBatcher"))]


@pytest.mark.parametrize("name", HAVE_STATE)
def test_a_state_of_another_version_is_refused(name: str):
    block = CASES[name].make()
    state = copy.deepcopy(block.state_dict())
    state._metadata[""]["version"] = 99  # pyright: ignore
    kind = type(block).__name__
    refuse(block, state, rf"state of {kind} has version 99, and .* reads version 1")


@pytest.mark.parametrize("name", HAVE_STATE)
def test_an_unknown_entry_is_named(name: str):
    block = CASES[name].make()
    call(block, CASES[name].batch(1))
    state = CASES[name].make().state_dict()
    state["beside_the_point"] = torch.zeros(3)
    refuse(block, state, "beside_the_point")


@pytest.mark.parametrize("name", HAVE_STATE)
def test_a_missing_entry_is_named(name: str):
    block = CASES[name].make()
    call(block, CASES[name].batch(1))
    state = CASES[name].make().state_dict()
    key = list(state)[-1]
    del state[key]
    refuse(block, state, key.split(".")[-1])


@pytest.mark.parametrize("name", HAVE_STATE)
def test_another_shape_is_refused_with_both_described(name: str):
    block = CASES[name].make()
    call(block, CASES[name].batch(1))
    state = CASES[name].make().state_dict()
    key = next(key for key, value in state.items() if isinstance(value, torch.Tensor))
    shape = state[key].shape
    state[key] = torch.zeros((*shape, 7), dtype=state[key].dtype)
    own = ", ".join(map(str, shape))
    refuse(block, state, rf"(?s)(\[{own}\].*7\]|7\].*\[{own}\])")


@pytest.mark.parametrize("name", HAVE_STATE)
def test_an_entry_that_is_no_tensor_is_named(name: str):
    block = CASES[name].make()
    for key in CASES[name].make().state_dict():
        refuse(block, block.state_dict() | {key: 0.5}, "(?s)float")


def scheduler() -> ParameterScheduler:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    return ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1.0), (100, 0.0)]))})


def adaptive() -> AdaptiveKLCoeff:
    return AdaptiveKLCoeff(CASES["DualClipPPOLoss"].make())


NAN = math.nan
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, torch.Tensor], str]] = [
    (CASES["GAE"].make, {"gamma": torch.tensor(-5.0)}, "gamma must lie in"),
    (CASES["GAE"].make, {"lmbda": torch.tensor(NAN)}, "lmbda must lie in"),
    (RewardNormalizer, {"frozen": torch.tensor(0.5)}, "'frozen' has .*float32 .* of bool"),
    (scheduler, {"frames": torch.tensor(-5)}, "'frames' is -5"),
    (scheduler, {"frames": torch.tensor(2.5)}, "'frames' is 2.5"),
    (lambda: KLEarlyStopper(0.1), {"_extra_state": torch.tensor([NAN, 0.0])}, "0 or 1"),
    (lambda: KLEarlyStopper(0.1), {"_extra_state": torch.tensor([1, -1])}, "0 or 1"),
    (adaptive, {"_extra_state": torch.tensor(NAN)}, "kl_coeff is nan, outside of bounds"),
    (adaptive, {"_extra_state": torch.tensor(-0.5)}, "kl_coeff is -0.5, outside of bounds"),
]


@pytest.mark.parametrize(("make", "values", "message"), REFUSED)
def test_values_that_no_block_can_have_are_refused(
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


def test_an_optimizer_trains_on_after_a_refused_state():
    loss = CASES["DualClipPPOLoss"].make()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    state = {
        name: value + (1 if "network" in name else 0) for name, value in loss.state_dict().items()
    }
    refuse(loss, state | {"more": torch.zeros(1)}, "more")
    trained = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert trained == {id(parameter) for parameter in loss.parameters()}


@pytest.mark.parametrize("assign", [False, True])
def test_a_refused_state_moves_no_scheduled_value(assign: bool):
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    schedule = InterpSchedule([(0, 1.0), (100, 0.0)])
    block = ParameterScheduler({"lr": (optimizer, schedule)})
    state = {"frames": torch.tensor(50), "more": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="more"):
        block.load_state_dict(state, assign=assign)
    assert (optimizer.param_groups[0]["lr"], int(block.frames)) == (1.0, 0)
    assert state["frames"] == 50
    del state["more"]
    block.load_state_dict(state, assign=assign)
    assert (optimizer.param_groups[0]["lr"], int(block.frames)) == (0.5, 50)


def test_statistics_stay_in_float64():
    normalizer, state = RewardNormalizer(), RewardNormalizer().state_dict()
    normalizer.load_state_dict(state | {"moments": state["moments"].float()}, assign=True)
    assert normalizer.moments.dtype is torch.float64


def test_adaptive_kl_refuses_another_shape():
    adaptive = AdaptiveKLCoeff(CASES["DualClipPPOLoss"].make())
    refuse(adaptive, {"_extra_state": torch.zeros(2)}, r"shape \[2\]; kl_coeff has \[\]")


# -- checkpoints ----------------------------------------------------------------------------


def make_run(**options: Any) -> dict[str, Any]:
    """Everything that has state, on CartPole."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    actor = ProbabilisticActor(
        TensorDictModule(body, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
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


def save_with_torch(path: Path, parts: dict[str, Any]) -> None:
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def load_with_torch(path: Path, parts: dict[str, Any]) -> None:
    states = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(states[name])


def save_with_torchrl(path: Path, parts: dict[str, Any]) -> None:
    Checkpoint(**parts).save(path)


def load_with_torchrl(path: Path, parts: dict[str, Any]) -> None:
    Checkpoint(**parts).load(path)


WAYS = {
    "ours": (save_checkpoint, load_checkpoint),
    "torch": (save_with_torch, load_with_torch),
    "torchrl": (save_with_torchrl, load_with_torchrl),
}


@pytest.mark.parametrize(("save", "load"), WAYS.values(), ids=WAYS.keys())
def test_a_run_goes_on_bit_for_bit(
    tmp_path: Path, save: Callable[..., Any], load: Callable[..., Any]
):
    whole, resumed = make_run(), make_run()
    train(whole, frames=0)
    save(tmp_path / "saved", whole)
    train(whole, frames=256)
    load(tmp_path / "saved", resumed)
    train(resumed, frames=256)
    for name in ("loss", "optimizer", "reward_normalizer", "scheduler", "adaptive_kl", "order"):
        ours, theirs = (run["update"].state_dict()[name] for run in (whole, resumed))
        if name == "reward_normalizer":  # trajectories are numbered on
            ours, theirs = ({"moments": state["moments"]} for state in (ours, theirs))
        assert_same_state(flat(ours), flat(theirs))
    ours, theirs = (run["collector"].state_dict() for run in (whole, resumed))
    assert_same_state(ours["env_state_dict"], theirs["env_state_dict"])
    assert ours["frames"] == theirs["frames"] == 512


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {} if state is None else {prefix: state}
    return {k: v for name, x in items for k, v in flat(x, f"{prefix}/{name}").items()}


def test_plain_data_comes_back(tmp_path: Path):
    history = [{"frames": 10.0, "kl": 0.1}, {"frames": 20.0}]
    plain = {"history": history, "kind": ("a", None, True), "weights": torch.arange(3)}
    save_checkpoint(tmp_path / "new folder" / "saved", {"network": nn.Linear(2, 1), **plain})
    found = load_checkpoint(
        tmp_path / "new folder" / "saved", {"network": nn.Linear(2, 1), **dict.fromkeys(plain)}
    )
    assert found.keys() == plain.keys()
    assert found["history"] == history
    assert found["kind"] == ("a", None, True)
    assert torch.equal(found["weights"], torch.arange(3))


def test_what_needs_pickle_is_refused_before_anything_is_written(tmp_path: Path):
    parts = {"network": nn.Linear(2, 1), "options": {"sizes": [1, object()]}}
    with pytest.raises(TypeError, match=r"options\['sizes'\]\[1\] is of type object"):
        save_checkpoint(tmp_path / "saved", parts)
    assert not list(tmp_path.iterdir())


class Pickled:
    """A part whose state only pickle can load."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": object()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("part", [Pickled(), np.float64(1.0), {object(): 1}, {(1, object()): 1}])
def test_a_checkpoint_that_could_not_be_loaded_replaces_none(tmp_path: Path, part: Any):
    save_checkpoint(tmp_path / "saved", {"frames": 3})
    with pytest.raises(TypeError, match="cannot be loaded without pickle"):
        save_checkpoint(tmp_path / "saved", {"part": part})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert load_checkpoint(tmp_path / "saved", {"frames": None}) == {"frames": 3}


def test_other_parts_are_named(tmp_path: Path):
    save_checkpoint(tmp_path / "saved", {"actor": nn.Linear(2, 1), "frames": 3})
    with pytest.raises(KeyError, match=r"has no \['critic'\] and has \['actor'\] as well"):
        load_checkpoint(tmp_path / "saved", {"critic": nn.Linear(2, 1), "frames": None})


def test_all_is_loaded_or_nothing(tmp_path: Path):
    parts = {"first": nn.Linear(2, 1), "second": nn.Linear(2, 1)}
    save_checkpoint(tmp_path / "saved", parts)
    others = {"first": nn.Linear(2, 1), "second": nn.Linear(3, 1)}
    before = {name: copy.deepcopy(part.state_dict()) for name, part in others.items()}
    with pytest.raises(ValueError, match=r"(?s)'second' refuses its state.*\[1, 2\].*\[1, 3\]"):
        load_checkpoint(tmp_path / "saved", others)
    for name, part in others.items():
        assert_same_state(part.state_dict(), before[name])


def test_an_update_loads_all_or_nothing():
    run, other = make_run(), make_run()
    train(run, frames=0)
    state = run["update"].state_dict()
    state["scheduler"] = {"frames": torch.zeros(2, dtype=torch.int64)}
    before = copy.deepcopy(flat(other["update"].state_dict()))
    with pytest.raises(ValueError, match=r"(?s)'scheduler' refuses its state.*\[2\]"):
        other["update"].load_state_dict(state)
    assert_same_state(flat(other["update"].state_dict()), before)
    state = run["update"].state_dict() | {"order": {"generator": torch.zeros(3)}}
    with pytest.raises(ValueError, match=r"'order' refuses.*torch.ByteTensor"):
        other["update"].load_state_dict(state)
    for part, entries, message in (
        ("order", {}, r"has no \['generator'\]"),
        ("episodes", {"open": None}, r"has no \['ids'\]"),
        ("reward_normalizer", state["reward_normalizer"] | {"moments": 1.0}, "of type float"),
        ("optimizer", {}, "KeyError: 'param_groups'"),
    ):
        whole = run["update"].state_dict() | {part: entries}
        with pytest.raises(ValueError, match=f"(?s)'{part}' refuses its state.*{message}"):
            other["update"].load_state_dict(whole)
        assert_same_state(flat(other["update"].state_dict()), before)
    assert_same_state(flat(other["update"].state_dict()), before)


def test_a_collector_refuses_the_state_of_another_policy():
    collector = make_run()["collector"]
    with pytest.raises(KeyError, match=r"has no \['frames'\]: a GymCollector has"):
        collector.load_state_dict(
            {k: v for k, v in collector.state_dict().items() if k != "frames"}
        )
    state = copy.deepcopy(collector.state_dict())
    state["env_state_dict"]["module.mean"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"(?s)'env_state_dict' refuses its state.*\[7\].*\[4\]"):
        collector.load_state_dict(state)


def test_torchrls_checkpoint_refuses_what_does_not_fit(tmp_path: Path):
    Checkpoint(network=nn.Linear(2, 1), norm=ObservationNormalizer(4)).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"(?s)norm.*\[4\].*\[3\]"):
        Checkpoint(norm=ObservationNormalizer(3)).load(tmp_path / "saved")


KILLED_WHILE_IT_SAVES = """
import os, signal, sys, torch
from ppokit import save_checkpoint
class Deadly:
    def state_dict(self): return {"x": torch.ones(1000)}
    def load_state_dict(self, state): ...
save_checkpoint(sys.argv[1], {"part": Deadly()})
torch.save = lambda states, file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), 9))
save_checkpoint(sys.argv[1], {"part": Deadly()})
"""


def test_a_process_that_is_killed_while_it_saves_leaves_the_last_checkpoint(tmp_path: Path):
    command = [sys.executable, "-c", KILLED_WHILE_IT_SAVES, str(tmp_path / "saved")]
    assert subprocess.run(command, check=False).returncode == -9
    assert (tmp_path / "saved.unfinished").read_bytes() == b"half"
    saved = torch.load(tmp_path / "saved", weights_only=True)
    assert torch.equal(saved["part"]["x"], torch.ones(1000))


FULL_DISK = """
import resource, signal, sys, torch
from ppokit import load_checkpoint, save_checkpoint
path = sys.argv[1]
save_checkpoint(path, {"x": torch.ones(1000)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(path, {"x": torch.zeros(100_000)})
except OSError as error:
    print(error)
print(load_checkpoint(path, {"x": None})["x"].sum())
"""


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(tmp_path: Path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "saved")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "saved could not be written, and is as it was. Is the disk full" in result.stdout
    assert "tensor(1000.)" in result.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


class Hostile:
    """What would run a command if pickle loaded it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


def _zipped(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _damaged(data: bytes) -> bytes:
    """Other numbers in the middle of the file, where the weights are."""
    middle = len(data) // 2
    return data[:middle] + bytes(255 - x for x in data[middle : middle + 8]) + data[middle + 8 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "no checkpoint, a damaged one, or only the beginning"),
        (lambda data: data[: len(data) // 2], "a damaged one, or only the beginning"),
        (lambda data: data[:-10], "a damaged one, or only the beginning"),
        (lambda data: data[:300] + data[500:], "a damaged one, or only the beginning"),
        (_damaged, "is damaged: the checksum"),
        (lambda data: b"frames: 100", "a damaged one, or only the beginning"),
        (lambda data: pickle.dumps(Hostile()), "a damaged one, or only the beginning"),
        (lambda data: _zipped({"net": Hostile()}), "pickle loads, which can run any code"),
        (lambda data: _zipped([1, 2]), "it holds a list"),
        (lambda data: _zipped(torch.ones(3)), "it holds a Tensor"),
    ],
    ids=lambda x: None if callable(x) else x[:12],
)
def test_what_is_no_whole_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
):
    monkeypatch.chdir(tmp_path)
    path, net = tmp_path / "saved", nn.Linear(100, 100)
    save_checkpoint(path, {"net": net})
    path.write_bytes(change(path.read_bytes()))
    before = net.weight.clone()
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, {"net": net})
    assert torch.equal(net.weight, before)
    assert not (tmp_path / "hostile").exists()


@settings(max_examples=300)
@given(data=st.data())
def test_no_damage_is_loaded_or_told_by_anything_but_a_value_error(data: st.DataObject):
    """Bytes changed, left out and added, also inside of what the checksums are of."""
    with tempfile.TemporaryDirectory() as folder:
        path, net = Path(folder) / "saved", nn.Linear(3, 2)
        save_checkpoint(path, {"net": net, "frames": 10})
        whole = path.read_bytes()
        start = data.draw(st.integers(0, len(whole) - 1))
        length = data.draw(st.integers(0, 64))
        path.write_bytes(
            whole[:start] + data.draw(st.binary(max_size=64)) + whole[start + length :]
        )
        before = net.weight.clone()
        try:
            assert load_checkpoint(path, {"net": net, "frames": 0}) == {"frames": 10}
        except (KeyError, ValueError) as error:
            assert str(path) in str(error) or "refuses its state" in str(error)  # noqa: PT017
        assert torch.equal(net.weight, before)


def test_what_is_marked_as_a_folder_is_damage(tmp_path: Path):
    """torch does not read such an entry, and gives the memory that was there."""
    path, net = tmp_path / "saved", nn.Linear(3, 2)
    save_checkpoint(path, {"net": net})
    whole = bytearray(path.read_bytes())
    at = 0
    while b"/data/" not in whole[at + 46 : at + 100]:  # the central directory's entry of a tensor
        at = whole.index(b"PK\x01\x02", at + 1)
    whole[at + 38] ^= 0x10
    path.write_bytes(whole)
    before = net.weight.clone()
    with pytest.raises(ValueError, match="is damaged: the checksum or the kind of"):
        load_checkpoint(path, {"net": net})
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize("member", ["cut", "other bytes", "missing"])
@pytest.mark.parametrize("seed", range(8))
def test_an_archive_that_others_wrote_is_refused_or_right(tmp_path: Path, member: str, seed: int):
    """Its checksums are those of what it holds."""
    path, net = tmp_path / "saved", nn.Linear(3, 2)
    save_checkpoint(path, {"net": net, "frames": 10})
    chance = random.Random(seed)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    at = chance.randrange(len(members[name]))
    if member == "missing":
        del members[name if seed % 2 else chance.choice(list(members))]
    elif member == "cut":
        members[name] = members[name][:at]
    else:
        members[name] = members[name][:at] + chance.randbytes(3) + members[name][at + 3 :]
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in members.items():
            archive.writestr(each, content)
    before = net.weight.clone()
    with contextlib.suppress(KeyError, ValueError):
        load_checkpoint(path, {"net": net, "frames": 0})
    assert torch.equal(net.weight, before)


def test_an_optimizer_of_other_weights_is_refused(tmp_path: Path):
    def make(hidden: int) -> torch.optim.Optimizer:
        net = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 2))
        net(torch.ones(1, 4)).sum().backward()
        optimizer = torch.optim.Adam(net.parameters())
        optimizer.step()
        return optimizer

    save_checkpoint(tmp_path / "saved", {"optimizer": make(8)})
    optimizer = make(16)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 has shape \[8, 4\]"):
        load_checkpoint(tmp_path / "saved", {"optimizer": optimizer})
    assert_same_state(flat(optimizer.state_dict()), flat(before))
    load_checkpoint(tmp_path / "saved", {"optimizer": make(8)})


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adamax": torch.optim.Adamax,
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.parametrize("saved", OPTIMIZERS)
@pytest.mark.parametrize("loaded", OPTIMIZERS)
def test_the_state_of_another_kind_of_optimizer_raises(saved: str, loaded: str, tmp_path: Path):
    def make(kind: str) -> torch.optim.Optimizer:
        net = nn.Linear(4, 2)
        optimizer = OPTIMIZERS[kind](net.parameters(), lr=0.1)
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return optimizer

    save_checkpoint(tmp_path / "saved", {"optimizer": make(saved)})
    optimizer = make(loaded)
    before = copy.deepcopy(optimizer.state_dict())
    if saved == loaded:
        load_checkpoint(tmp_path / "saved", {"optimizer": optimizer})
    else:
        with pytest.raises(ValueError, match=f"another kind of optimizer than {loaded}"):
            load_checkpoint(tmp_path / "saved", {"optimizer": optimizer})
        assert_same_state(flat(optimizer.state_dict()), flat(before))
    optimizer.step()


class Momentum(torch.optim.SGD):
    """Keeps an option of another optimizer's in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("alpha", 0.9)
        return super().step(closure)


class Wrapped(torch.optim.SGD):
    """Has a state of its own form."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inner"])


@pytest.mark.parametrize("kind", [Momentum, Wrapped])
def test_an_optimizer_of_a_user_loads_its_own_state(kind: Any, tmp_path: Path):
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    save_checkpoint(tmp_path / "saved", {"optimizer": optimizer})
    load_checkpoint(tmp_path / "saved", {"optimizer": optimizer})


@pytest.mark.parametrize("kind", ["Adagrad", "ASGD", "Rprop", "Adam", "RMSprop", "Adadelta"])
def test_parameters_in_another_order_raise(kind: str, tmp_path: Path):
    def make(reverse: bool) -> torch.optim.Optimizer:
        layer = nn.Linear(4, 2)
        layer(torch.ones(1, 4)).sum().backward()
        parameters = [*layer.parameters()]
        optimizer = getattr(torch.optim, kind)(parameters[::-1] if reverse else parameters, lr=0.1)
        optimizer.step()
        return optimizer

    save_checkpoint(tmp_path / "saved", {"optimizer": make(False)})
    with pytest.raises(ValueError, match="parameters, or of the same in another order"):
        load_checkpoint(tmp_path / "saved", {"optimizer": make(True)})


def test_a_critic_that_only_the_advantage_module_holds_is_saved(tmp_path: Path):
    def make() -> PPOUpdate:
        torch.manual_seed(0)
        actor, critic = make_actor(), make_critic()
        averaged = copy.deepcopy(critic)
        loss = DualClipPPOLoss(actor, critic)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=averaged)
        return PPOUpdate(
            TrainingStep(loss, torch.optim.Adam(loss.parameters())), advantage=gae, seed=0
        )

    update = make()
    with torch.no_grad():
        for parameter in update.advantage.value_network.parameters():
            parameter.mul_(3)
    update.advantage.gamma.fill_(0.5)
    save_checkpoint(tmp_path / "saved", {"update": update})
    resumed = make()
    load_checkpoint(tmp_path / "saved", {"update": resumed})
    assert resumed.advantage.gamma == 0.5
    parameters = (x.advantage.value_network.parameters() for x in (update, resumed))
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_a_critic_with_buffers_that_the_loss_holds_is_saved_once():
    """States of functional and other losses are loaded across."""

    def make(functional: bool) -> PPOUpdate:
        torch.manual_seed(0)
        norm = ObservationNormalizer(4, out_key="normal")
        actor = make_actor()
        critic = TensorDictSequential(norm, ValueOperator(nn.Linear(4, 1), in_keys=["normal"]))
        loss = DualClipPPOLoss(actor, critic, functional=functional)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        return PPOUpdate(TrainingStep(loss, torch.optim.Adam(loss.parameters())), advantage=gae)

    for functional in (True, False):
        state = make(functional).state_dict()
        assert "value_network" not in state
        make(not functional).load_state_dict(state)


def test_the_postproc_of_a_collector_is_saved(tmp_path: Path):
    def make() -> GymCollector:
        options = {"frames_per_batch": 64, "postproc": RewardNormalizer(0.99)}
        return GymCollector("Pendulum-v1", None, policy_factory=make_pendulum_actor, **options)

    collector = make()
    for _ in range(3):
        collector.rollout()
    save_checkpoint(tmp_path / "saved", {"collector": collector})
    resumed = make()
    load_checkpoint(tmp_path / "saved", {"collector": resumed})
    assert resumed.postproc.count == collector.postproc.count == 3 * 64
    assert resumed.postproc.scale == collector.postproc.scale != 1


def test_the_state_of_a_postproc_that_is_not_there_raises():
    options = {"frames_per_batch": 64, "policy_factory": make_pendulum_actor}
    collector = GymCollector("Pendulum-v1", None, postproc=RewardNormalizer(), **options)
    with pytest.raises(KeyError, match=r"postproc_state_dict.* no module to load it into"):
        GymCollector("Pendulum-v1", None, **options).load_state_dict(collector.state_dict())


def make_pendulum_actor() -> ProbabilisticActor:
    network = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def test_ctrl_c_while_parts_are_loaded_leaves_all_as_they_were(tmp_path: Path):
    class Interrupted(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            super().load_state_dict(*args, **kwargs)
            raise KeyboardInterrupt

    save_checkpoint(tmp_path / "saved", {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    parts = {"actor": nn.Linear(2, 2), "critic": Interrupted(2, 2)}
    before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(tmp_path / "saved", parts)
    for name, part in parts.items():
        assert_same_state(flat(part.state_dict()), flat(before[name]))
