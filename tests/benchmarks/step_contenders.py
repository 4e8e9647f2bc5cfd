"""Everyone's optimization step on the same networks and minibatches."""

from __future__ import annotations

import copy
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
    Setting,
    networks_alone,
)
from tests.benchmarks.timing import Call

FLOOR = "eager floor"
LARGEST, RATE = 0.5, 3e-4


def contenders(setting: Setting, batch: TensorDict) -> dict[str, tuple[str, Call]]:
    """Return what is said of each, and its step; what is compiled is captured by three calls."""
    about = "networks forward and backward from gradients made ready, `clip_grad_norm_`, fused Adam"
    model = Model(setting)
    found = {FLOOR: (about, _step(model.parameters(), networks_alone(model, batch).run))}
    for name, about, compiled in (
        ("plain torch", "CleanRL's loss on tensors; its norm and fused Adam as above", False),
        ("plain torch, compiled", "the same, its loss under `torch.compile`", True),
    ):
        found[name] = about, _plain(Model(setting), batch, compiled=compiled)
    about = "`ClipPPOLoss(functional=False)` in the eight lines of a loop"
    found["torchrl's loss, loop"] = about, _torchrl(Model(setting), batch)
    for loss, of in (("ours", "`DualClipPPOLoss`"), ("torchrl's loss", "`ClipPPOLoss`")):
        for path, about, options in (
            ("eager step", "in a `TrainingStep`", {}),
            ("compiled, called", "`compile=True`, guards checked", {"compile": True}),
            (
                "compiled, in an update",
                "the same as `PPOUpdate` calls it, guards skipped",
                {"compile": True, "in_update": True},
            ),
            (
                "compiled, Adam outside",
                "the same, Adam with a hook, which keeps it out of the graph",
                {"compile": True, "in_update": True, "outside": True},
            ),
        ):
            call = _ours(Model(setting), batch, ours=loss == "ours", **options)
            found[f"{loss}, {path}"] = f"{of} {about}", call
    return found


def _step(parameters: list[nn.Parameter], losses: Callable[[], object]) -> Call:
    optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)

    def run() -> None:
        losses()
        nn.utils.clip_grad_norm_(parameters, LARGEST)
        optimizer.step()
        optimizer.zero_grad()

    return Call(run)


def _plain(model: Model, batch: TensorDict, *, compiled: bool) -> Call:
    loss: Any = PlainLoss(model)
    if compiled:
        loss = torch.compile(loss, fullgraph=True)
    return _step(model.parameters(), lambda: _sum(loss(batch)).backward())


def _torchrl(model: Model, batch: TensorDict) -> Call:
    loss = _loss(model, ours=False)
    return _step(model.parameters(), lambda: _sum(loss(batch)).backward())


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
            step(copy.copy(batch))
    if not in_update:
        return Call(lambda: step(batch))

    def prepare(_: int) -> None:
        step.begin()
        step.train_on(batch, frames)  # checks the guards

    return Call(lambda: step.train_on(batch, frames), prepare=prepare)
