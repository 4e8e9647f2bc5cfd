"""A layer of an LSTM over packed rows."""

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


class PackedLSTM(torch.autograd.Function):
    """One layer of an LSTM over rows in time order, the longest first.

    Gates and parameters are those of :class:`torch.nn.LSTM` (Hochreiter and Schmidhuber, 1997).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        hidden: Tensor,
        cell: Tensor,
        w_x: Tensor,
        w_h: Tensor,
        b_x: Tensor | None,
        b_h: Tensor | None,
        sizes: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Return hidden and cell state after each frame, both ``[F, H]``.

        Args:
            ctx: of autograd.
            x: frames ``[F, I]``: the first frames of all rows, then their second ones, and so on.
            hidden: the state before the first step ``[N, H]``.
            cell: likewise.
            w_x: ``[4 H, I]``, for the gates i, f, g, o.
            w_h: ``[4 H, H]``.
            b_x: ``[4 H]``.
            b_h: ``[4 H]``.
            sizes: how many rows have a frame at each step; together F.
        """
        x, hidden, cell = x.contiguous(), hidden.contiguous(), cell.contiguous()
        frames, (gates, size) = len(x), w_h.shape
        made = x.new_empty(frames, gates)
        hiddens, cells = x.new_empty(frames, size), x.new_empty(frames, size)
        bias = None if b_x is None or b_h is None else row(b_x + b_h)
        weights = w_x.t().contiguous(), w_h.t().contiguous()
        run(kernel().lstm_forward, x, hidden, cell, *weights, bias, made, hiddens, cells, sizes)
        ctx.save_for_backward(x, hidden, cell, w_x, w_h, made, hiddens, cells)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        return hiddens, cells

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of what :meth:`forward` was given."""
        check_first_derivative()
        by_hiddens, by_cells = gradients
        x, hidden, cell, w_x, w_h, made, hiddens, cells = ctx.saved_tensors
        needs_x, needs_h, needs_c, needs_w_x, needs_w_h, needs_b_x, needs_b_h, _ = (
            ctx.needs_input_grad
        )
        by_gates = torch.empty_like(made)
        by_hidden, by_cell = torch.zeros_like(hidden), torch.zeros_like(cell)
        by_x = torch.empty_like(x) if needs_x else None
        run(
            kernel().lstm_backward,
            *(w_x.detach().contiguous(), w_h.detach().contiguous()),
            *(cell, made, cells),
            *(None if by is None else by.contiguous() for by in (by_hiddens, by_cells)),
            *(by_gates, by_hidden, by_cell, by_x, ctx.sizes),
        )
        by_bias = by_gates.sum(0) if needs_b_x or needs_b_h else None
        return (
            by_x,
            by_hidden if needs_h else None,
            by_cell if needs_c else None,
            weight_gradient(by_gates, x) if needs_w_x else None,
            weight_gradient(by_gates, before(hidden, hiddens, ctx.sizes)) if needs_w_h else None,
            by_bias if needs_b_x else None,
            by_bias if needs_b_h else None,
            None,
        )
