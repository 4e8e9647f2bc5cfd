"""A compiled step equals an eager one when code, options or hooks change between its calls."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchrl.modules import ValueOperator

from ppokit import GAE, DualClipPPOLoss, PPOUpdate, TrainingStep
from ppokit.update import compiled
from tests.blocks import make_actor, make_minibatch
from tests.marks import slow
from tests.update.parts import make_batch, parameters_of

EAGER = {"backend": "eager"}  # captures a graph, and runs it with torch's kernels
DTYPE = torch.float64


class Squares(nn.Module):
    """The mean squared error of a network."""

    in_keys = ("x", "y")

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, minibatch: Any) -> TensorDict:
        error = self.network(minibatch["x"]) - minibatch["y"]
        return TensorDict({"loss_a": error.square().mean()}, [])


def minibatch(size: int, seed: int) -> TensorDict:
    draws = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(size, n, generator=draws, dtype=DTYPE) for n in (3, 1))
    return TensorDict({"x": x, "y": y}, [size])


def make_step(layer: nn.Module, compile: Any, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    loss = Squares(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)).to(DTYPE))
    optimizer = torch.optim.Adam(loss.parameters(), **{"lr": 0.03} | options)
    return TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compile)


class Freezes(nn.Module):
    """Scales by a weight that a flag keeps from training."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.weight, self.is_frozen = nn.Parameter(torch.ones(4)), is_frozen

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * (self.weight.detach() if self.is_frozen else self.weight)


class Softplus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class Counts(nn.Module):
    """Scales by the number of calls, and is frozen in every second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls, self.seen = nn.Parameter(torch.ones(4)), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        weight = self.weight if len(self.seen) % 2 else self.weight.detach()
        return x * weight * (1 + self.calls / 10)


class Config:
    flag, calls, of_all = True, 0, 0


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Holder(nn.Module):
    """Scales by what each call changes in an object, containers or tensors that it holds."""

    def __init__(self, scale: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scale, self.config = scale, Config()
        self.nested, self.queue, self.names = {"a": [[1.0]]}, deque([1.0, 2.0]), {"x"}
        self.counter, self.slots = Counter({"a": 1}), Slots()
        self.mean, self.draws = torch.ones(1, dtype=DTYPE), torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.ones(1, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(self) * self.weight


def of_flag(held: Holder) -> float:
    held.config.flag = not held.config.flag
    return 1.0 + held.config.flag


def of_calls(held: Holder) -> float:
    held.config.calls = min(held.config.calls + 1, 2)
    return 1.0 + held.config.calls / 10


def of_list(held: Holder) -> float:
    held.nested["a"][0][0] = 3.0 - held.nested["a"][0][0]
    return held.nested["a"][0][0]


def of_queue(held: Holder) -> float:
    held.queue.append(held.queue.popleft())
    return held.queue[0]


def of_set(held: Holder) -> float:
    held.names.symmetric_difference_update({"y"})
    return float(len(held.names))


@torch.no_grad()
def of_tensor(held: Holder) -> Tensor:
    return held.mean.mul_(0.9).clone()


@torch.no_grad()
def of_weight(held: Holder) -> float:
    held.weight.add_(0.1)
    return 1.0


CALLS, QUEUE = 0, deque([1.0, 2.0])


def of_global(held: Holder) -> float:
    global CALLS
    CALLS = min(CALLS + 1, 2)
    return 1.0 + CALLS / 10


def of_global_queue(held: Holder) -> float:
    QUEUE.append(QUEUE.popleft())
    return QUEUE[0]


def closure() -> Callable[[Any], float]:
    calls = 0

    def of_closure(held: Holder) -> float:
        nonlocal calls
        calls = 3 - calls
        return 1.0 + calls / 10

    return of_closure


def of_counter(held: Holder) -> float:
    held.counter["a"] = 3 - held.counter["a"]
    return 1.0 + held.counter["a"] / 10


def of_slots(held: Holder) -> float:
    held.slots.calls = min(held.slots.calls + 1, 2)
    return 1.0 + held.slots.calls / 10


def of_function(held: Holder) -> float:
    of_function.calls = min(getattr(of_function, "calls", 0) + 1, 2)  # pyright: ignore
    return 1.0 + of_function.calls / 10  # pyright: ignore[reportFunctionMemberAccess]


def of_default(held: Holder, calls: list[int] = [0]) -> float:  # noqa: B006
    calls[0] = min(calls[0] + 1, 2)
    return 1.0 + calls[0] / 10


def of_class(held: Holder) -> float:
    Config.of_all = min(Config.of_all + 1, 2)
    return 1.0 + Config.of_all / 10


def of_generator(held: Holder) -> Tensor:
    return torch.rand(1, generator=held.draws, dtype=DTYPE)


IN_GRAPHS = of_flag, of_calls, of_list, of_queue, of_set, of_global, of_global_queue, closure
HELD = *IN_GRAPHS, of_class, of_tensor, of_weight, of_generator
HELD += of_counter, of_slots, of_function, of_default
FAST = of_flag, of_tensor


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("in_update", [False, True], ids=["steps", "updates"])
@pytest.mark.parametrize(
    "scale", [x if x in FAST else slow(x) for x in HELD], ids=lambda x: x.__name__
)
def test_what_a_forward_pass_changes_in_objects_that_modules_hold(
    scale: Any, in_update: bool, monkeypatch: pytest.MonkeyPatch
):
    """Trials are undone, and two calls in a row show whether a graph may go on without guards."""
    monkeypatch.setattr(compiled, "WORTH", 3)
    runs = []
    for compile in (EAGER, False):
        monkeypatch.setitem(globals(), "CALLS", 0)
        monkeypatch.setattr(Config, "of_all", 0)
        monkeypatch.setitem(globals(), "QUEUE", deque([1.0, 2.0]))
        vars(of_function).clear()
        of_default.__defaults__ = ([0],)
        step = make_step(Holder(closure() if scale is closure else scale), compile)
        update = PPOUpdate(step, minibatch_size=4, epochs=2, seed=0)
        held: Any = step.loss.network[1]
        for number in range(5):
            held.config.calls = 0
            batch = minibatch(24 if in_update else 4, number)
            update(batch) if in_update else step(batch)
        runs.append([*parameters_of(step.loss), held.mean])
        if compile and scale in IN_GRAPHS:
            assert step.extra_repr().endswith("compiled")
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


class Reaches(nn.Module):
    """Scales by a weight, and by what it gets of it in another way than by its name."""

    def __init__(self, other: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.full((4,), 1.1)), other

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight * self.other(self)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        return 2 * gradient if ctx.needs_input_grad[0] else None


WAYS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda layer: layer.__dict__.setdefault("alias", layer.weight),
    "a tensor": lambda layer: layer.__dict__.setdefault("own", torch.ones(1, requires_grad=True)),
    "requires_grad": lambda layer: 1.0 + layer.weight.requires_grad,
    "its class": lambda layer: 1.0 + isinstance(layer.weight, nn.Parameter),
    "needs_input_grad": lambda layer: Doubles.apply(layer.weight),
}


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_the_loss_reaches_in_other_ways(way: str):
    """A graph has other tensors in their place, so it would lose a part of the gradient."""
    runs = []
    for compile in (EAGER, False):
        step = make_step(Reaches(WAYS[way]), compile)
        if way in ("an attribute", "a tensor"):  # set before a trace looks at them
            found = WAYS[way](step.loss.network[1])
            if way == "a tensor":
                step.optimizer.add_param_group({"params": [found]})
        for number in range(4):
            step(minibatch(8, number))
        held = [p for group in step.optimizer.param_groups for p in group["params"]]
        runs.append([p.detach().clone() for p in held])
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


class Penalized(Squares):
    """A penalty on the parameters that are trained, and how many numbers these have."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.register_buffer("coefficient", torch.zeros((), dtype=DTYPE))

    def forward(self, minibatch: Any) -> TensorDict:
        losses, trained = super().forward(minibatch), self.parameters()
        squares = [p.square().sum() for p in trained if p.requires_grad]
        losses["loss_penalty"] = self.coefficient * torch.stack([*squares, torch.zeros(())]).sum()
        kinds = [isinstance(p, nn.Parameter) for p in self.parameters()]
        losses["parameters"] = torch.tensor(float(sum(kinds)))
        return losses


class Writes(Squares):
    """Writes an entry to its minibatch, as a priority for a replay buffer."""

    def forward(self, minibatch: Any) -> TensorDict:
        minibatch["td_error"] = (self.network(minibatch["x"]) - minibatch["y"]).detach().abs()
        return super().forward(minibatch)


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize(("kind", "reason"), [(Penalized, "requires_grad"), (Writes, "entries")])
def test_a_graph_with_other_operations_is_not_captured(kind: Any, reason: str):
    """The gradients of the penalty are 0 when a graph is captured, and differ later."""
    runs = []
    for compile in (EAGER, False):
        torch.manual_seed(0)
        loss = kind(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE))
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=0.03), compile=compile)
        for number in range(4):
            if kind is Penalized and number == 3:
                loss.coefficient.fill_(0.1)
            data = minibatch(8, number)
            runs.append([step(data).to_dict(), data.to_dict(), [*step.loss.parameters()]])
        assert compile is False or reason in step.extra_repr()
    torch.testing.assert_close(runs[:4], runs[4:], rtol=0, atol=1e-12)


class Logs(Squares):
    """Returns a text beside its loss."""

    def forward(self, minibatch: Any) -> TensorDict:
        return super().forward(minibatch).set("phase", "warmup")


def complex_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.scale = nn.Parameter(torch.ones(4, dtype=torch.complex128))
    forward = lambda module, x: nn.functional.linear(x, module.weight) * module.scale.abs()  # noqa: E731
    kind = type("Complex", (nn.Linear,), {"forward": forward})
    layer.__class__ = kind
    return layer


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("case", ["complex", "text"])
def test_parameters_and_outputs_that_no_graph_holds(case: str, optimizer: Any):
    runs = []
    for compile in (EAGER, False):
        torch.manual_seed(0)
        layer = complex_layer() if case == "complex" else nn.Tanh()
        network = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1))
        for part in network.modules():
            for name, x in part.named_parameters(recurse=False):
                if not x.is_complex():
                    setattr(part, name, nn.Parameter(x.detach().to(DTYPE)))
        loss = (Logs if case == "text" else Squares)(network)
        step = TrainingStep(loss, optimizer(loss.parameters(), lr=0.1), compile=compile)
        runs.append([step(minibatch(8, n)) for n in range(3)])
        if compile:
            reason = "a parameter is complex" if case == "complex" else "no tensors, ['phase']"
            assert reason in step.extra_repr()
        runs[-1] += [*loss.parameters()]
    for found, expected in zip(*runs, strict=True):
        if isinstance(found, TensorDict):
            assert found.keys() == expected.keys()
            found, expected = found["grad_norm"], expected["grad_norm"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Asks(nn.Module):
    """Scales by a weight, in operations that depend on whether it requires a gradient."""

    on: Tensor
    off: Tensor
    square: Tensor

    def __init__(self, scale: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.full((3,), 0.9)), scale
        for name in ("on", "off"):
            self.register_buffer(name, torch.ones(()))
        self.register_buffer("square", torch.arange(9.0).view(3, 3) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self, x)


def of_first_operation(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight if layer.weight.requires_grad else layer.weight.detach()
    return weight.exp() * x


def of_buffers(layer: Any, x: Tensor) -> Tensor:
    return x * layer.weight * (layer.on if layer.weight.requires_grad else layer.off)


def of_strides(layer: Any, x: Tensor) -> Tensor:
    square = layer.square if layer.weight.requires_grad else layer.square.t()
    return (x * layer.weight) @ square


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("scale", [of_first_operation, of_buffers, of_strides])
def test_operations_that_depend_on_requires_grad(scale: Callable[..., Tensor]):
    runs = []
    for compile in (EAGER, False):
        torch.manual_seed(0)
        loss = Squares(nn.Sequential(layer := Asks(scale), nn.Linear(3, 1)).to(DTYPE))
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=0.03), compile=compile)
        for number in range(4):
            if number == 3:
                layer.off.fill_(2.0)
            step(minibatch(8, number))
        runs.append([*step.loss.parameters()])
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


class Named(Squares):
    def forward(self, minibatch: Any) -> TensorDict:
        losses = super().forward(minibatch)
        is_trained = next(self.parameters()).requires_grad
        return losses.update({"trained" if is_trained else "frozen": torch.ones(())})


class Outside(Squares):
    """Has a gradient of a tensor that is not the optimizer's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.others = [torch.ones((), dtype=DTYPE, requires_grad=True)]

    def forward(self, minibatch: Any) -> TensorDict:
        losses = super().forward(minibatch)
        return losses.update({"loss_b": self.others[0] * losses["loss_a"]})


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("kind", [Named, Outside])
def test_names_of_outputs_and_gradients_of_other_tensors(kind: Any):
    runs = []
    for compile in (EAGER, False):
        torch.manual_seed(0)
        loss = kind(nn.Linear(3, 1).to(DTYPE))
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=0.03), compile=compile)
        outputs = [step(minibatch(8, number)).to_dict() for number in range(3)]
        runs.append((outputs, [x.grad for x in getattr(loss, "others", ())]))
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


def test_a_step_that_is_dropped_is_freed():
    step = make_step(nn.Tanh(), EAGER)
    for number in range(3):
        step(minibatch(8, number))
    assert "compiled" in step.extra_repr()
    weight = weakref.ref(step.loss.network[0].weight)
    del step
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(("layer", "most"), [(Freezes(True), 2), (nn.Tanh(), 0)])
def test_losses_are_traced_seldom(layer: Any, most: int, monkeypatch: pytest.MonkeyPatch):
    """Of a flag that alternates, and where each step is skipped, so that there is no state."""
    traces, trace = [], compiled.trace_losses
    monkeypatch.setattr(compiled, "trace_losses", lambda *x: traces.append(1) or trace(*x))
    step = make_step(layer, EAGER)
    step.nonfinite = "skip"
    for number in range(10):
        data = minibatch(8, number)
        if most:
            layer.is_frozen = number % 2 == 0
        else:
            data["x"][0] = torch.nan
        step(data)
    assert len(traces) <= most + 1


def checkpointed(layer: Any) -> Tensor:
    return checkpoint(torch.tanh, layer.weight, use_reentrant=False)  # pyright: ignore


class Reentrant(nn.Module):
    """Checkpoints its activations in a way that has no gradient in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, torch.ones(len(x), 3, dtype=x.dtype), use_reentrant=True)  # pyright: ignore


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_parameter_that_only_a_graph_would_train(monkeypatch: pytest.MonkeyPatch):
    traces, trace = [], compiled.trace_losses
    monkeypatch.setattr(compiled, "trace_losses", lambda *x: traces.append(1) or trace(*x))
    step = make_step(Reentrant(), EAGER)
    for number in range(9):
        step(minibatch(8, number))
    assert "does not train all parameters" in step.extra_repr()
    assert len(traces) <= 5


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_graph_is_captured_after_anomaly_detection():
    step = make_step(nn.Tanh(), EAGER)
    with torch.autograd.set_detect_anomaly(True):
        for number in range(3):
            step(minibatch(8, number))
        assert "anomalies" in step.extra_repr()
    step(minibatch(8, 3))
    assert step.extra_repr().endswith("compiled")


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_checkpoints_of_activations_work_beside_a_failed_capture():
    step = make_step(Reaches(checkpointed), EAGER)
    for number in range(3):
        step(minibatch(8, number))
    assert "saved tensor hooks" in step.extra_repr()
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.exp, x, use_reentrant=False).sum().backward()  # pyright: ignore
    assert x.grad is not None


class Keeps(nn.Module):
    """Keeps an activation, as for a log."""

    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        self.last = x.detach()
        return x


@torch.library.custom_op("ppokit_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    Noisy.calls += 1
    return x + Noisy.calls


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Noisy(nn.Module):
    """Calls an operator that has an effect of its own."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + noise(x.detach())


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("kind", [Keeps, Noisy])
def test_a_trace_leaves_results_and_operators_alone(kind: type[nn.Module]):
    found = []
    for compile in (False, EAGER):
        Noisy.calls = 0
        step = make_step(kind(), compile)
        for seed in range(3):
            step(minibatch(8, seed))
        found.append([*step.loss.parameters()])
        assert compile is False or "compiled" in step.extra_repr()
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize(
    "context", [partial(torch.compiler.set_stance, "force_eager"), DispatchMode]
)
def test_where_torch_compile_is_disabled_the_losses_run_once(context: Callable[[], Any]):
    step = make_step(nn.BatchNorm1d(4), EAGER)
    with context():
        for seed in range(3):
            step(minibatch(8, seed))
    assert step.loss.network[1].num_batches_tracked == 3
    assert "disables torch.compile" in step.extra_repr()
    for seed in range(2):
        step(minibatch(8, seed))
    assert step.loss.network[1].num_batches_tracked == 5


class FlipsInTheLast(nn.Module):
    """Flips a flag of an object, or swaps its layers, in minibatches of two frames."""

    def __init__(self, swaps: bool) -> None:
        super().__init__()
        self.config, self.swaps = Config(), swaps
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2 and self.swaps:
            self.a, self.b = self.b, self.a
        elif len(x) == 2:
            self.config.flag = not self.config.flag
        return self.a(x) * (1.0 + self.config.flag)


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("swaps", [slow(False), slow(True)])
def test_a_minibatch_may_change_what_the_others_depend_on(
    swaps: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled, "WORTH", 3)
    runs = []
    for compile in (EAGER, False):
        torch.manual_seed(1)
        step = make_step(FlipsInTheLast(swaps), compile)
        update = PPOUpdate(step, minibatch_size=4, epochs=4, seed=0)
        for number in range(4):
            update(minibatch(18, number))
        runs.append([p.detach().clone() for p in step.loss.parameters()])
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_hundreds_of_calls_that_no_graph_fits(monkeypatch: pytest.MonkeyPatch):
    """Dynamo raises after 256 of them."""
    monkeypatch.setattr(compiled, "TRIES", 1)
    step, twin = (make_step(Counts(), compile) for compile in (EAGER, False))
    for number in range(300):
        step(minibatch(4, number))
        twin(minibatch(4, number))
    found, expected = (list(x.loss.parameters()) for x in (step, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_running_statistics_are_those_of_eager_steps():
    """``batch_norm`` writes them without counting it."""
    found = []
    for compile in (EAGER, False):
        step = make_step(nn.BatchNorm1d(4), compile)
        for number in range(3):
            step(minibatch(8, number))
        found.append([x.clone() for x in step.loss.buffers()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def flip(step: TrainingStep) -> None:
    layer: Any = next(m for m in step.loss.modules() if isinstance(m, Freezes))
    layer.is_frozen = not layer.is_frozen


def flip_with_option(step: TrainingStep) -> None:
    flip(step)
    step.optimizer.param_groups[0]["weight_decay"] = 1e-3


def list_of_betas(step: TrainingStep) -> None:
    step.optimizer.param_groups[0]["betas"] = [0.9, 0.999]


def set_beta_in_place(step: TrainingStep) -> None:
    step.optimizer.param_groups[0]["betas"][0] = 0.0


def hook_every_optimizer(step: TrainingStep) -> Callable[[], None]:
    def raise_rate(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1

    return register_optimizer_step_pre_hook(raise_rate).remove


def replace_softplus(step: TrainingStep) -> Callable[[], None]:
    old = F.softplus
    F.softplus = lambda x: 3 * old(x)
    return lambda: setattr(F, "softplus", old)


def replace_adam(step: TrainingStep) -> Callable[[], None]:
    module: Any = import_module("torch.optim.adam")
    old = module.adam
    module.adam = lambda *args, **options: old(*args, **options | {"lr": 0.2})
    return lambda: setattr(module, "adam", old)


def replace_backward(step: TrainingStep) -> Callable[[], None]:
    old = Tensor.backward
    Tensor.backward = lambda loss, *args, **options: old(3 * loss, *args, **options)  # pyright: ignore
    return lambda: setattr(Tensor, "backward", old)


def share_memory(step: TrainingStep) -> None:
    first, last = step.loss.network[0], step.loss.network[1].first
    last.weight.data = first.weight.data


def register_again(step: TrainingStep) -> None:
    for handle in step.loss.__dict__.pop("handles", []):
        handle.remove()
    double = lambda *given: given[-1].apply(lambda x: x * len(given))  # noqa: E731
    with_kwargs = "hooked" in step.loss.__dict__
    step.loss.__dict__["hooked"] = True
    step.loss.__dict__["handles"] = [
        step.loss.register_forward_hook(HOOKS.setdefault("double", double), with_kwargs=with_kwargs)
    ]


HOOKS: dict[str, Any] = {}


class Twice(nn.Module):
    """A layer with a second weight of the first one's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        nn.init.constant_(self.first.weight, 0.3)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.first(x[:, :3])


def nothing(step: TrainingStep) -> None:
    pass


CASES: dict[str, tuple[Callable[[], nn.Module], list[Any], tuple[int, ...]]] = {
    "a flag": (lambda: Freezes(True), [flip], (8,)),
    "a flag, with another size": (lambda: Freezes(True), [flip], (8, 6)),
    "a flag, thrice": (lambda: Freezes(False), [flip, flip, flip], (8,)),
    "a flag and an option": (lambda: Freezes(False), [flip_with_option], (8,)),
    "betas in place": (nn.Tanh, [list_of_betas, set_beta_in_place], (8,)),
    "a hook of all optimizers": (nn.Tanh, [hook_every_optimizer, nothing], (8,)),
    "a function of torch": (Softplus, [replace_softplus], (8,)),
    "a network that counts": (Counts, [nothing, nothing], (8,)),
    "a function of the optimizer": (nn.Tanh, [replace_adam], (8,)),
    "backward of tensors": (nn.Tanh, [replace_backward], (8,)),
    "memory that parameters share": (Twice, [share_memory], (8,)),
    "a hook that is registered again": (nn.Tanh, [register_again, register_again], (8,)),
}


SLOW = (
    "a flag",
    "a flag, thrice",
    "a hook of all optimizers",
    "a network that counts",
    "a function of the optimizer",
    "memory that parameters share",
    "a hook that is registered again",
)


def trace(name: str, compile: Any) -> Tensor:
    """Return losses, norms and parameters of twelve steps, with changes in between."""
    make_layer, changes, sizes = CASES[name]
    step, found, undo, number = make_step(make_layer(), compile), [], [], 0
    for change in (nothing, *changes):
        undo.append(change(step))
        for _ in range(4):
            number += 1
            size = sizes[0] if change is nothing else sizes[number % len(sizes)]
            outputs = step(minibatch(size, number))
            found += [outputs["loss_a"], outputs["grad_norm"]]
            found += [p.detach().abs().sum() for p in step.loss.parameters()]
    for back in filter(None, undo):
        back()
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
@pytest.mark.parametrize("name", [*map(slow, SLOW), *(x for x in CASES if x not in SLOW)])
def test_changes_between_calls(name: str):
    torch.testing.assert_close(trace(name, EAGER), trace(name, False), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a flag, with another size", "a flag and an option"])
def test_changes_between_calls_under_inductor(name: str):
    torch.testing.assert_close(trace(name, True), trace(name, False), rtol=0, atol=1e-12)


# -- errors, threads and interrupts --------------------------------------------------------


def test_an_error_of_a_graph_is_raised_and_no_step_is_made_twice():
    is_armed = [False]

    def backend(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            outputs = graph(*arguments)
            if is_armed[0]:
                raise RuntimeError("out of memory")
            return outputs

        return run

    steps = [make_step(nn.Tanh(), compile) for compile in ({"backend": backend}, False)]
    for number in range(4):
        for step in steps:
            step(minibatch(8, number))
    is_armed[0] = True
    with pytest.raises(RuntimeError, match="out of memory"):
        steps[0](minibatch(8, 9))
    is_armed[0] = False
    steps[1](minibatch(8, 9))
    torch.testing.assert_close(*(parameters_of(step.loss) for step in steps), rtol=0, atol=1e-12)
    for step in steps:
        step(minibatch(8, 10))
    torch.testing.assert_close(*(parameters_of(step.loss) for step in steps), rtol=0, atol=1e-12)


def test_a_backend_that_cannot_compile_is_named_and_changes_nothing():
    def backend(*_: Any) -> Any:
        raise RuntimeError("no such target")

    step, eager = make_step(nn.Tanh(), {"backend": backend}), make_step(nn.Tanh(), False)
    step(minibatch(8, 0))
    with pytest.warns(RuntimeWarning, match="no graph can be captured .*no such target"):
        step(minibatch(8, 1))
    for number in (2, 3):
        step(minibatch(8, number))
    for number in range(4):
        eager(minibatch(8, number))
    assert torch.equal(parameters_of(step.loss), parameters_of(eager.loss))
    assert "no such target" in repr(step)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Scale:
    """A constant that a user's own compiled function reads."""

    value = 1.0


def test_threads_and_a_compiled_function_of_the_user(frequent_switches: None):
    """Two threads train, and a third calls a function whose guard fails in each call."""
    found: list[Any] = []
    reads: list[tuple[float, float]] = []

    @torch.compile(**EAGER)
    def scale(x: Tensor) -> Tensor:
        return x * Scale.value

    steps = [make_step(nn.Tanh(), EAGER) for _ in range(3)]
    for step in steps:  # torch's Adam computes otherwise while any thread is compiling
        step(minibatch(8, 0))

    def train() -> None:
        with torch.enable_grad():
            step = steps.pop()
            for number in range(1, 60):
                step(minibatch(8, number))
            found.append(parameters_of(step.loss))

    def read() -> None:
        for number in range(200):
            Scale.value = float(number)
            reads.append((float(scale(torch.ones(1))), Scale.value))

    train()
    threads = [threading.Thread(target=target) for target in (train, train, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Scale.value = 1.0
    assert len(found) == 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert all(x == y for x, y in reads)


def test_an_interrupt_anywhere_leaves_a_step_that_goes_on():
    """Ctrl-C at lines of the package: later steps are those of a step that was not interrupted."""
    step = make_step(nn.Tanh(), EAGER)
    for number in range(3):
        step(minibatch(8, number))
    lines = [0]

    def run(target: int) -> bool:
        lines[0] = 0

        def at_line(frame: Any, event: str, _: Any) -> Any:
            if "/ppokit/" in frame.f_code.co_filename and event == "line":
                lines[0] += 1
                if lines[0] == target:
                    raise KeyboardInterrupt
            return at_line

        tracer = sys.gettrace()
        sys.settrace(at_line)
        try:
            step(minibatch(8, 3))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(tracer)
        return False

    for target in range(1, 400, 13):
        if not run(target):
            break
    eager = TrainingStep(step.loss, step.optimizer, max_grad_norm=0.5)
    state = {key: x.clone() for key, x in step.loss.state_dict().items()}
    moments = copy.deepcopy(step.optimizer.state_dict())
    results = []
    for one in (step, eager):
        step.loss.load_state_dict(state)
        step.optimizer.load_state_dict(copy.deepcopy(moments))
        step.optimizer.zero_grad()
        one(minibatch(8, 4))
        results.append(parameters_of(step.loss))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    assert "compiled" in repr(step)


# -- updates -------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_an_advantage_that_changes_a_number_of_the_critic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "WORTH", 2)
    found = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        network = Scaled()
        critic = ValueOperator(network, ["observation"])

        class Grows(GAE):
            def forward(self, *args: Any, network: Any = network, **options: Any) -> Any:  # pyright: ignore
                network.scale = 1.3 * network.scale if network.scale < 9 else 1.0
                return super().forward(*args, **options)

        loss = DualClipPPOLoss(make_actor(), critic)
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), 1e-3), compile=compile)
        gae = Grows(gamma=0.9, lmbda=0.9, value_network=critic)
        options = {"minibatch_size": 3, "epochs": 3, "seed": 0}
        update = PPOUpdate(step, advantage=gae, recompute_advantage=True, **options)
        found.append([update(make_batch(number=n))["loss_critic"] for n in range(4)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a counter", "a list"])
def test_a_network_that_writes_what_it_reads_is_called_with_guards(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled, "WORTH", 2)

    class Decays(nn.Linear):
        calls, log = 0, ()

        def forward(self, input: Tensor) -> Tensor:
            if kind == "a counter":
                self.calls += 1
            else:
                self.log = [*self.log, 1]
            count = self.calls + len(self.log)
            return super().forward(input) * (1.0 if count < 20 else 0.5)

    found = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        loss = DualClipPPOLoss(make_actor(), ValueOperator(Decays(4, 1), ["observation"]))
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), 1e-2), compile=compile)
        update = PPOUpdate(step, minibatch_size=4, epochs=4, seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(3):
                update(make_minibatch(make_actor(), 12))
        found.append(parameters_of(loss))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


class Settings:
    count = 4


class Bank(nn.Linear):
    """Scales by the size of a tensor that is no buffer."""

    bank = torch.ones(4)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * len(self.bank)


class Counted(nn.Linear):
    """Scales by a whole number of the user's program."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * Settings.count


class Remembers(nn.Linear):
    """Scales by the size of the minibatch before."""

    last = 4

    def forward(self, input: Tensor) -> Tensor:
        last, self.last = self.last, len(input)
        return super().forward(input) * last


@pytest.mark.parametrize("layer", [slow(Bank), slow(Counted), slow(Remembers)])
def test_sizes_and_whole_numbers_that_change_between_updates(
    layer: type[nn.Linear], monkeypatch: pytest.MonkeyPatch
):
    """Dynamo captures a second size for all sizes: a form without guards holds one of them."""
    monkeypatch.setattr(compiled, "WORTH", 4)
    found = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        network: Any = layer(3, 1, dtype=DTYPE)
        loss = Squares(network)
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), 1e-2), compile=compile)
        update, losses = PPOUpdate(step, minibatch_size=8, epochs=4, seed=0), []
        for number in range(8):
            monkeypatch.setattr(Settings, "count", 4 + number // 3)
            network.bank = torch.ones(4 + number)
            losses.append(update(minibatch(30, number))["loss_a"])
        found.append(torch.tensor([*losses, *parameters_of(loss)], dtype=DTYPE))
        assert ("eager" in repr(step)) is (compile is False)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


EXACT: dict[str, float] = {"rtol": 0.0, "atol": 1e-12}


def updated(kind: Any, compile: Any, make: Any = torch.optim.Adam, **options: Any) -> Any:
    """Return a loss after two updates of 20 frames, in minibatches of 8."""
    torch.manual_seed(0)
    loss = kind(nn.Linear(3, 1, dtype=DTYPE))
    step = TrainingStep(loss, make(loss.parameters(), 1e-2), compile=compile)
    update = PPOUpdate(step, minibatch_size=8, seed=0, **options)
    for number in range(2):
        update(minibatch(20, number))
    assert ("eager" in repr(step)) is (compile is False)
    return loss


class TrainsMoreOfMany(Squares):
    """Trains its second network in minibatches of 8 frames only."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.second = nn.Linear(3, 1, dtype=DTYPE)

    def forward(self, minibatch: Any) -> TensorDict:
        losses = super().forward(minibatch)
        if len(minibatch) == 8:
            losses["loss_b"] = (self.second(minibatch["x"]) - minibatch["y"]).square().mean()
        return losses


def test_minibatches_that_train_other_parameters_in_one_update(monkeypatch: pytest.MonkeyPatch):
    """A graph without guards is that of its own layout."""
    monkeypatch.setattr(compiled, "WORTH", 3)
    runs = [updated(TrainsMoreOfMany, compile, epochs=6) for compile in (False, EAGER)]
    torch.testing.assert_close(*[[x.detach() for x in run.parameters()] for run in runs], **EXACT)


class Narrow(Squares):
    """Its first loss has a narrower dtype than its second."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.first = nn.Linear(3, 1)

    def forward(self, minibatch: Any) -> TensorDict:
        wide = super().forward(minibatch)["loss_a"]
        narrow = self.first(minibatch["x"].float()).square().mean()
        return TensorDict({"loss_a": narrow, "loss_b": wide}, [])


def test_accumulated_gradients_are_weighted_in_the_widest_dtype():
    runs = [
        updated(Narrow, compile, torch.optim.SGD, accumulate_grads=True)
        for compile in (False, EAGER)
    ]
    wide = [[x.detach() for x in run.network.parameters()] for run in runs]
    torch.testing.assert_close(*wide, **EXACT)


@pytest.mark.slow
def test_graphs_that_are_dropped_within_an_update(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "MOST_STRUCTURES", 1)
    monkeypatch.setattr(compiled, "MOST_STATIC", 1)
    found = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        loss = Squares(nn.Linear(3, 1, dtype=DTYPE))
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), 1e-2), compile=compile)
        update = PPOUpdate(step, minibatch_size=8, epochs=4, seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # more captures than are free
            for number in range(3):
                update(minibatch(30, number))
        found.append(parameters_of(loss))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_last_minibatches_of_many_sizes_share_a_graph():
    captured: list[int] = []
    options = {"backend": lambda graph, _: captured.append(1) or graph}
    loss = Squares(nn.Linear(3, 1, dtype=DTYPE))
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), 1e-2), compile=options)
    update = PPOUpdate(step, minibatch_size=8, epochs=1, seed=0)
    for size in range(17, 24):  # last minibatches of 1 to 7 frames
        update(minibatch(size, 0))
    assert len(captured) <= 6
    assert "compiled" in repr(step)


FRESH = """
import torch
from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TrainingStep
from ppokit.networks import actor_critic
actor, critic = actor_critic("CartPole-v1")
loss, captured = DualClipPPOLoss(actor, critic), []
options = {"backend": lambda graph, _: captured.append(1) or graph}
step = TrainingStep(loss, torch.optim.Adam(loss.parameters()), compile=options)
gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
update = PPOUpdate(step, advantage=gae, minibatch_size=16, seed=0)
with GymCollector("CartPole-v1", actor, num_envs=2, frames_per_batch=64) as collector:
    for _ in range(3):
        update(collector.rollout())
print(len(captured))
"""


@pytest.mark.slow
def test_a_new_process_captures_once():
    """Tables of libraries grow in the first step, and guards compare their lengths."""
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1"]
