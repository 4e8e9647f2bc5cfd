"""Targets of schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ppokit import DualClipPPOLoss, InterpSchedule, StepSchedule
from tests.blocks import make_actor, make_critic

LINE = InterpSchedule([(0, 1.0), (100, 0.0)])
CONSTANT = StepSchedule([(0, 0.5)])


class Holder:
    """Any object with an attribute."""

    def __init__(self, clip: float | None = 0.5) -> None:
        self.clip = clip


def make_optimizer(lr: Any = 0.3, kind: Any = torch.optim.Adam, **options: Any) -> Any:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "name": name} for name in ("a", "b")]
    return kind(groups, lr=lr, **options)


def make_loss(kind: Any = DualClipPPOLoss, **options: Any) -> Any:
    return kind(make_actor(), make_critic(), **options)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
