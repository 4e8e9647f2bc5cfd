"""From the losses of a minibatch to a step of the optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppokit.kernels import direct_kernel
from ppokit.update.data_parallel import DataParallel
from ppokit.update.validation import loss_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Optimization:
    """Forward in mixed precision, backward, averaging over ranks, clipping and optimiser step."""

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        amp_dtype: torch.dtype | None,
        group: ProcessGroup | None,
        check_finite: bool,
    ) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.max_grad_norm, self.amp_dtype = max_grad_norm, amp_dtype
        self.check_finite = check_finite
        self.scaler = None
        if amp_dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(self.device.type)
        self.ranks = DataParallel(group, loss)
        self._total: Tensor | None = None  # of the losses since the last step

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups; groups may be added at any time."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.parameters[0].device

    def begin(self) -> None:
        """Drop the gradients that others, or an update that was interrupted, have left."""
        self.optimizer.zero_grad()
        self._total = None
        if self.scaler is not None:  # one that was interrupted refuses to go on
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.load_state_dict(state)

    def forward(self, minibatch: TensorDictBase, loss: nn.Module | None = None) -> TensorDictBase:
        """Return the losses of a minibatch."""
        context: Any = nullcontext()
        if self.amp_dtype is not None:
            context = torch.autocast(self.device.type, self.amp_dtype)
        with context:
            return (loss or self.loss)(minibatch)

    def try_forward(
        self, minibatch: TensorDictBase
    ) -> tuple[TensorDictBase | None, Exception | None]:
        """Return the losses, or with several ranks the error that :meth:`step` raises on all."""
        try:
            return self.forward(minibatch), None
        except Exception as error:
            if not self.ranks.can_raise_together:
                raise
            return None, error

    def is_finite(self, losses: TensorDictBase) -> bool:
        """Return whether the sum of the losses is a number, or nobody looks."""
        return not self.check_finite or math.isfinite(self._sum(losses).item())

    def _sum(self, losses: TensorDictBase) -> Tensor:
        return reduce(torch.add, (losses[name] for name in loss_names(self.loss, losses)))

    def backward(self, losses: TensorDictBase, weight: float) -> None:
        """Add the gradients of the weighted sum of the losses to the gradients so far."""
        total = self._sum(losses)
        value = total.detach()
        if self.check_finite and isinstance(kl := losses.get("kl", None), Tensor):
            # A clipped loss is finite where the ratio is not.
            value = value.add(kl.detach() if kl.ndim == 0 else kl.detach().sum(), alpha=0)
        self._total = value if self._total is None else self._total + value
        if weight != 1.0:
            total = total * weight
        if self.scaler is not None:
            total = self.scaler.scale(total)
        total.backward()

    def step(self, frames: float, error: Exception | None = None) -> Tensor | None:
        """Step with the gradients of so many frames, drop them, and return their norm.

        Where losses or gradients are not finite, and that is checked, there is no step and no norm.
        An error of this rank is raised on all of them.
        """
        parameters, total = self.parameters, self._total
        if error is not None:
            total = torch.tensor(math.nan, device=self.device)
        assert total is not None, "backward() comes before step()"
        self._total = None
        total = self.ranks.average_gradients(parameters, frames, total)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        largest = self.max_grad_norm
        # On a device, a number on the host waits for it.
        length = norm.item() if norm.is_cpu or self.check_finite else math.nan
        if self.check_finite:
            length += 0 * total.item()
        if self.ranks.can_raise_together and (self.check_finite or total.is_cpu):
            if not math.isfinite(total.item()):
                self.ranks.raise_together(error)
        elif error is not None:
            raise error
        if self.check_finite and not math.isfinite(length):
            if self.scaler is not None:
                self.scaler.update()
            self.optimizer.zero_grad()
            return None
        if largest is not None and not length <= largest:
            clip_grads_with_norm_(parameters, largest, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return norm


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, in one call where there is a native kernel.

    It is infinite where its square is none of the gradients' dtype: an optimiser that keeps squares
    would keep an infinite one for ever.
    """
    kernel = direct_kernel()
    squares = NotImplemented if kernel is None else kernel.sum_of_squares(*gradients)
    if squares is NotImplemented:
        return get_total_norm(gradients, foreach=None)
    largest = torch.finfo(gradients[0].dtype).max if gradients else math.inf
    return torch.tensor(squares**0.5 if squares <= largest else squares * math.inf)
