"""Results whose derivatives are known: what comes back is multiplied by them, and that is all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppokit.kernels import direct_kernel


class Group(NamedTuple):
    """Tensors of one shape ``[*S]`` that some results were computed from, and no others."""

    tensors: Sequence[Tensor]
    results: tuple[int, ...]  #: their numbers
    rows: tuple[int, ...]  #: of the slopes, one for each of those results
    #: the derivatives of results in all the tensors, ``[rows, len(tensors), *S]`` if they are one
    slopes: Tensor | Sequence[Sequence[Tensor]]


def attach(results: Sequence[Tensor], groups: Sequence[Group], *, at_once: bool) -> list[Tensor]:
    r"""Return the results as functions of what they were computed from.

    .. math:: \bar x_j = \sum_i \bar y_i \odot s_{ij}

    where a bar marks the gradient. There is no second derivative.

    Args:
        results: numbers, computed without gradient.
        groups: what they were computed from.
        at_once: one graph for all, which is faster. Otherwise results of different groups have
            graphs of their own, so that each can be run backward alone, and frees only its own.
    """
    attached = list(results)
    for together in [groups] if at_once else [[group] for group in groups]:
        numbers = [number for group in together for number in group.results]
        tensors = [tensor for group in together for tensor in group.tensors]
        links = tuple((len(group.tensors), group.rows, group.slopes) for group in together)
        found: Any = _apply(links, tuple(results[i] for i in numbers), *tensors)
        for number, result in zip(numbers, found, strict=True):
            attached[number] = result
    return attached


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, links: tuple[Any, ...], results: tuple[Tensor, ...], *tensors: Tensor
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
        first = 0
        for size, rows, slopes in ctx.links:
            by_row: list[Tensor | None] = [None] * len(slopes)
            for row, gradient in zip(rows, gradients[first : first + len(rows)], strict=True):
                by_row[row] = gradient
            first += len(rows)
            found += _weighted(slopes, tuple(by_row)) or [None] * size
        return tuple(found)


def _apply(*args: Any) -> Any:
    if torch.compiler.is_compiling():
        return _Attached.apply(*args)
    # Past what Function.apply does for torch.func, which the fast path leaves to torchrl's.
    return super(torch.autograd.Function, _Attached).apply(*args)  # pyright: ignore


def _weighted(
    slopes: Tensor | Sequence[Sequence[Tensor]], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Return the sums, over the results, of slopes times gradients; nothing if there are none."""
    kernel = direct_kernel() if isinstance(slopes, Tensor) else None
    sums = NotImplemented if kernel is None else kernel.weighted_slopes(slopes, gradients)
    if sums is not NotImplemented:
        return sums
    used = [(g, row) for g, row in zip(gradients, slopes, strict=True) if g is not None]
    totals: list[Tensor] = []
    for gradient, row in used:
        if not totals:
            totals = [gradient * slope for slope in row]
        else:
            totals = [
                torch.addcmul(total, gradient, slope)
                for total, slope in zip(totals, row, strict=True)
            ]
    return totals
