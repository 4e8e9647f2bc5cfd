"""Layers of LSTM and GRU cells over packed runs, on the native kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ppokit import kernels
from ppokit._calls import is_hooked_or_patched


def runs_natively(network: nn.RNNBase, x: Tensor) -> bool:
    """Return whether the native kernel has what the network needs on this input."""
    return (
        not network.proj_size
        and kernels.direct_kernel() is not None
        and kernels.has_wide_vectors()
        and not torch.is_autocast_enabled("cpu")
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == network.weight_ih_l0.dtype
        and not (network.dropout and network.training)
        and not is_hooked_or_patched(network)
    )


def run_packed(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], sizes: list[int]
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the output of packed frames ``[F, H]``, and each state after them, layer by layer.

    Args:
        network: an :class:`torch.nn.LSTM` or :class:`torch.nn.GRU`.
        x: frames ``[F, I]``: the first frames of all runs, then their second ones, and so on.
        states: before the first step ``[layers, N, H]``; an empty list stands for zeros.
        sizes: how many runs have a frame at each step; together F.
    """
    after: list[list[Tensor]] = []
    for layer in range(network.num_layers):
        names = [f"{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        parameters = [getattr(network, name, None) for name in names]
        zeros = [x.new_zeros(sizes[0], network.hidden_size)] * (1 + isinstance(network, nn.LSTM))
        hidden, *cell = [state[layer] for state in states] or zeros
        made: Any = PackedLayer.apply(sizes, x, hidden, *(cell or [None]), *parameters)
        after.append(list(made))
        x = made[0]
    return x, [list(layers) for layers in zip(*after, strict=True)]


class PackedLayer(torch.autograd.Function):
    """One layer of LSTM or GRU cells over packed runs.

    Gates and parameters are those of :class:`torch.nn.LSTM` (Hochreiter and Schmidhuber, 1997) and
    :class:`torch.nn.GRU` (Cho et al., 2014, with the reset gate after the product).
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, sizes: list[int], x: Tensor, hidden: Tensor, cell: Tensor | None, *parameters: Any
    ) -> tuple[Tensor, ...]:
        """Return hidden and, of an LSTM, cell state after each frame ``[F, H]``; GRUs have none."""
        native: Any = kernels.native_kernel()
        w_x, w_h, *biases = parameters
        function = native.gru_forward if cell is None else native.lstm_forward
        x, hidden = x.contiguous(), hidden.contiguous()
        cell = None if cell is None else cell.contiguous()
        frames, (gates, size) = len(x), w_h.shape
        of_gates, hiddens = x.new_empty(frames, gates), x.new_empty(frames, size)
        # What the gradient needs as well: cell states, or what the hidden state adds to the gates.
        extra = x.new_empty(frames, gates if cell is None else size)
        biases = (None if b is None else b.contiguous().unsqueeze(0) for b in biases)
        weights = w_x.t().contiguous(), w_h.t().contiguous()
        _call(function, x, hidden, cell, *weights, *biases, of_gates, extra, hiddens, sizes)
        ctx.save_for_backward(x, hidden, cell, w_x, w_h, of_gates, extra, hiddens)
        ctx.native, ctx.sizes = native, sizes
        ctx.set_materialize_grads(False)
        return (hiddens,) if cell is None else (hiddens, extra)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the inputs of :meth:`forward`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A second derivative is asked for (create_graph=True), and ppokit's LSTMModule and "
                "GRUModule have none: the first would count as a constant. Use torchrl's."
            )
        x, hidden, cell, w_x, w_h, of_gates, extra, hiddens = ctx.saved_tensors
        by_hiddens, *by_cells = (None if by is None else by.contiguous() for by in gradients)
        by_hiddens = torch.zeros_like(hiddens) if by_hiddens is None else by_hiddens
        by_gates, by_hidden = torch.empty_like(of_gates), torch.zeros_like(hidden)
        by_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        if cell is None:
            function, by_of_hidden, by_cell = ctx.native.gru_backward, torch.empty_like(extra), None
        else:
            function, by_of_hidden = ctx.native.lstm_backward, by_gates
            by_cell = torch.zeros_like(cell)
        _call(
            function,
            *(w_x.detach().contiguous(), w_h.detach().contiguous(), hidden, cell),
            *(of_gates, extra, hiddens, by_hiddens, *(by_cells or [None])),
            *(by_gates, by_of_hidden, by_hidden, by_cell, by_x, ctx.sizes),
        )
        parts = zip(hiddens.split(ctx.sizes)[:-1], ctx.sizes[1:], strict=True)
        before = torch.cat([hidden, *(state[:n] for state, n in parts)])
        by_w_x = _weight_gradient(ctx.native, by_gates, x)
        by_w_h = _weight_gradient(ctx.native, by_of_hidden, before)
        by_biases = zip((by_gates, by_of_hidden), ctx.needs_input_grad[6:], strict=True)
        by_biases = [by.sum(0) if needed else None for by, needed in by_biases]
        return None, by_x, by_hidden, by_cell, by_w_x, by_w_h, *by_biases


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of the native kernel that writes into its arguments."""
    if function(*arguments) is NotImplemented:
        shapes = [list(x.shape) for x in arguments if isinstance(x, Tensor)]
        raise RuntimeError(
            f"{function.__name__} of the native kernel does not take tensors of shapes {shapes}."
        )


def _weight_gradient(native: Any, by_gates: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient ``[G, I]`` of weights that map inputs ``[F, I]`` to gates ``[F, G]``."""
    gradient = by_gates.new_empty(by_gates.shape[1], inputs.shape[1])
    _call(native.transposed_product, by_gates, inputs, gradient)
    return gradient
