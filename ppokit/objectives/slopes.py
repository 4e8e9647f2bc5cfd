"""Results whose derivatives are known: what comes back is multiplied by them, and that is all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppokit.kernels import direct_kernel


class Group(NamedTuple):
    """Tensors of one shape ``[*S]`` that results were computed from."""

    tensors: Sequence[Tensor]
    #: the numbers of the results that depend on them; None for one that is not wanted
    results: tuple[int | None, ...]
    #: the derivatives of each of those in all the tensors, ``[len(tensors), *S]``
    slopes: Tensor | Sequence[Tensor]


def attach(results: Sequence[Tensor], groups: Sequence[Group]) -> tuple[Tensor, ...]:
    r"""Return the results as functions of what they were computed from.

    .. math:: \bar x_j = \sum_i \bar y_i \odot s_{ij}

    where a bar marks the gradient. There is no second derivative.

    Args:
        results: numbers, computed without gradient.
        groups: what they were computed from.
    """
    inputs = [tensor for group in groups for tensor in group.tensors]
    links = tuple((len(tensors), numbers, slopes) for tensors, numbers, slopes in groups)
    return _Attached.apply(links, tuple(results), *inputs)  # pyright: ignore[reportReturnType]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, links: tuple[Any, ...], results: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Neither inputs nor outputs, and no one else's: there is nothing to watch over.
        ctx.links = links
        return results

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "A second derivative is asked for (create_graph=True), and the fast path of the "
                "loss has none: its first derivative would count as a constant. Build the loss "
                "with fast=False."
            )
        found: list[Tensor | None] = [None, None]
        for size, numbers, slopes in ctx.links:
            given = tuple(None if number is None else gradients[number] for number in numbers)
            found += _weighted(slopes, given) or [None] * size
        return tuple(found)


def _weighted(
    slopes: Tensor | Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the sums, over the results, of slopes times gradients; nothing if there are none."""
    kernel = direct_kernel() if isinstance(slopes, Tensor) else None
    sums = NotImplemented if kernel is None else kernel.weighted_slopes(slopes, gradients)
    if sums is not NotImplemented:
        return sums
    total = None
    for gradient, slope in zip(gradients, slopes, strict=True):
        if gradient is not None:
            total = gradient * slope if total is None else torch.addcmul(total, gradient, slope)
    return () if total is None else total.unbind()
