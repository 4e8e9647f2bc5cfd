"""What is compiled takes notice of a schedule, and is not compiled again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchrl.objectives import ClipPPOLoss

from ppokit import InterpSchedule, ParameterScheduler, TrainingStep
from tests.blocks import loss_on_path, make_actor, make_critic, make_minibatch

CHANGES = 100
BACKENDS = {"fast": "aot_eager", "not fast": "eager", "torchrl's": "eager"}
# torch._dynamo makes an instance of each autograd function that it traces, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be inst:DeprecationWarning")


def line(start: float, end: float) -> InterpSchedule:
    return InterpSchedule.linear(start, end, frames=CHANGES)


def make_loss(kind: str, **options: Any) -> Any:
    options |= {"functional": False, "entropy_coeff": 0.01}
    if kind == "torchrl's":
        return ClipPPOLoss(make_actor("categorical"), make_critic(), **options)
    options |= {"dual_clip": 5.0, "critic_loss_clip": 9.0, "kl_coeff": 0.1, "fast": kind == "fast"}
    return loss_on_path(make_actor("categorical"), make_critic(), **options)


def schedules_of(loss: Any) -> dict[Any, Any]:
    lines = {
        "clip_epsilon": line(0.3, 0.1),
        "entropy_coeff": line(0.1, 0.0),
        "critic_coeff": line(1.0, 0.5),
        "dual_clip": line(5.0, 2.0),
        "critic_loss_clip": line(9.0, 0.5),
        "kl_coeff": line(0.5, 0.0),
    }
    if not getattr(loss, "_clip_value_follows", False):
        lines["clip_value"] = line(0.5, 0.1)
    return {
        name: (loss, schedule)
        for name, schedule in lines.items()
        if getattr(loss, name, None) is not None
    }


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("kind", "options", "of_step"),
    [
        ("fast", {"clip_value": 0.2}, False),
        ("fast", {"clip_value": 0.2}, True),
        pytest.param("fast", {"clip_value": True}, False, marks=pytest.mark.slow),
        pytest.param("fast", {"clip_value": True}, True, marks=pytest.mark.slow),
        ("not fast", {"clip_value": 0.2}, False),
        ("torchrl's", {}, False),  # a clip_value breaks its graph
        pytest.param("torchrl's", {}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_hundred_changes_of_everything_and_one_graph(kind: str, options: Any, of_step: bool):
    """One graph of the loss, or of a training step with Adam in it."""
    torch._dynamo.reset()
    counters.clear()
    loss = make_loss(kind, **options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    schedules = schedules_of(loss)
    assert len(schedules) >= (3 if kind == "torchrl's" else 6)
    scheduler = ParameterScheduler({**schedules, "lr": (optimizer, line(1e-2, 0.0))})
    compile_options = {"fullgraph": True, "backend": BACKENDS[kind]}
    compiled: Any = torch.compile(loss, **compile_options)
    if of_step:
        compiled = TrainingStep(loss, optimizer, compile=compile_options)
    batch = make_minibatch(make_actor("categorical"), 16)
    rates = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for frames in range(CHANGES + 1):
            scheduler.step(frames)
            torch.manual_seed(frames)
            expected = loss(batch) if frames % 20 == 0 else None
            torch.manual_seed(frames)
            losses = compiled(batch)
            if expected is not None:
                found = losses.select(*expected.keys()).to_dict()
                torch.testing.assert_close(found, expected.detach().to_dict())
            if not of_step:
                sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
                optimizer.step()
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    assert graphs() == 1
    assert len(set(rates)) == CHANGES + 1


# torch imports parts of itself as it captures.
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
def test_a_compiled_step_of_the_optimizer_takes_a_scheduled_tensor():
    """A float learning rate is a constant of the graph; a tensor is not."""
    torch._dynamo.reset()
    counters.clear()
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.0))
    scheduler = ParameterScheduler({"lr": (optimizer, line(1.0, 0.0))})

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    parameter.grad = torch.ones(2)
    step()
    captured = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for frames in range(1, CHANGES):
            scheduler.step(frames)
            before = parameter.detach().clone()
            step()
            torch.testing.assert_close(before - parameter, torch.full((2,), 1 - frames / CHANGES))
    assert graphs() == captured > 0
