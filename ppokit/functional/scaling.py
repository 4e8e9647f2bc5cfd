"""A division and a clamp in one pass over memory."""

from __future__ import annotations

import math

from torch import Tensor

from ppokit.kernels import direct_kernel


def scaled(x: Tensor, divisor: Tensor, bound: float | None = None) -> Tensor:
    """Return ``x / divisor``, between ``-bound`` and ``bound``, in the dtype of ``x``.

    Args:
        x: float tensor.
        divisor: a tensor of one element.
        bound: the bound, or None.
    """
    if x.device.type == "cpu" and (kernel := direct_kernel()) is not None:
        y = kernel.scaled(x, divisor.item(), math.inf if bound is None else bound)
        if y is not NotImplemented:
            return y
    y = x / divisor.to(x.device)
    return y if bound is None else y.clamp(-bound, bound)
