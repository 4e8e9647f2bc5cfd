"""From the losses of a minibatch to a step of the optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppokit.kernels import direct_kernel
from ppokit.update.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Optimization:
    """Forward in mixed precision, backward, the gradients of all ranks, clipping and step."""

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        amp_dtype: torch.dtype | None,
        group: ProcessGroup | None,
    ) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.max_grad_norm, self.amp_dtype = max_grad_norm, amp_dtype
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.scaler = None
        if amp_dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
        # A fused optimiser divides the gradients by a number as it reads them.
        self._divides = getattr(optimizer, "_step_supports_amp_scaling", False)
        averages = not isinstance(loss, nn.parallel.DistributedDataParallel)
        self.ranks = Ranks(group, self.parameters, averages=averages)
        self._names: list[str] = []
        optimizer.zero_grad()

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return what the loss makes of a minibatch."""
        context: Any = nullcontext()
        if self.amp_dtype is not None:
            context = torch.autocast(self.device.type, self.amp_dtype)
        with context:
            losses = self.loss(minibatch)
        self._names = [name for name in losses.keys() if str(name).startswith("loss_")]
        return losses

    def backward(self, losses: TensorDictBase, weight: float) -> None:
        """Add the gradients of the weighted sum of the losses to what is there."""
        total = losses[self._names[0]]
        for name in self._names[1:]:
            total = total + losses[name]
        if weight != 1.0:
            total = total * weight
        if self.scaler is not None:
            total = self.scaler.scale(total)
        total.backward()

    def step(self, frames: float) -> Tensor:
        """Step and forget the gradients, which are of so many frames; return their norm before."""
        self.ranks.average_gradients(frames)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients)
        if self.scaler is None and self._divides and self.max_grad_norm is not None:
            self._divide_and_step(norm, self.max_grad_norm)
        else:
            self._clip_and_step(norm)
        self.optimizer.zero_grad()
        return norm

    def _divide_and_step(self, norm: Tensor, largest: float) -> None:
        """Clip in the step itself, as it would take back the scale of a loss."""
        optimizer: Any = self.optimizer
        optimizer.grad_scale = ((norm.float() + 1e-6) / largest).clamp_min(1)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale

    def _clip_and_step(self, norm: Tensor) -> None:
        largest = self.max_grad_norm
        # On a device, telling whether it is larger would make the host wait.
        if largest is not None and (not norm.is_cpu or not norm.item() <= largest):
            clip_grads_with_norm_(self.parameters, largest, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, in one call where there is a native kernel."""
    kernel = direct_kernel()
    squares = NotImplemented if kernel is None else kernel.sum_of_squares(*gradients)
    if squares is NotImplemented:
        return get_total_norm(gradients, foreach=None)
    return torch.tensor(squares**0.5)
