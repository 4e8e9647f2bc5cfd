"""TrainingStep does the lines of a training loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from ppokit import KLEarlyStopper, TrainingStep
from ppokit._compiling import FREE_TRACES
from ppokit.functional import _checks
from tests.blocks import Given, make_actor, make_minibatch
from tests.update.parts import make_loss, parameters_of
from tests.update.step_cases import make_case


def make_step(rate: float = 0.1, kind: Any = torch.optim.SGD, **options: Any) -> TrainingStep:
    loss = make_loss()
    return TrainingStep(loss, kind(loss.parameters(), lr=rate), **options)


def minibatch() -> TensorDict:
    return make_minibatch(make_actor(), 8)


def test_a_step_is_the_lines_of_a_loop():
    step, other = make_step(0.01, torch.optim.Adam, max_grad_norm=0.1), make_loss()
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for _ in range(3):
        frames = minibatch()
        outputs = step(frames.clone())
        losses: Any = other(frames)
        sum(x for name, x in losses.items() if name.startswith("loss_")).backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(outputs["grad_norm"], norm)
        assert outputs["stepped"]
        assert not any(x.requires_grad for x in outputs.values())
    torch.testing.assert_close(parameters_of(step.loss), parameters_of(other))


def test_errors_after_a_stop_and_in_a_backward_pass_leave_nothing_behind():
    stopper = KLEarlyStopper(0.01, tolerance=1.5)
    step, frames = make_step(stopper=stopper), minibatch()
    stopper.update(1.0)
    with pytest.raises(KeyError, match="observation"):
        step(frames.exclude("observation"))
    step.reset()

    class Fails(torch.autograd.Function):
        fails = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
            if Fails.fails:
                raise RuntimeError("out of memory")
            return grad

    kl = torch.tensor(0.01)
    loss = Given(lambda weight, _: TensorDict({"loss_a": Fails.apply(weight), "kl": kl}))
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), stopper=stopper)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(frames)
    Fails.fails = False
    assert step(frames)["stepped"]
    loss.make = lambda weight, _: TensorDict({"loss_a": weight * 1.0})
    with pytest.raises(KeyError, match="kl"):
        step(frames)


def of_mean(make: Callable[[Tensor], Any]) -> Given:
    """A loss that returns the result of a function of its weight times a mean."""
    return Given(lambda weight, batch: make(weight * batch["observation"].mean()), "observation")


@pytest.mark.filterwarnings("ignore:Using lock_\\(\\) inside a compiled graph:UserWarning")
@pytest.mark.parametrize("compile", [False, {"backend": "eager"}])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: TensorDict({"loss_a": x, "n": {"b": x.detach()}}).lock_(),
        lambda x: TensorDict({"loss_a": x.reshape(1), "each": x.detach().expand(1, 3)}, [1]),
        lambda x: TensorDict({"loss_a": x, "grad_norm": x.detach(), "each": x.expand(3)}),
    ],
    ids=["nested and locked", "with a batch size", "with the step's names"],
)
def test_losses_may_have_any_form(make: Any, compile: Any):
    loss, frames = of_mean(make), minibatch()
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1), compile=compile)
    mean = frames["observation"].mean()
    for number in range(3):
        weight = loss.weight.item()
        losses = step(frames)
        torch.testing.assert_close(losses["loss_a"].sum(), weight * mean)
        torch.testing.assert_close(losses["grad_norm"], mean.abs())
        assert number == 0 or ("compiled" in repr(step)) == bool(compile)
    torch.testing.assert_close(loss.weight.detach(), 1 - 0.3 * mean)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: {"loss_a": x}, TypeError, "Given returns a dict: return a TensorDict"),
        (lambda x: TensorDict({"loss_a": {"b": x}}), ValueError, "'loss_a' is a TensorDict"),
    ],
    ids=["dict", "nested"],
)
def test_a_loss_without_losses(make: Any, error: type[Exception], message: str):
    loss = of_mean(make)
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    with pytest.raises(error, match=message):
        step(minibatch())
    assert loss.weight.item() == 1.0


# -- devices -------------------------------------------------------------------------

NUMBERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
# Not counted: Dynamo's reads; Adam's of its step counter, which is on the CPU; and checks of
# values, which are made of CPU tensors alone.
OTHERS = ("torch/_", "torch/optim", "functional/_checks.py")


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("dual", False),
        ("masked", False),
        ("a2c", False),
        pytest.param("dual", {"backend": "eager"}, marks=pytest.mark.slow),
    ],
)
def test_on_a_device_no_number_is_read_before_the_end(
    name: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
):
    """CPU tensors take the path of a device; steps, stops and skips are those of the CPU."""
    expected, reads = make_case(name, compile=False).run(), []
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)

    def counted(name: str) -> Any:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any) -> Any:
            frame, files = inspect.currentframe(), []
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            if not any(other in file for file in files for other in OTHERS):
                reads.append((name, files[1]))
            return method(tensor, *args)

        return read

    def watched(call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            for name in NUMBERS:
                patch.setattr(Tensor, name, counted(name))
            return call()

    case = make_case(name, compile=compiled)
    found = case.run(watched)
    case.step.settle()
    # The first step of an optimizer reads whether its state begins, and a capture its gradients.
    allowed = "optimizers.py", "traces.py"
    assert [read for read in reads if not read[1].endswith(allowed)] == []
    assert len(reads) <= (1 + FREE_TRACES if compiled else 1)
    stepped = [[bool(x["stepped"]) for x in each["outputs"]] for each in (found, expected)]
    assert stepped[0] == stepped[1]
    for own, of_cpu in zip(case.step.loss.parameters(), expected["parameters"], strict=True):
        torch.testing.assert_close(own.detach(), of_cpu, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("error:This processor:UserWarning")
@pytest.mark.parametrize(
    ("found", "warns"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, False),
        ({"avx512_bf16": False, "amx_bf16": False, "avx2": True}, True),
        ({"architecture": "aarch64", "bf16": True}, False),
        ({}, False),  # unknown
    ],
)
def test_bfloat16_on_a_processor_without_it(
    found: dict[str, Any], warns: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    make_step(amp_dtype=torch.float16)
    if not warns:
        make_step(amp_dtype=torch.bfloat16)
        return
    with pytest.warns(UserWarning, match="no instructions for bfloat16.*leave out") as caught:
        make_step(amp_dtype=torch.bfloat16)
    assert caught[0].filename == __file__
