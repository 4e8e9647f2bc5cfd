"""Everyone's optimization step on the same networks and minibatches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss, TrainingStep
from tests.benchmarks.loss_contenders import (
    CLIP,
    DUAL_CLIP,
    ENTROPY,
    LOSSES,
    Model,
    PlainLoss,
    networks_alone,
)
from tests.benchmarks.timing import Call

FLOOR, OUR_LOSS = "eager floor", "ppokit's loss"
LARGEST, RATE = 0.5, 3e-4


Make = Callable[[Model, TensorDict], Call]


def _of(name: str, **options: Any) -> Make:
    """Return how a training step of our loss or of torchrl's is made."""
    return lambda model, batch: _ours(model, batch, ours=name == OUR_LOSS, **options)


def _floor(model: Model, batch: TensorDict) -> Call:
    return _step(model.parameters(), networks_alone(model, batch).run)


def _loop(loss: Callable[[TensorDict], Any], model: Model, batch: TensorDict) -> Call:
    return _step(model.parameters(), lambda: _sum(loss(batch)).backward())


PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager step": ("in an eager `TrainingStep`", {}),
    "compiled, called": (
        "in a compiled step that is called alone, with its guards",
        {"compile": True},
    ),
    "compiled, in an update": (
        "in a compiled step as `PPOUpdate` calls it, without guards",
        {"compile": True, "in_update": True},
    ),
    "compiled, Adam outside": (
        "as in an update, with a hook on Adam, which keeps Adam out of the graph",
        {"compile": True, "in_update": True, "outside": True},
    ),
}
CONTENDERS: dict[str, tuple[str, Make]] = {
    FLOOR: (
        "networks forward and backward from gradients made ready, `clip_grad_norm_`, fused Adam",
        _floor,
    ),
    "plain torch": (
        "CleanRL's loss on tensors; its norm and fused Adam as above",
        lambda model, batch: _loop(PlainLoss(model), model, batch),
    ),
    "plain torch, compiled": (
        "the same, its loss under `torch.compile`",
        lambda model, batch: _loop(torch.compile(PlainLoss(model), fullgraph=True), model, batch),
    ),
    "torchrl's loss, loop": (
        "`ClipPPOLoss(functional=False)` in the eight lines of a loop",
        lambda model, batch: _loop(_loss(model, ours=False), model, batch),
    ),
    **{
        f"{name}, {path}": (f"{loss} {about}", _of(name, **options))
        for name, loss in ((OUR_LOSS, "`DualClipPPOLoss`"), ("torchrl's loss", "`ClipPPOLoss`"))
        for path, (about, options) in PATHS.items()
    },
}
"""What is said of each, and how its step is made; what is compiled is captured there."""


def _step(parameters: list[nn.Parameter], losses: Callable[[], object]) -> Call:
    optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)

    def run() -> None:
        losses()
        nn.utils.clip_grad_norm_(parameters, LARGEST)
        optimizer.step()
        optimizer.zero_grad()

    return Call(run)


def _sum(losses: Any) -> Tensor:
    return losses[LOSSES[0]] + losses[LOSSES[1]] + losses[LOSSES[2]]


def _loss(model: Model, *, ours: bool) -> Any:
    actor, _, head = model.modules()
    options = {"clip_epsilon": CLIP, "entropy_coeff": ENTROPY}
    if ours:
        return DualClipPPOLoss(actor, head, dual_clip=DUAL_CLIP, **options)
    return ClipPPOLoss(actor, head, functional=False, **options)


def make_step(model: Model, *, ours: bool = True, outside: bool = False, **options: Any) -> Any:
    """Return a training step, with Adam where it belongs or outside of the graph."""
    loss = _loss(model, ours=ours)
    optimizer = torch.optim.Adam(loss.parameters(), lr=RATE, fused=True)
    if outside:
        optimizer.register_step_post_hook(lambda *_: None)
    return TrainingStep(loss, optimizer, max_grad_norm=LARGEST, **options)


def _ours(model: Model, batch: TensorDict, *, in_update: bool = False, **options: Any) -> Call:
    step, frames = make_step(model, **options), float(len(batch))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The training step runs eagerly")
        for _ in range(3):
            step(batch)
    if not in_update:
        return Call(lambda: step(batch))

    def prepare(_: int) -> None:
        step.begin()
        step.train_on(batch, frames)  # checks the guards

    return Call(lambda: step.train_on(batch, frames), prepare=prepare)
