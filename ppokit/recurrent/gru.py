"""A layer of gated recurrent units over packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppokit.recurrent.native import (
    before,
    check_first_derivative,
    kernel,
    row,
    run,
    weight_gradient,
)


class PackedGRU(torch.autograd.Function):
    """One layer of gated recurrent units over rows in time order, the longest first.

    Gates and parameters are those of :class:`torch.nn.GRU` (Cho et al., 2014, with the reset gate
    after the product).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        hidden: Tensor,
        w_x: Tensor,
        w_h: Tensor,
        b_x: Tensor | None,
        b_h: Tensor | None,
        sizes: list[int],
    ) -> Tensor:
        """Return the state after each frame ``[F, H]``.

        Args:
            ctx: of autograd.
            x: frames ``[F, I]``: the first frames of all rows, then their second ones, and so on.
            hidden: the state before the first step ``[N, H]``.
            w_x: ``[3 H, I]``, for the gates r, z, n.
            w_h: ``[3 H, H]``.
            b_x: ``[3 H]``.
            b_h: ``[3 H]``.
            sizes: how many rows have a frame at each step; together F.
        """
        x, hidden = x.contiguous(), hidden.contiguous()
        frames, (gates, size) = len(x), w_h.shape
        made, of_hidden = x.new_empty(frames, gates), x.new_empty(frames, gates)
        hiddens = x.new_empty(frames, size)
        biases = (None, None) if b_x is None or b_h is None else (row(b_x), row(b_h))
        weights = w_x.t().contiguous(), w_h.t().contiguous()
        run(kernel().gru_forward, x, hidden, *weights, *biases, made, of_hidden, hiddens, sizes)
        ctx.save_for_backward(x, hidden, w_x, w_h, made, of_hidden, hiddens)
        ctx.sizes = sizes
        return hiddens

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of what :meth:`forward` was given."""
        check_first_derivative()
        (by_hiddens,) = gradients
        x, hidden, w_x, w_h, made, of_hidden, hiddens = ctx.saved_tensors
        needs_x, needs_h, needs_w_x, needs_w_h, needs_b_x, needs_b_h, _ = ctx.needs_input_grad
        by_gates, by_of_hidden = torch.empty_like(made), torch.empty_like(made)
        by_hidden = torch.zeros_like(hidden)
        by_x = torch.empty_like(x) if needs_x else None
        run(
            kernel().gru_backward,
            *(
                w_x.detach().contiguous(),
                w_h.detach().contiguous(),
                hidden,
                made,
                of_hidden,
                hiddens,
            ),
            *(by_hiddens.contiguous(), by_gates, by_of_hidden, by_hidden, by_x, ctx.sizes),
        )
        previous = before(hidden, hiddens, ctx.sizes) if needs_w_h else None
        return (
            by_x,
            by_hidden if needs_h else None,
            weight_gradient(by_gates, x) if needs_w_x else None,
            None if previous is None else weight_gradient(by_of_hidden, previous),
            by_gates.sum(0) if needs_b_x else None,
            by_of_hidden.sum(0) if needs_b_h else None,
            None,
        )
