"""What the layers ask of the native kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppokit.kernels import native_kernel


def kernel() -> Any:
    """Return the native kernel; the layers run where there is one."""
    return native_kernel()


def run(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function that writes into its arguments.

    Raises:
        RuntimeError: it does not take them.
    """
    if function(*arguments) is NotImplemented:
        shapes = [list(x.shape) for x in arguments if isinstance(x, Tensor)]
        raise RuntimeError(
            f"{function.__name__} of the native kernel does not take tensors of shapes {shapes}."
        )


def check_first_derivative() -> None:
    """Raise where the gradient is to have a gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A second derivative is asked for (create_graph=True), and ppokit's LSTMModule and "
            "GRUModule have none: the first would count as a constant. Use torchrl's."
        )


def row(vector: Tensor) -> Tensor:
    """Return a vector as a matrix of one row, in one piece."""
    return vector.contiguous().unsqueeze(0)


def before(first: Tensor, states: Tensor, sizes: list[int]) -> Tensor:
    """Return the state before each frame ``[F, H]`` from those after it, and the first ones."""
    parts = states.split(sizes)[:-1]
    return torch.cat([first, *(x[:n] for x, n in zip(parts, sizes[1:], strict=True))])


def weight_gradient(by_gates: Tensor, met: Tensor) -> Tensor:
    """Return the gradient of weights ``[G, I]`` that have met ``[F, I]`` and made ``[F, G]``."""
    gradient = by_gates.new_empty(by_gates.shape[1], met.shape[1])
    run(kernel().transposed_product, by_gates, met, gradient)
    return gradient
