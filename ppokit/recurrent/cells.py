"""Layers of LSTM and GRU cells over packed rows, on the native kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppokit.kernels import native_kernel


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
        gate_values = x.new_empty(frames, gates)
        hiddens, cells = x.new_empty(frames, size), x.new_empty(frames, size)
        bias = None if b_x is None or b_h is None else _row(b_x + b_h)
        weights = w_x.t().contiguous(), w_h.t().contiguous()
        native: Any = native_kernel()
        _call(
            native.lstm_forward, x, hidden, cell, *weights, bias, gate_values, hiddens, cells, sizes
        )
        ctx.save_for_backward(x, hidden, cell, w_x, w_h, gate_values, hiddens, cells)
        ctx.native, ctx.sizes = native, sizes
        ctx.set_materialize_grads(False)
        return hiddens, cells

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the inputs of :meth:`forward`."""
        _check_first_derivative()
        x, hidden, cell, w_x, w_h, gate_values, hiddens, cells = ctx.saved_tensors
        by_gates = torch.empty_like(gate_values)
        by_hidden, by_cell = torch.zeros_like(hidden), torch.zeros_like(cell)
        by_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        _call(
            ctx.native.lstm_backward,
            *(w_x.detach().contiguous(), w_h.detach().contiguous(), cell, gate_values, cells),
            *(None if by is None else by.contiguous() for by in gradients),
            *(by_gates, by_hidden, by_cell, by_x, ctx.sizes),
        )
        by_w_x = _weight_gradient(ctx.native, by_gates, x)
        by_w_h = _weight_gradient(ctx.native, by_gates, _before(hidden, hiddens, ctx.sizes))
        by_bias = by_gates.sum(0) if ctx.needs_input_grad[5] else None
        return by_x, by_hidden, by_cell, by_w_x, by_w_h, by_bias, by_bias, None


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
        gate_values, of_hidden = x.new_empty(frames, gates), x.new_empty(frames, gates)
        hiddens = x.new_empty(frames, size)
        biases = (None, None) if b_x is None or b_h is None else (_row(b_x), _row(b_h))
        weights = w_x.t().contiguous(), w_h.t().contiguous()
        native: Any = native_kernel()
        _call(
            native.gru_forward, x, hidden, *weights, *biases, gate_values, of_hidden, hiddens, sizes
        )
        ctx.save_for_backward(x, hidden, w_x, w_h, gate_values, of_hidden, hiddens)
        ctx.native, ctx.sizes = native, sizes
        return hiddens

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the inputs of :meth:`forward`."""
        _check_first_derivative()
        (by_hiddens,) = gradients
        x, hidden, w_x, w_h, gate_values, of_hidden, hiddens = ctx.saved_tensors
        by_gates, by_of_hidden = torch.empty_like(gate_values), torch.empty_like(gate_values)
        by_hidden = torch.zeros_like(hidden)
        by_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        _call(
            ctx.native.gru_backward,
            *(w_x.detach().contiguous(), w_h.detach().contiguous()),
            *(hidden, gate_values, of_hidden, hiddens, by_hiddens.contiguous()),
            *(by_gates, by_of_hidden, by_hidden, by_x, ctx.sizes),
        )
        by_w_x = _weight_gradient(ctx.native, by_gates, x)
        by_w_h = _weight_gradient(ctx.native, by_of_hidden, _before(hidden, hiddens, ctx.sizes))
        by_b_x = by_gates.sum(0) if ctx.needs_input_grad[4] else None
        by_b_h = by_of_hidden.sum(0) if ctx.needs_input_grad[5] else None
        return by_x, by_hidden, by_w_x, by_w_h, by_b_x, by_b_h, None


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of the native kernel that writes into its arguments.

    Raises:
        RuntimeError: it does not take these arguments.
    """
    if function(*arguments) is NotImplemented:
        shapes = [list(x.shape) for x in arguments if isinstance(x, Tensor)]
        raise RuntimeError(
            f"{function.__name__} of the native kernel does not take tensors of shapes {shapes}."
        )


def _check_first_derivative() -> None:
    """Raise where autograd records the backward pass."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A second derivative is asked for (create_graph=True), and ppokit's LSTMModule and "
            "GRUModule have none: the first would count as a constant. Use torchrl's."
        )


def _row(vector: Tensor) -> Tensor:
    """Return a vector as a matrix of one row, in one piece."""
    return vector.contiguous().unsqueeze(0)


def _before(first: Tensor, states: Tensor, sizes: list[int]) -> Tensor:
    """Return the state before each frame ``[F, H]`` from those after it, and the first ones."""
    parts = states.split(sizes)[:-1]
    return torch.cat([first, *(x[:n] for x, n in zip(parts, sizes[1:], strict=True))])


def _weight_gradient(native: Any, by_gates: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient ``[G, I]`` of weights that map inputs ``[F, I]`` to gates ``[F, G]``."""
    gradient = by_gates.new_empty(by_gates.shape[1], inputs.shape[1])
    _call(native.transposed_product, by_gates, inputs, gradient)
    return gradient
