"""TrainingStep against the lines of a training loop, and compiled against eager."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss, KLEarlyStopper, PPOUpdate, TrainingStep
from ppokit.update import eager_step, graphs
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.update.step_cases import STEPS, make_case, run


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
        torch.testing.assert_close(own, of_eager, rtol=1e-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"accumulate_grads": True}, 1e-6),
        ({"amp_dtype": torch.bfloat16}, 1e-3),
        ({"amp_dtype": torch.float16}, 5e-4),
        ({"amp_dtype": torch.float16, "accumulate_grads": True}, 5e-4),
    ],
    ids=["accumulated", "bfloat16", "float16", "float16, accumulated"],
)
def test_a_compiled_update_is_an_eager_one(options: dict[str, Any], tolerance: float):
    captured, results = [], []
    batches = [make_minibatch(make_actor(), 24) for _ in range(3)]
    for compile in ({"backend": lambda graph, _: captured.append(1) or graph}, False):
        loss = make_loss()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
        common = {"max_grad_norm": 0.5, "minibatch_size": 8, "seed": 0, "compile": compile}
        update = ppo_update(loss, optimizer, **common, **options)
        statistics = [update(batch.clone()) for batch in batches][-1]
        results.append((nn.utils.parameters_to_vector(loss.parameters()), statistics))
        if update.step.scaler is not None:
            assert update.step.scaler.get_scale() == 2.0**16
    assert len(captured) == 1
    (found, own), (expected, of_eager) = results
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert own["loss_objective"] == pytest.approx(of_eager["loss_objective"], abs=10 * tolerance)


@pytest.mark.parametrize("everywhere", [False, True])
def test_while_there_is_a_hook_the_step_is_eager_and_names_it(everywhere: bool):
    loss = make_loss()
    options = {"backend": "aot_eager"}
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile=options)
    minibatch, calls = make_minibatch(make_actor(), 8), []
    step(minibatch)
    layer = next(m for m in loss.modules() if isinstance(m, torch.nn.Linear))
    register = layer.register_forward_hook
    if everywhere:
        register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda *_: calls.append(1))
    try:
        with pytest.warns(RuntimeWarning, match="runs eagerly: .*hook"):
            step(minibatch)
    finally:
        handle.remove()
    assert calls
    assert "eager: a module" in step.extra_repr()
    calls.clear()
    step(minibatch)
    assert not calls
    assert "compiled" in step.extra_repr()


class Pair:
    """A compiled step and an eager one, in float64, on the same minibatches."""

    def __init__(self, kind: Any = torch.optim.Adam, **options: Any) -> None:
        self.steps = []
        for compile in ({"backend": "eager"}, False):
            loss = make_loss().double()
            optimizer = kind(loss.parameters(), **{"lr": 0.01} | options)
            self.steps.append(TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compile))
        self.number = 0

    def __call__(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.number += 1
            torch.manual_seed(self.number)
            minibatch = make_minibatch(make_actor(), 8).double()
            for step in self.steps:
                step(minibatch.clone())
        own, expected = ([*step.loss.parameters()] for step in self.steps)
        for a, b in zip(own, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def load_optimizer(step: TrainingStep) -> None:
    state = step.optimizer.state_dict()
    for entries in state["state"].values():
        entries["exp_avg"] = entries["exp_avg"] * 3
    step.optimizer.load_state_dict(state)


def clear_optimizer(step: TrainingStep) -> None:
    step.optimizer.state.clear()


def exchange_optimizer(step: TrainingStep) -> None:
    step.optimizer = torch.optim.SGD(step.loss.parameters(), lr=0.1)


def exchange_loss(step: TrainingStep) -> None:
    torch.manual_seed(7)
    step.loss = DualClipPPOLoss(make_actor(), make_critic(), clip_epsilon=0.01).double()
    step.optimizer = torch.optim.Adam(step.loss.parameters(), lr=0.01)


def hook_a_parameter(step: TrainingStep) -> None:
    next(iter(step.loss.parameters())).register_hook(lambda gradient: 2 * gradient)


def add_a_gradient(step: TrainingStep) -> None:
    for parameter in step.loss.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize(
    "change",
    [
        load_optimizer,
        clear_optimizer,
        exchange_optimizer,
        exchange_loss,
        hook_a_parameter,
        add_a_gradient,
    ],
)
def test_between_calls_the_user_may(change: Any):
    pair = Pair()
    pair()
    for step in pair.steps:
        change(step)
    pair()


class Counts(nn.Linear):
    """Scales its output by the number of calls, which no graph can follow."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) * (1 + 0.1 * self.calls)


def test_networks_that_change_in_each_call_run_eagerly():
    results = []
    batches = [make_minibatch(make_actor(), 24) for _ in range(3)]
    for compile in ({"backend": "eager"}, False):
        actor, critic = make_actor(), make_critic()
        torch.manual_seed(3)
        critic.module = Counts(4, 1)
        loss = DualClipPPOLoss(actor, critic)
        options = {"minibatch_size": 8, "seed": 0, "compile": compile}
        update = ppo_update(loss, torch.optim.SGD(loss.parameters(), lr=0.1), **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for batch in batches:
                update(batch.clone())
        results.append(nn.utils.parameters_to_vector(loss.parameters()))
        assert any("changes in each call" in str(x.message) for x in said) == bool(compile)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("nonfinite", [None, "skip"])
def test_a_kl_of_minus_infinity_stops(nonfinite: Any):
    for compile in ({"backend": "eager"}, False):
        loss = ClipPPOLoss(make_actor(), make_critic(), functional=False)
        stopper = KLEarlyStopper(0.5, kl_key="kl_approx")
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        own = {"stopper": stopper, "nonfinite": nonfinite, "compile": compile}
        step = TrainingStep(loss, optimizer, **own)
        for _ in range(2):
            step(make_minibatch(make_actor(), 8))
        minibatch = make_minibatch(make_actor(), 8)
        minibatch["action_log_prob"][0] = -torch.inf
        minibatch["advantage"][0] = 1.0
        with pytest.warns(RuntimeWarning, match="KL divergence"):
            assert not step(minibatch)["stepped"]
        assert step.stopped
        assert all(p.isfinite().all() for p in loss.parameters())


@pytest.mark.parametrize("nonfinite", [None, "skip"])
@pytest.mark.parametrize("kl_key", ["kl", "kl_approx"])
def test_a_kl_that_is_not_finite_decides_as_in_eager_mode(nonfinite: Any, kl_key: str):
    found = []
    for compile in ({"backend": "eager"}, False):
        loss = make_loss()
        stopper = KLEarlyStopper(0.5, kl_key=kl_key, check_every=2)
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        own = {"stopper": stopper, "nonfinite": nonfinite, "compile": compile}
        step = TrainingStep(loss, optimizer, **own)
        minibatches = [make_minibatch(make_actor(), 8) for _ in range(4)]
        minibatches[2]["action_log_prob"][0] = -torch.inf
        minibatches[3]["action_log_prob"][0] = torch.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps = [bool(step(minibatch)["stepped"]) for minibatch in minibatches]
        found.append((steps, step.stopped))
    assert found[0] == found[1]


class Switched(nn.Linear):
    """Uses its bias, or does not."""

    uses_bias = False

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias if self.uses_bias else None)


@pytest.mark.parametrize("first", [False, True])
def test_a_parameter_that_is_used_later_or_no_more(first: bool):
    pair = Pair(torch.optim.AdamW, weight_decay=0.1)
    layers = []
    for step in pair.steps:
        critic = step.loss.critic_network
        layer = Switched(4, 1).double()
        layer.load_state_dict(critic.module.state_dict())
        layer.uses_bias = first
        critic.module = layer
        layers.append(layer)
        step.optimizer = torch.optim.AdamW(step.loss.parameters(), lr=0.01, weight_decay=0.1)
    pair()
    for layer in layers:
        layer.uses_bias = not first
    pair()
    for layer in layers:
        layer.uses_bias = first
    pair()
    assert pair.steps[0].extra_repr().endswith("compiled")


def test_a_copy_of_a_compiled_step_captures_its_own_graph():
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile={"backend": "eager"})
    minibatch = make_minibatch(make_actor(), 8)
    for _ in range(2):
        step(minibatch)
    other = copy.deepcopy(step)
    for _ in range(2):
        for one in (step, other):
            one(minibatch)
    for own, expected in zip(step.loss.parameters(), other.loss.parameters(), strict=True):
        assert own is not expected
        torch.testing.assert_close(own, expected)


def test_a_hook_on_the_loss_is_seen():
    results = []
    for compile in ({"backend": "eager"}, False):
        loss = make_loss().double()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        step = TrainingStep(loss, optimizer, compile=compile)
        minibatch = make_minibatch(make_actor(), 8).double()
        for _ in range(3):
            step(minibatch)
        handle = loss.register_forward_hook(
            lambda _, __, losses: losses.set("loss_critic", 3 * losses["loss_critic"])
        )
        for _ in range(3):
            step(minibatch)
        handle.remove()
        step(minibatch)
        results.append(nn.utils.parameters_to_vector(loss.parameters()))
    torch.testing.assert_close(*results)


def test_a_functional_loss_runs_eagerly():
    loss = DualClipPPOLoss(make_actor(), make_critic(), functional=True)
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile={"backend": "eager"})
    minibatch = make_minibatch(make_actor(), 8)
    with pytest.warns(RuntimeWarning, match="runs eagerly: functional=True.*functional=False"):
        step(minibatch)
    assert "functional=True" in repr(step)


def test_the_state_holds_the_optimizer(tmp_path: Path):
    steps = []
    for _ in range(2):
        loss = make_loss()
        steps.append(TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=0.01)))
    step, fresh = steps
    minibatches = [make_minibatch(make_actor(), 8) for _ in range(4)]
    for minibatch in minibatches[:2]:
        step(minibatch)
    torch.save(step.state_dict(), tmp_path / "step.pt")
    fresh.load_state_dict(torch.load(tmp_path / "step.pt", weights_only=True))
    for minibatch in minibatches[2:]:
        for one in steps:
            one(minibatch)
    for own, expected in zip(fresh.parameters(), step.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_a_state_of_another_optimizer_is_refused_whole():
    loss, other = make_loss(), make_loss()
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=0.01))
    step(make_minibatch(make_actor(), 8))
    before = [p.detach().clone() for p in loss.parameters()]
    sgd = TrainingStep(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="another kind of optimizer"):
        step.load_state_dict(sgd.state_dict())
    for own, expected in zip(loss.parameters(), before, strict=True):
        assert torch.equal(own, expected)
    assert step.optimizer.state[next(loss.parameters())]["step"] == 1


@pytest.mark.slow
def test_a_hundred_steps_in_one_process_are_all_compiled():
    captured: list[int] = []
    minibatch = make_minibatch(make_actor(), 8)
    for _ in range(100):
        loss = make_loss()
        options = {"backend": lambda graph, _: captured.append(1) or graph}
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile=options)
        for _ in range(3):
            step(minibatch)
        assert step.extra_repr().endswith("compiled")
    assert len(captured) == 100


def test_a_minibatch_that_lacks_an_entry_does_not_end_compiling():
    loss = make_loss()
    options = {"backend": "aot_eager"}
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile=options)
    minibatch = make_minibatch(make_actor(), 8)
    step(minibatch)
    with pytest.raises(KeyError, match="action"):
        step(minibatch.exclude("action"))
    step(minibatch)
    assert "compiled" in step.extra_repr()


def test_a_parameter_that_is_thawed_before_a_skipped_step_is_trained():
    loss = make_loss()
    optimizer = torch.optim.Adam(loss.parameters())
    step = TrainingStep(loss, optimizer, nonfinite="skip", compile={"backend": "aot_eager"})
    minibatch = make_minibatch(make_actor(), 8)
    weight = next(loss.parameters()).requires_grad_(False)
    for _ in range(2):
        step(minibatch)
    weight.requires_grad_()
    bad = minibatch.clone()
    bad["advantage"][0] = torch.nan
    assert not step(bad)["stepped"]
    before = weight.detach().clone()
    for _ in range(2):
        step(minibatch)
    assert not torch.equal(weight, before)
    assert "compiled" in step.extra_repr()


class Scaled(torch.nn.Module):
    """A layer with a parameter that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(4, 1), torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_without_dimensions_is_trained(dtype: torch.dtype):
    results = []
    for options in (False, {"backend": "aot_eager"}):
        torch.manual_seed(0)
        critic = ValueOperator(Scaled(), in_keys=["observation"])
        loss = DualClipPPOLoss(make_actor(dtype=dtype), critic).to(dtype)
        optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
        step: Any = TrainingStep(loss, optimizer, compile=options)
        minibatch = make_minibatch(make_actor(dtype=dtype), 8, dtype=dtype)
        for _ in range(3):
            step(minibatch)
        results.append(critic.module.scale)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert abs(results[1] - 2.0) > 0.1


NUMBERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("compiled", [False, {"backend": "aot_eager"}])
@pytest.mark.parametrize("seed", [1, 3, 9, 12])
def test_on_a_device_no_number_is_read_before_the_end(
    seed: int, compiled: Any, monkeypatch: pytest.MonkeyPatch
):
    """CPU tensors take the path of a device; steps, stops and skips are those of the CPU."""
    expected = run(make_case(seed, compile=False))
    for module in (eager_step, graphs):
        monkeypatch.setattr(module, "host_reads_are_free", lambda _: False)
    case, reads, found = make_case(seed, compile=compiled), [], []

    def counted(name: str) -> Any:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any) -> Any:
            frame, files = inspect.currentframe(), []
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            # Not counted: Dynamo's own; Adam's of its step counter, which is on the CPU anyway;
            # and checks of values, which are made of CPU tensors alone.
            others = ("torch/_", "torch/optim", "functional/_checks.py")
            if not any(other in file for file in files for other in others):
                reads.append((name, files[1]))
            return method(tensor, *args)

        return read

    for number, (minibatch, change) in enumerate(zip(case.minibatches, case.changes, strict=True)):
        if change is not None:
            change()
        if number == STEPS // 2:
            case.step.reset()
        with monkeypatch.context() as patch:
            for name in NUMBERS:
                patch.setattr(Tensor, name, counted(name))
            found.append(case.step(minibatch.clone()))
    case.step.settle()
    assert reads == []
    stepped = [bool(outputs["stepped"]) for outputs in found]
    assert stepped == [bool(outputs["stepped"]) for outputs in expected["outputs"]]
    for own, of_cpu in zip(case.step.loss.parameters(), expected["parameters"], strict=True):
        torch.testing.assert_close(own.detach(), of_cpu, rtol=1e-7, atol=1e-9)


class Returns(nn.Module):
    """A loss that returns what it is told to."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.tensor(2.0)), make
        self.in_keys, self.out_keys = ["observation"], ["loss_a"]

    def forward(self, minibatch: TensorDict) -> Any:
        return self.make(self.weight * minibatch["observation"].mean())


@pytest.mark.filterwarnings("ignore:Using lock_\\(\\) inside a compiled graph:UserWarning")
@pytest.mark.parametrize("compile", [False, {"backend": "eager"}])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: TensorDict({"loss_a": x, "n": {"b": x.detach()}}),
        lambda x: TensorDict({"loss_a": x}).lock_(),
        lambda x: TensorDict({"loss_a": x.reshape(1), "each": x.detach().expand(1, 3)}, [1]),
        lambda x: TensorDict({"loss_a": x, "grad_norm": x.detach(), "each": x.expand(3)}),
    ],
    ids=["nested", "locked", "with a batch size", "with our names"],
)
def test_what_a_loss_returns_may_have_any_form(make: Any, compile: Any):
    loss = Returns(make)
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), compile=compile)
    minibatch = make_minibatch(make_actor(), 8)
    mean = minibatch["observation"].mean()
    for number in range(3):
        weight = loss.weight.item()
        losses = step(minibatch)
        torch.testing.assert_close(losses["loss_a"].sum(), weight * mean)
        torch.testing.assert_close(losses["grad_norm"], mean.abs())
        assert number == 0 or ("compiled" in repr(step)) == bool(compile)
    torch.testing.assert_close(loss.weight.detach(), 2 - 0.3 * mean)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: {"loss_a": x}, TypeError, "Returns returns a dict: return a TensorDict"),
        (lambda x: TensorDict({"loss_a": {"b": x}}), ValueError, "'loss_a' is a TensorDict"),
    ],
    ids=["dict", "nested"],
)
def test_a_loss_that_returns_no_losses(make: Any, error: type[Exception], message: str):
    loss = Returns(make)
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    with pytest.raises(error, match=message):
        step(make_minibatch(make_actor(), 8))
    assert loss.weight.item() == 2.0


def test_after_a_state_is_loaded_the_first_step_is_captured_for_good(
    monkeypatch: pytest.MonkeyPatch,
):
    """A divergence of torch's that was never asked for fills a table in its first call."""
    masks = torch.ones(24, 3, dtype=torch.bool)
    logits = TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"])
    keys = {"logits": "logits", "mask": "action_mask"}
    options: Any = {"distribution_class": MaskedCategorical, "return_log_prob": True}
    actor = ProbabilisticActor(logits, in_keys=keys, **options)
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.3)
    optimizer = torch.optim.Adam(loss.parameters())
    batch = make_minibatch(make_actor(), 24)
    with torch.no_grad():
        batch.update(actor(batch.set("action_mask", masks)))
    PPOUpdate(TrainingStep(loss, optimizer))(batch.clone())  # makes Adam's state
    monkeypatch.setattr(torch.distributions.kl, "_KL_MEMOIZE", {})
    step = TrainingStep(loss, optimizer, compile={"backend": "eager"})
    PPOUpdate(step, minibatch_size=8)(batch.clone())
    assert repr(step).endswith("compiled)")


HEAD_CONSTRUCTORS = {"scale": 1.0}  # a name like that of a table of tensordict's
EVALUATED: dict[str, Any] = {"torch": torch, "scale": 1.0}  # globals of a function without a module


class UserHead(nn.Module):
    act = staticmethod(F.relu)
    table: ClassVar[dict[str, Any]] = {"act": F.relu}

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 1), F.relu
        self.evaluated = eval("lambda x: torch.tanh(x) * scale", EVALUATED)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * HEAD_CONSTRUCTORS["scale"]
        return self.act(y) + self.table["act"](-y) + self.last(y + 1) + self.evaluated(y)


def test_changes_of_the_users_code_are_seen(monkeypatch: pytest.MonkeyPatch):
    results = []
    for compile in (False, {"backend": "eager"}):
        torch.manual_seed(0)
        loss = DualClipPPOLoss(make_actor(), ValueOperator(UserHead(), in_keys=["observation"]))
        step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), compile=compile)
        minibatch = make_minibatch(make_actor(), 8)
        found = [step(minibatch.clone())["loss_critic"] for _ in range(3)]
        with monkeypatch.context() as patch:
            for change in (
                lambda patch=patch: patch.setitem(HEAD_CONSTRUCTORS, "scale", 3.0),
                lambda patch=patch: patch.setitem(EVALUATED, "scale", 3.0),
                lambda patch=patch: patch.setitem(UserHead.table, "act", F.elu),
                lambda patch=patch: patch.setattr(UserHead, "act", staticmethod(F.elu)),
            ):
                change()
                found += [step(minibatch.clone())["loss_critic"] for _ in range(2)]
        results.append(torch.stack(found))
    torch.testing.assert_close(*results)


def test_without_gradients_a_compiled_step_raises_as_an_eager_one():
    loss = make_loss()
    step = TrainingStep(
        loss, torch.optim.SGD(loss.parameters(), lr=0.1), compile={"backend": "eager"}
    )
    minibatch = make_minibatch(make_actor(), 8)
    for _ in range(2):
        step(minibatch.clone())
    before = nn.utils.parameters_to_vector(loss.parameters()).detach()
    with torch.no_grad(), pytest.raises(ValueError, match="has a gradient"):
        step(minibatch.clone())
    assert torch.equal(nn.utils.parameters_to_vector(loss.parameters()), before)


def test_an_update_without_a_step_says_what_to_write():
    loss = make_loss()
    optimizer: Any = torch.optim.Adam(loss.parameters())
    old: Any = PPOUpdate
    for options in ({}, {"max_grad_norm": 0.5}):
        with pytest.raises(TypeError, match=r"(?s)step = TrainingStep\(.*PPOUpdate\(step"):
            old(loss, optimizer, **options)


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_options_that_change_in_each_step_are_not_captured_for_ever():
    loss = make_loss()
    optimizer = torch.optim.Adam(loss.parameters())
    step = TrainingStep(loss, optimizer, compile={"backend": "eager"})
    minibatch = make_minibatch(make_actor(), 8)
    for number in range(12):
        optimizer.param_groups[0]["weight_decay"] = number / 100
        assert step(minibatch)["stepped"]
    assert "graphs were captured" in step.extra_repr()
