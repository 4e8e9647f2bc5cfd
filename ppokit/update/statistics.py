"""What an update tells about itself: noted on the device, read once."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor


class MinibatchNotes:
    """Losses, diagnostics and gradient norms of the minibatches of one update."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: list[list[Tensor]] = []
        self._frames: list[float] = []
        self._norms: list[Tensor] = []
        self._first_of_epoch = 0
        self.epochs = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return len(self._norms)

    def begin_epoch(self) -> None:
        """Tell apart what is noted from here on."""
        self.epochs += 1
        self._first_of_epoch = len(self._rows)

    def add(self, losses: TensorDictBase, frames: float) -> None:
        """Note what the loss returned for a minibatch of so many valid frames."""
        self._names = self._names or [str(name) for name in losses.keys()]
        self._rows.append([x.detach() if x.requires_grad else x for x in losses.values()])
        self._frames.append(frames)

    def add_step(self, norm: Tensor) -> None:
        """Note the norm of the gradients of an optimiser step, before clipping."""
        self._norms.append(norm)

    def kl_of_epoch(self, name: str) -> tuple[Tensor, Tensor]:
        """Return KL and valid frames of each minibatch of this epoch."""
        column = self._names.index(name)
        rows = self._rows[self._first_of_epoch :]
        kl = torch.stack([row[column].mean() for row in rows])
        frames = torch.tensor(self._frames[self._first_of_epoch :], dtype=torch.float64)
        return kl, frames.to(kl.device)

    def means(self) -> dict[str, Tensor]:
        """Return the means of all that was noted, each minibatch weighed by its valid frames."""
        found: dict[str, Tensor] = {}
        if self._rows:
            device = self._rows[0][0].device
            weights = torch.tensor(self._frames, dtype=torch.float64, device=device)
            weights = weights / weights.sum()
            for column, name in enumerate(self._names):
                values = torch.stack([row[column] for row in self._rows]).double()
                found[name] = (values.flatten(1).mean(1) if values.ndim > 1 else values) @ weights
        if self._norms:
            found["grad_norm"] = torch.stack(self._norms).double().mean()
        return found


def read(values: dict[str, Tensor]) -> dict[str, float]:
    """Return numbers for 0-dim tensors on one device, in one transfer."""
    if not values:
        return {}
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def settings_of(loss: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return learning rates (``"lr"``, ``"lr/<group name>"``) and the loss's coefficients."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        found[f"lr/{group['name']}" if "name" in group else "lr"] = float(group["lr"])
    for name in sorted(getattr(loss, "_all_schedulable_buffers", ())):
        coefficient = loss._buffers.get(name)
        if coefficient is not None and coefficient.numel() == 1:
            found[name] = float(coefficient)
    return found
