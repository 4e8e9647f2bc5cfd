"""The scan in plain torch: any device, any float dtype, differentiable to any order.

The recursion ``y_t = x_t + a_t * y_{t-1}`` is associative in its maps: composing the maps of two
neighbouring steps gives a map of the same form. Pairing neighbours halves the length, so the whole
scan takes ``2 log2(T)`` vectorised passes and about ``2 T`` multiply-adds (Blelloch, 1990, "Prefix
Sums and Their Applications", section 1.4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def linear_scan(x: Tensor, decay: Tensor, initial: Tensor) -> Tensor:
    """Return ``y_t = x_t + decay_t * y_{t-1}`` along the last dimension.

    Args:
        x: ``[..., T]`` with ``T >= 1``.
        decay: ``[..., T]``, of the shape and dtype of ``x``. A decay of exactly 0 is a cut: nothing
            crosses it, not even a NaN.
        initial: ``[...]``, ``y`` before the first step.
    """
    result = _LinearScan.apply(x, decay, initial)
    assert isinstance(result, Tensor)
    return result


class _LinearScan(torch.autograd.Function):
    """Backward is the same scan in the other direction: O(T) memory instead of O(T log T)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, decay: Tensor, initial: Tensor) -> Tensor:
        first = _compose(x[..., :1], decay[..., :1], initial.unsqueeze(-1))
        return _scan(torch.cat([first, x[..., 1:]], dim=-1), decay)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, decay, initial = inputs
        ctx.save_for_backward(decay, initial, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad_y,) = grad_outputs
        decay, initial, y = ctx.saved_tensors
        # dL/dx_t = dL/dy_t + decay_{t+1} * dL/dx_{t+1}; initial is an x before the first step
        end = torch.zeros_like(initial)
        grad = torch.cat([end.unsqueeze(-1), grad_y], dim=-1).flip(-1)
        following = torch.cat([decay, end.unsqueeze(-1)], dim=-1).flip(-1)
        grad = linear_scan(grad, following, end).flip(-1)
        grad_initial, grad_x = grad[..., 0], grad[..., 1:]
        previous = torch.cat([initial.unsqueeze(-1), y[..., :-1]], dim=-1)
        return grad_x, grad_x * previous, grad_initial


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    steps = x.shape[-1]
    if steps == 1:
        return x
    even, odd = slice(0, steps - 1, 2), slice(1, None, 2)
    pair_x = _compose(x[..., odd], decay[..., odd], x[..., even])
    y_odd = _scan(pair_x, _product(decay[..., odd], decay[..., even]))
    # An even step continues from the odd one before it; step 0 has none.
    y_even = _compose(x[..., 2::2], decay[..., 2::2], y_odd[..., : (steps - 1) // 2])
    y = torch.empty_like(x)
    y[..., 0] = x[..., 0]
    y[..., odd] = y_odd
    y[..., 2::2] = y_even
    return y


def _compose(x: Tensor, decay: Tensor, previous: Tensor) -> Tensor:
    # 0 * inf is NaN: without the cut, one bad frame would leak into the episode before or after it.
    return torch.where(decay == 0, x, torch.addcmul(x, decay, previous))


def _product(a: Tensor, b: Tensor) -> Tensor:
    # 0.1 ** 64 is 0 in float32, and a 0 is a cut: only a factor of 0 may make one, or a NaN would
    # stop within its own episode. Beside any other product the addend is lost in rounding.
    return torch.addcmul(a * b, a.sign(), b.sign(), value=torch.finfo(a.dtype).tiny)
