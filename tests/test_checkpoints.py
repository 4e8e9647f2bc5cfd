"""Checkpoints: plain data, atomic files, damaged and hostile files."""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    ObservationNormalizer,
    PPOUpdate,
    TensorActor,
    TrainingStep,
    evaluate,
    load_checkpoint,
    load_policy,
    save_checkpoint,
)
from ppokit.networks import actor_critic
from tests.test_state import assert_same_state


def test_plain_data_is_saved_beside_states(tmp_path: Path):
    history = [{"frames": 10.0, "kl": 0.1}, {"frames": 20.0}]
    plain = {"history": history, "kind": ("a", None, True), "weights": torch.arange(3)}
    path = tmp_path / "new folder" / "saved"
    save_checkpoint(path, {"network": nn.Linear(2, 1), **plain})
    found = load_checkpoint(path, {"network": nn.Linear(2, 1), **dict.fromkeys(plain)})
    assert torch.equal(found.pop("weights"), plain.pop("weights"))
    assert found == plain


class Pickled:
    """A part whose state only pickle can load."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": object()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"sizes": [1, object()]}, "^part: there are objects"),
        (Pickled(), "cannot be loaded without pickle"),
        (np.float64(1.0), "cannot be loaded without pickle"),
        ({(1, object()): 1}, "cannot be loaded without pickle"),
    ],
)
def test_data_that_needs_pickle_raises_and_keep_the_last_checkpoint(
    tmp_path: Path, part: Any, message: str
):
    save_checkpoint(tmp_path / "saved", {"frames": 3})
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path / "saved", {"part": part})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert load_checkpoint(tmp_path / "saved", {"frames": None}) == {"frames": 3}


def test_a_checkpoint_behind_a_link_is_written_where_the_link_leads(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for frames in (1, 2):
        save_checkpoint(tmp_path / "link", {"frames": frames})
        assert load_checkpoint(tmp_path / "file", {"frames": None}) == {"frames": frames}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    "parts", [[1], None, nn.Linear(1, 1), {"__policy_distributions__": 1}], ids=str
)
def test_parts_that_are_no_mapping_or_have_a_reserved_name(tmp_path: Path, parts: Any):
    with pytest.raises(TypeError, match="parts must be a mapping of names"):
        save_checkpoint(tmp_path / "saved", parts)


def test_all_parts_are_loaded_or_none(tmp_path: Path):
    save_checkpoint(tmp_path / "saved", {"first": nn.Linear(2, 1), "second": nn.Linear(2, 1)})

    class Interrupted(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            super().load_state_dict(*args, **kwargs)
            raise KeyboardInterrupt

    for second, error, message in (
        (nn.Linear(3, 1), ValueError, r"(?s)'second' rejects its state.*\[1, 2\].*\[1, 3\]"),
        (Interrupted(2, 1), KeyboardInterrupt, ".*"),
    ):
        parts = {"first": nn.Linear(2, 1), "second": second}
        before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        with pytest.raises(error, match=message):
            load_checkpoint(tmp_path / "saved", parts)
        for name, part in parts.items():
            assert_same_state(part.state_dict(), before[name])
    with pytest.raises(KeyError, match=r"has no \['third'\] and has \['first', 'second'\] as well"):
        load_checkpoint(tmp_path / "saved", {"third": nn.Linear(2, 1)})


# -- atomic files -----------------------------------------------------------------------


def die_while_saving(path: str) -> None:
    def half(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    save_checkpoint(path, {"x": torch.zeros(1000)})


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint(tmp_path: Path):
    path = tmp_path / "saved"
    save_checkpoint(path, {"x": torch.ones(1000)})
    child = multiprocessing.get_context("fork").Process(target=die_while_saving, args=(str(path),))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "saved.unfinished").read_bytes() == b"half"
    assert load_checkpoint(path, {"x": None})["x"].sum() == 1000


@contextlib.contextmanager
def full_disk(size: int) -> Any:
    """Limit the size of files that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(tmp_path: Path):
    path = tmp_path / "saved"
    save_checkpoint(path, {"x": torch.ones(1000)})
    message = "saved.unfinished cannot be written. Is the disk full"
    with full_disk(1_000_000), pytest.raises(OSError, match=message):
        save_checkpoint(path, {"x": torch.zeros(1_000_000)})
    assert load_checkpoint(path, {"x": None})["x"].sum() == 1000
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


# -- damaged and hostile files ----------------------------------------------------------


class Hostile:
    """Runs a command if pickle loads it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


def zipped(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def flip_weights(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(255 - x for x in data[middle : middle + 8]) + data[middle + 8 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "damaged or cut off"),
        (lambda data: data[: len(data) // 2], "damaged or cut off"),
        (lambda data: data[:-10], "damaged or cut off"),
        (lambda data: data[:300] + data[500:], "damaged or cut off"),
        (flip_weights, "the checksum of '.*' is wrong"),
        (lambda data: b"frames: 100", "is not a checkpoint"),
        (lambda data: pickle.dumps(Hostile()), "is not a checkpoint"),
        (lambda data: zipped({"net": Hostile()}), "pickle loads, which can run any code"),
        (lambda data: zipped([1, 2]), "it holds a list"),
    ],
    ids=lambda x: None if callable(x) else x[:12],
)
def test_damaged_and_hostile_files_raise(
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


@settings(max_examples=60)
@given(data=st.data())
def test_random_damage_raises_a_value_error_or_changes_nothing(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        path, net = Path(folder) / "saved", nn.Linear(3, 2)
        save_checkpoint(path, {"net": net, "frames": 10})
        whole = path.read_bytes()
        start, length = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 64))
        new = data.draw(st.binary(max_size=64))
        if data.draw(st.booleans()):  # an archive with right checksums of other content
            with zipfile.ZipFile(path) as archive:
                members = {name: archive.read(name) for name in archive.namelist()}
            name = next(name for name in members if name.endswith("data.pkl"))
            start %= len(members[name])
            members[name] = members[name][:start] + new + members[name][start + length :]
            with zipfile.ZipFile(path, "w") as archive:
                for each, content in members.items():
                    archive.writestr(each, content)
        else:
            path.write_bytes(whole[:start] + new + whole[start + length :])
        before = net.weight.clone()
        with contextlib.suppress(KeyError, ValueError):
            load_checkpoint(path, {"net": net, "frames": 0})
        assert torch.equal(net.weight, before)


# -- a policy alone ---------------------------------------------------------------------


def make_trained(**options: Any) -> tuple[Any, ObservationNormalizer, GymCollector]:
    """Return a policy, statistics that have moved, and the collector of both."""
    actor, normalizer = actor_critic("CartPole-v1", **options)[0], ObservationNormalizer(4)
    collected: dict[str, Any] = {"frames_per_batch": 64, "observation_transform": normalizer}
    collector = GymCollector("CartPole-v1", actor, **collected)
    collector.rollout()
    collector.shutdown()
    return actor, normalizer, collector


def untrained() -> tuple[Any, ObservationNormalizer]:
    return actor_critic("CartPole-v1")[0], ObservationNormalizer(4)


@pytest.mark.parametrize("parts", ["policy", "collector", "both", "tensor_actor"])
def test_load_policy_finds_policy_and_transform(tmp_path: Path, parts: str):
    actor, normalizer, collector = make_trained()
    if parts == "tensor_actor":
        collector.policy = TensorActor(actor)
    alone = {"policy": actor, "observation_transform": normalizer}
    saved: dict[str, Any] = {"frames": 64, "optimizer": torch.optim.Adam(actor.parameters())}
    saved |= alone if parts in ("policy", "both") else {}
    saved |= {} if parts == "policy" else {"engine": collector}
    save_checkpoint(tmp_path / "saved", saved)
    policy, transform = untrained()
    assert load_policy(tmp_path / "saved", policy, transform, map_location="cpu") is None
    assert_same_state(policy.state_dict(), actor.state_dict())
    assert_same_state(transform.state_dict(), normalizer.state_dict())
    assert transform.count == 64
    batch = TensorDict({"observation": torch.randn(5, 4)}, [5])
    before, after = actor.get_dist(normalizer(batch.clone())), policy.get_dist(transform(batch))
    assert torch.equal(before.logits, after.logits)


@pytest.mark.parametrize("transformed", [False, True])
def test_a_policy_without_a_transform_or_with_one_without_a_state(
    tmp_path: Path, transformed: bool
):
    (actor, _), (policy, _) = untrained(), untrained()
    transform = TensorDictModule(torch.neg, ["observation"], ["observation"])
    options: dict[str, Any] = {"observation_transform": transform} if transformed else {}
    collector = GymCollector("CartPole-v1", actor, frames_per_batch=8, **options)
    collector.shutdown()
    for parts in ({"policy": actor}, {"collector": collector}, {"policy": actor.state_dict()}):
        save_checkpoint(tmp_path / "saved", parts)
        for module in (None, transform):  # which may be given or left out
            load_policy(str(tmp_path / "saved"), policy, module)
            assert_same_state(policy.state_dict(), actor.state_dict())


PROGRAM = """
import sys
from ppokit import ObservationNormalizer, evaluate, load_policy
from ppokit.networks import actor_critic

actor, _ = actor_critic("CartPole-v1")
normalizer = ObservationNormalizer(4)
load_policy(sys.argv[1], actor, normalizer)
options = {"observation_transform": normalizer, "seed": 0}
print(evaluate("CartPole-v1", actor, episodes=3, **options)[0].tolist())
"""


def test_another_process_loads_a_policy_and_evaluates_it(tmp_path: Path):
    actor, normalizer, collector = make_trained()
    save_checkpoint(tmp_path / "saved", {"collector": collector, "frames": 64})
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected, _ = evaluate(
        "CartPole-v1", actor, episodes=3, observation_transform=normalizer, seed=0
    )
    assert done.stdout.strip() == str(expected.tolist())


BOTH = ["policy", "observation_transform"]
WITHOUT: dict[str, tuple[list[str], Any, type[Exception], str]] = {
    "no policy": (BOTH[1:], untrained, KeyError, "has no 'policy'; its parts"),
    "no transform": (BOTH[:1], untrained, KeyError, "has no 'observation_transform'; its .*Save"),
    "a transform that is not asked for": (
        *(BOTH, lambda: (untrained()[0], None), KeyError),
        "has the state of an 'observation_transform'; .*Give load_policy its",
    ),
    "another policy": (
        *(BOTH, lambda: (actor_critic("CartPole-v1", (32, 32))[0], ObservationNormalizer(4))),
        *(ValueError, "'policy' r"),
    ),
    "another transform": (
        *(BOTH, lambda: (untrained()[0], ObservationNormalizer(3)), ValueError),
        "'observation_transform' rejects its state, and nothing was loaded",
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_policy_and_transform_are_loaded_both_or_not_at_all(tmp_path: Path, name: str):
    names, make, error, message = WITHOUT[name]
    actor, normalizer, _ = make_trained()
    parts = {"policy": actor, "observation_transform": normalizer}
    save_checkpoint(tmp_path / "saved", {k: parts[k] for k in names} | {"frames": 1})
    modules = make()
    before = [copy.deepcopy(x.state_dict()) for x in modules if x is not None]
    with pytest.raises(error, match=f"(?s){message}"):
        load_policy(tmp_path / "saved", *modules)
    for module, state in zip(modules, before, strict=False):
        assert_same_state(module.state_dict(), state)


def test_a_file_that_is_no_checkpoint_has_no_policy(tmp_path: Path):
    policy, _ = untrained()
    with pytest.raises(FileNotFoundError):
        load_policy(tmp_path / "missing", policy)
    (tmp_path / "saved").write_bytes(b"weights")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_policy(tmp_path / "saved", policy)


# -- states of optimizers, distributions, and collectors that a refused file leaves alone ------


def make_run(kind: Any = torch.optim.Adam, env: Any = "CartPole-v1", **options: Any) -> Any:
    """Return the parts of a run: an update and a collector."""
    torch.manual_seed(0)
    actor, critic = actor_critic(env() if callable(env) else env, (8,), **options)
    loss = DualClipPPOLoss(actor, critic)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    step = TrainingStep(loss, kind(loss.parameters(), lr=1e-3, **settings))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    update = PPOUpdate(step, advantage=gae, minibatch_size=16, epochs=2, seed=0)
    return {"update": update, "collector": GymCollector(env, actor, frames_per_batch=32)}


def in_state(name: str, change: Any) -> Any:
    return lambda state: change(state["state"][0], name)


SPOILED: dict[str, tuple[Any, Any, str]] = {
    "a moment is missing": (
        torch.optim.Adam,
        in_state("exp_avg", dict.pop),
        "'exp_avg' of parameter 0 is NoneType None, not a Tensor",
    ),
    "a moment of another shape": (
        torch.optim.AdamW,
        in_state("exp_avg", lambda s, n: s.update({n: torch.zeros(3)})),
        r"'exp_avg' of parameter 0 is Tensor \[3\], not a Tensor \[8, 4\]",
    ),
    "a scalar": (
        torch.optim.Adam,
        in_state("exp_avg_sq", lambda s, n: s.update({n: torch.zeros(())})),
        r"'exp_avg_sq' of parameter 0 is Tensor \[\], not a Tensor \[8, 4\]",
    ),
    "NaN": (torch.optim.Adam, in_state("exp_avg", lambda s, n: s[n].fill_(np.nan)), "not finite"),
    "below 0": (torch.optim.Adam, in_state("exp_avg_sq", lambda s, n: s[n].fill_(-1)), "below 0"),
    "a buffer that is NaN": (
        torch.optim.SGD,
        in_state("momentum_buffer", lambda s, n: s[n].fill_(np.inf)),
        "'momentum_buffer' of parameter 0 is not finite",
    ),
    "of one parameter": (
        torch.optim.Adam,
        lambda state: state["state"].pop(2),
        "'step' of parameter 2 is NoneType None, not a Tensor",
    ),
    "betas": (
        torch.optim.Adam,
        lambda state: state["param_groups"][0].update(betas=(2.0, 2.0)),
        "'betas', in a parameter group of the optimizer, must lie in",
    ),
    "a learning rate": (
        torch.optim.SGD,
        lambda state: state["param_groups"][0].update(lr=-1.0),
        r"'lr', in a parameter group of the optimizer, .* got -1\.0",
    ),
    "no learning rate": (
        torch.optim.Adam,
        lambda state: state["param_groups"][0].pop("lr"),
        r"The state is not of a Adam: its groups lack \['lr'\]",
    ),
    "an empty state": (
        torch.optim.Adam,
        lambda state: state["state"][0].clear(),
        "'step' of parameter 0 is NoneType None, not a Tensor",
    ),
    "another kind of moment": (
        torch.optim.RMSprop,
        in_state("square_avg", lambda s, n: s.update({n: "x"})),
        "'square_avg' of parameter 0 is str x, not a Tensor",
    ),
    "negative steps": (torch.optim.Adam, in_state("step", lambda s, n: s[n].fill_(-5)), "below 0"),
    "many steps": (
        torch.optim.Adamax,
        in_state("step", lambda s, n: s.update({n: torch.ones(7)})),
        r"'step' of parameter 0 is Tensor \[7\], not a Tensor \[\]",
    ),
    "fewer parameters": (
        torch.optim.Adam,
        lambda state: state["param_groups"][0]["params"].pop(),
        "parameter group that doesn't match the size",
    ),
}


@pytest.mark.parametrize(("kind", "spoil", "message"), SPOILED.values(), ids=SPOILED.keys())
@pytest.mark.parametrize("alone", [False, True], ids=["update", "optimizer"])
def test_a_spoiled_state_of_an_optimizer_raises_and_nothing_is_loaded(
    kind: Any, spoil: Any, message: str, alone: bool, tmp_path: Path
):
    parts, other = make_run(kind), make_run(kind)
    parts["update"](parts["collector"].rollout())
    if alone:
        parts, other = ({"adam": x["update"].step.optimizer} for x in (parts, other))
    save_checkpoint(tmp_path / "good", parts)
    states = torch.load(tmp_path / "good")
    spoil(states["adam"] if alone else states["update"]["optimizer"])
    torch.save(states, tmp_path / "bad")
    before = copy.deepcopy({name: x.state_dict() for name, x in other.items()})
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "bad", other)
    after = {name: x.state_dict() for name, x in other.items()}
    assert str(after) == str(before)
    load_checkpoint(tmp_path / "good", other)
    assert str(other["adam"].state_dict() if alone else other["update"].state_dict()) != str(
        before["adam" if alone else "update"]
    )


def test_the_state_of_an_adam_does_not_load_into_an_sgd(tmp_path: Path):
    sgd, adam, radam = torch.optim.SGD, torch.optim.Adam, torch.optim.RAdam
    adamw = torch.optim.AdamW  # a subclass of Adam
    for saved, loaded in ((adam, sgd), (sgd, adam), (adam, radam), (adam, adamw), (adamw, adam)):
        save_checkpoint(tmp_path / "saved", make_run(saved))
        expected = f"The state is of a {saved.__name__}, and this optimizer is a {loaded.__name__}"
        with pytest.raises(ValueError, match=expected):
            load_checkpoint(tmp_path / "saved", make_run(loaded))
    states = {"optimizer": make_run(sgd)["update"].step.optimizer.state_dict()}  # as torch saves it
    torch.save(states, tmp_path / "saved")
    with pytest.raises(ValueError, match="The state is not of a Adam: its groups lack"):
        load_checkpoint(tmp_path / "saved", {"optimizer": make_run(adam)["update"].step.optimizer})


OPTIMIZERS = [
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
    "Adafactor",
    "SGD",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_of_torch_is_looked_at(name: str, tmp_path: Path):
    def make() -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if name == "SGD" else {}
        layers = nn.Linear(3, 2), nn.Linear(2, 1)
        groups = [{"params": x.parameters(), "lr": 0.1} for x in layers]
        return getattr(torch.optim, name)(groups, lr=0.1, **options)

    saved, other = make(), make()
    for group in saved.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    saved.step()
    save_checkpoint(tmp_path / "saved", {"optimizer": saved})
    load_checkpoint(tmp_path / "saved", {"optimizer": other})
    assert_same_state(other.state_dict()["state"], saved.state_dict()["state"])
    state = torch.load(tmp_path / "saved")["optimizer"]["state"][3]
    for entry in [key for key, x in state.items() if isinstance(x, torch.Tensor)]:
        for wrong in (None, torch.zeros(7), "x"):
            states = torch.load(tmp_path / "saved")
            states["optimizer"]["state"][3][entry] = wrong
            torch.save(states, tmp_path / "wrong")
            with pytest.raises(ValueError, match=f"'{entry}' of parameter 3 is .*, not a Tensor"):
                load_checkpoint(tmp_path / "wrong", {"optimizer": other})
    found_below_0 = set()
    for _ in range(30):
        for p in (p for group in saved.param_groups for p in group["params"]):
            p.grad = torch.randn_like(p)
        saved.step()
        items = saved.state_dict()["state"][0].items()
        found_below_0 |= {k for k, x in items if isinstance(x, torch.Tensor) and (x < 0).any()}
    for entry in [key for key, x in state.items() if isinstance(x, torch.Tensor)]:
        states = torch.load(tmp_path / "saved")
        states["optimizer"]["state"][3][entry].abs_().add_(1).neg_()
        torch.save(states, tmp_path / "wrong")
        if entry in found_below_0:
            load_checkpoint(tmp_path / "wrong", {"optimizer": other})
            continue
        with pytest.raises(ValueError, match=f"'{entry}' of parameter 3 is not finite, or below 0"):
            load_checkpoint(tmp_path / "wrong", {"optimizer": other})


class SameStates(torch.optim.Adam):
    """A subclass with the states of its base."""


def test_the_state_of_a_base_class_loads(tmp_path: Path):
    save_checkpoint(tmp_path / "saved", make_run())
    load_checkpoint(tmp_path / "saved", make_run(SameStates))


def test_what_is_out_of_range_now_is_restored_after_a_load_that_fails(tmp_path: Path):
    save_checkpoint(tmp_path / "saved", {"update": make_run()["update"]})
    states = torch.load(tmp_path / "saved")
    states["update"]["optimizer"]["param_groups"][0]["lr"] = -1.0
    torch.save(states, tmp_path / "saved")
    update = make_run()["update"]
    update.step.loss.entropy_coeff.fill_(-2.0)
    with pytest.raises(ValueError, match=r"'optimizer' rejects its state.*'lr'"):
        load_checkpoint(tmp_path / "saved", {"update": update})
    assert float(update.step.loss.entropy_coeff) == -2.0


class WithOptions(torch.optim.Optimizer):
    """An optimizer whose learning rate may be None, with noise, and a state that grows."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "momentum": "nesterov"})
        self.scale = 0.5

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=1e-3 * self.scale)
                p.data.add_(torch.randn_like(p), alpha=1e-6)
                history = self.state[p].get("sum", torch.zeros(0))
                self.state[p]["sum"] = torch.cat([history, -p.grad.abs().sum()[None]])


def test_an_optimizer_of_ones_own_is_loaded(tmp_path: Path):
    parts, other = ([WithOptions(nn.Linear(2, 1).parameters())] for _ in range(2))
    for p in parts[0].param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        parts[0].step()
    save_checkpoint(tmp_path / "saved", {"optimizer": parts[0]})
    random = torch.get_rng_state()
    load_checkpoint(tmp_path / "saved", {"optimizer": other[0]})
    assert torch.equal(torch.get_rng_state(), random)
    assert str(other[0].state_dict()) == str(parts[0].state_dict())


def test_an_entry_of_ones_own_in_the_state_of_an_adam_is_loaded(tmp_path: Path):
    parts, other = ([torch.optim.Adam(nn.Linear(2, 1).parameters())] for _ in range(2))
    for p in parts[0].param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    parts[0].step()
    for p in parts[0].param_groups[0]["params"]:
        parts[0].state[p]["drift"] = -torch.ones_like(p)
    save_checkpoint(tmp_path / "saved", {"optimizer": parts[0]})
    load_checkpoint(tmp_path / "saved", {"optimizer": other[0]})
    assert str(other[0].state_dict()) == str(parts[0].state_dict())


class Counting(torch.optim.Optimizer):
    """An optimizer with an entry of its state that is of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        self.state["steps"] += 1
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"seen": torch.ones(())}


def test_an_entry_of_an_optimizer_that_is_of_no_parameter_is_saved(tmp_path: Path):
    parts, other = ([Counting(nn.Linear(2, 1).parameters())] for _ in range(2))
    parts[0].step()
    save_checkpoint(tmp_path / "saved", {"optimizer": parts[0]})
    load_checkpoint(tmp_path / "saved", {"optimizer": other[0]})
    assert str(other[0].state_dict()) == str(parts[0].state_dict())


class Lookahead(torch.optim.Adam):
    """An optimizer with a state of a form of its own, as wrappers have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.slow = 0

    def state_dict(self) -> Any:
        return {"base": super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["base"])
        self.slow = state_dict["slow"]


def test_an_optimizer_with_another_form_of_state_is_loaded(tmp_path: Path):
    parts, other = ([Lookahead(nn.Linear(2, 1).parameters())] for _ in range(2))
    parts[0].slow = 3
    for p in parts[0].param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    parts[0].step()
    save_checkpoint(tmp_path / "saved", {"optimizer": parts[0]})
    load_checkpoint(tmp_path / "saved", {"optimizer": other[0]})
    assert str(other[0].state_dict()) == str(parts[0].state_dict())
    with pytest.raises(ValueError, match="'optimizer' rejects its state"):
        load_checkpoint(
            tmp_path / "saved", {"optimizer": torch.optim.Adam(nn.Linear(2, 1).parameters())}
        )


def test_a_parameter_without_gradient_has_no_state_to_miss(tmp_path: Path):
    run, other = make_run(), make_run()
    for parts in (run, other):
        parts["update"].step.loss.critic_network.requires_grad_(False)
    run["update"](run["collector"].rollout())
    save_checkpoint(tmp_path / "saved", run)
    load_checkpoint(tmp_path / "saved", other)
    found, expected = (x["update"].step.optimizer.state_dict()["state"] for x in (other, run))
    assert found.keys() == expected.keys()
    assert 0 < len(found) < 8


def test_bounds_are_compared_as_numbers(tmp_path: Path):
    """However they are written: as float32, as an array, or bound to the class."""

    def bounded(kind: Any, **bounds: Any) -> ProbabilisticActor:
        module = TensorDictModule(nn.Linear(4, 2), ["observation"], ["loc", "scale"])
        return ProbabilisticActor(
            module,
            in_keys=["loc", "scale"],
            distribution_class=kind,
            distribution_kwargs=bounds,
        )

    ways = float, np.float32, torch.tensor, lambda x: np.float64(x), lambda x: torch.tensor([x])
    for write in ways:
        save_checkpoint(tmp_path / "saved", {"policy": bounded(TanhNormal, high=write(0.1))})
        for read in ways:
            load_policy(tmp_path / "saved", bounded(TanhNormal, high=read(0.1)))
            with pytest.raises(ValueError, match="another distribution"):
                load_policy(tmp_path / "saved", bounded(TanhNormal, high=read(0.2)))
    save_checkpoint(tmp_path / "saved", {"policy": bounded(partial(TanhNormal, high=0.1))})
    with pytest.raises(ValueError, match="another distribution"):
        load_policy(tmp_path / "saved", bounded(partial(TanhNormal, high=0.2)))


@pytest.mark.parametrize("load", ["policy", "collector", "update"])
def test_a_policy_of_another_distribution_raises(load: str, tmp_path: Path):
    path, env = tmp_path / "saved", "Pendulum-v1"
    run = make_run(env=env, squash=True)
    save_checkpoint(path, {"policy": run["collector"].policy} if load == "policy" else run)
    low, high = np.full(1, -1.0, np.float32), np.ones(1, np.float32)
    narrow = lambda: gym.wrappers.RescaleAction(gym.make(env), low, high)  # noqa: E731
    for other in (make_run(env=env), make_run(env=narrow, squash=True)):
        loaded = (other,) if load == "update" else (other["collector"].policy,)
        loads = load_checkpoint if load == "update" else load_policy
        with pytest.raises(ValueError, match=r"has another distribution than .*TanhNormal"):
            loads(path, *loaded)
    same = make_run(env=env, squash=True)
    load_policy(path, same["collector"].policy)
    if load != "policy":
        load_checkpoint(path, same)


def test_a_refused_checkpoint_leaves_episodes_and_trajectory_ids(tmp_path: Path):
    """The collector, loaded first, continues as one that was never asked to load."""
    saved = make_run()
    save_checkpoint(tmp_path / "saved", {k: saved[k] for k in ("collector", "update")})
    states = torch.load(tmp_path / "saved")
    states["update"]["order"] = {"generator": torch.zeros(3, dtype=torch.uint8)}
    torch.save(states, tmp_path / "bad")
    batches = []
    for refused in (False, True):
        run = make_run()
        collector = run["collector"]
        collector.set_seed(0)
        torch.manual_seed(1)
        collector.rollout()
        if refused:
            with pytest.raises(ValueError, match="'update' rejects its state"):
                load_checkpoint(tmp_path / "bad", {k: run[k] for k in ("collector", "update")})
        batches.append(collector.rollout())
    ids = [batch["collector", "traj_ids"] for batch in batches]
    assert torch.equal(*(x - x[0, 0] for x in ids))
    first = [int(x[0, 0]) % 2**36 for x in ids]
    assert first[0] == first[1]
    for key in ("observation", "action", ("next", "done")):
        assert torch.equal(*(batch[key] for batch in batches)), key
    load_checkpoint(tmp_path / "saved", {k: run[k] for k in ("collector", "update")})
    after = run["collector"].rollout()  # new episodes begin
    assert after["collector", "traj_ids"].min() > ids[1].max()


def test_a_file_with_two_collectors_has_no_policy_of_its_own(tmp_path: Path):
    """The order of the parts must not decide which policy is evaluated."""
    policies = [actor_critic("CartPole-v1")[0] for _ in range(3)]
    parts: dict[str, Any] = {
        name: GymCollector("CartPole-v1", policy, frames_per_batch=8)
        for name, policy in zip(("opponent", "learner"), policies[:2], strict=True)
    }
    save_checkpoint(tmp_path / "a.pt", parts)
    with pytest.raises(ValueError, match=r"'learner', 'opponent'.*under 'policy'"):
        load_policy(tmp_path / "a.pt", policies[2])
    save_checkpoint(tmp_path / "a.pt", parts | {"policy": policies[1]})
    load_policy(tmp_path / "a.pt", policies[2])
    found, expected = (nn.utils.parameters_to_vector(x.parameters()) for x in policies[:0:-1])
    assert torch.equal(found, expected)
