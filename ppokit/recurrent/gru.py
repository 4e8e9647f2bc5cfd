"""Layers of gated recurrent units over packed runs, on the native kernel."""

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
        type(network) is nn.GRU
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
    network: nn.RNNBase, x: Tensor, state: Tensor | None, sizes: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of packed frames ``[F, H]``, and the state after each of every layer.

    Args:
        network: an :class:`torch.nn.GRU`.
        x: frames ``[F, I]``: the first frames of all runs, then their second ones, and so on.
        state: before the first step ``[layers, N, H]``; None stands for zeros.
        sizes: how many runs have a frame at each step; together F.
    """
    states: list[Tensor] = []
    for layer in range(network.num_layers):
        names = [f"{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        first = x.new_zeros(sizes[0], network.hidden_size) if state is None else state[layer]
        parameters = [getattr(network, name, None) for name in names]
        made: Any = PackedGRU.apply(x, first, *parameters, sizes)
        x = made
        states.append(x)
    return x, states


class PackedGRU(torch.autograd.Function):
    """One layer of gated recurrent units over packed runs.

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
        """Return the state after each frame ``[F, H]``."""
        x, hidden = x.contiguous(), hidden.contiguous()
        frames, (gates, size) = len(x), w_h.shape
        gate_values, of_hidden = x.new_empty(frames, gates), x.new_empty(frames, gates)
        hiddens = x.new_empty(frames, size)
        biases = (None, None) if b_x is None or b_h is None else (_row(b_x), _row(b_h))
        weights = w_x.t().contiguous(), w_h.t().contiguous()
        native: Any = kernels.native_kernel()
        _call(
            native.gru_forward, x, hidden, *weights, *biases, gate_values, of_hidden, hiddens, sizes
        )
        ctx.save_for_backward(x, hidden, w_x, w_h, gate_values, of_hidden, hiddens)
        ctx.native, ctx.sizes = native, sizes
        return hiddens

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the inputs of :meth:`forward`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A second derivative is asked for (create_graph=True), and ppokit's GRUModule has "
                "none: the first would count as a constant. Use torchrl's."
            )
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
        parts = zip(hiddens.split(ctx.sizes)[:-1], ctx.sizes[1:], strict=True)
        before = torch.cat([hidden, *(states[:n] for states, n in parts)])
        by_w_x = _weight_gradient(ctx.native, by_gates, x)
        by_w_h = _weight_gradient(ctx.native, by_of_hidden, before)
        by_b_x = by_gates.sum(0) if ctx.needs_input_grad[4] else None
        by_b_h = by_of_hidden.sum(0) if ctx.needs_input_grad[5] else None
        return by_x, by_hidden, by_w_x, by_w_h, by_b_x, by_b_h, None


def _call(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of the native kernel that writes into its arguments."""
    if function(*arguments) is NotImplemented:
        shapes = [list(x.shape) for x in arguments if isinstance(x, Tensor)]
        raise RuntimeError(
            f"{function.__name__} of the native kernel does not take tensors of shapes {shapes}."
        )


def _row(vector: Tensor) -> Tensor:
    return vector.contiguous().unsqueeze(0)


def _weight_gradient(native: Any, by_gates: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient ``[G, I]`` of weights that map inputs ``[F, I]`` to gates ``[F, G]``."""
    gradient = by_gates.new_empty(by_gates.shape[1], inputs.shape[1])
    _call(native.transposed_product, by_gates, inputs, gradient)
    return gradient
