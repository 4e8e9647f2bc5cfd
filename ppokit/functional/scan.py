"""The first-order linear recurrence, from which returns and advantages are made."""

from __future__ import annotations

import torch
from torch import Tensor

from ppokit.functional._checks import at_least_float32, check_float, check_same_shape
from ppokit.kernels import cpu, operator


def linear_scan(
    x: Tensor,
    decay: Tensor | float,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
    dim: int = -2,
) -> Tensor:
    r"""First-order linear recurrence along one dimension.

    .. math:: y_t = x_t + d_t \, y_{t-1}

    and with ``reverse=True``, :math:`y_t = x_t + d_t \, y_{t+1}`. There is no loop over time: the
    scan takes a number of passes logarithmic in T (Blelloch, 1990, "Prefix Sums and Their
    Applications", section 1.4). It is differentiable in ``x``, ``decay`` and ``initial``, to any
    order.

    Args:
        x: float tensor ``[*B, T, F]`` (with the default ``dim``).
        decay: the shape of ``x``, or one number for all steps. A decay of exactly 0 is a cut:
            nothing crosses it, not even a NaN.
        initial: the shape of ``x`` without ``dim``: ``y`` before the first step (after the last
            one, if reversed). None means zeros.
        reverse: run from the last step to the first.
        dim: the time dimension.

    Returns:
        A tensor of the shape and dtype of ``x``. Half types accumulate in float32.

    Raises:
        TypeError: ``x`` is not a float tensor.
        ValueError: the shapes do not match.
        IndexError: ``dim`` is not a dimension of ``x``.

    Example:
        >>> x = torch.tensor([[1.0], [1.0], [1.0]])
        >>> linear_scan(x, 0.5).squeeze(-1)
        tensor([1.0000, 1.5000, 1.7500])
        >>> linear_scan(x, 0.5, reverse=True, initial=torch.tensor([8.0])).squeeze(-1)
        tensor([2.7500, 3.5000, 5.0000])
    """
    if isinstance(decay, Tensor):
        y = cpu.linear_scan(x, decay, initial, reverse, dim)
        if y is not None:
            return y
    check_float("x", x)
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(
            f"x has shape {list(x.shape)}, which has no dimension {dim}. "
            "The convention is [*B, T, 1] with time at dim=-2; pass dim= for another layout."
        )
    work = at_least_float32(x)
    if isinstance(decay, Tensor):
        check_same_shape({"x": x, "decay": decay})
        decay = decay.to(work.dtype)
    else:
        # Float32 coefficients are exact enough for half inputs; float64 ones must not be rounded.
        decay = torch.full_like(work, decay)
    without_time = x.shape[: dim % x.ndim] + x.shape[dim % x.ndim + 1 :]
    start = work.new_zeros(without_time)
    if initial is not None:
        check_same_shape({"x without its time dimension": start, "initial": initial})
        start = initial.to(work.dtype)
    if x.numel() == 0:
        return x.clone()
    return operator.linear_scan(work, decay, start, reverse, dim).to(x.dtype)
