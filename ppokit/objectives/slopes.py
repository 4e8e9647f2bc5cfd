"""Results whose derivatives are known: what comes back is multiplied by them, and that is all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Slopes = Mapping[tuple[int, int], Tensor]  # by number of output and of group


def attach(
    outputs: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], slopes: Slopes
) -> Sequence[Tensor]:
    r"""Return the outputs as functions of the inputs.

    .. math:: \bar x_j = \sum_i \bar y_i \odot s_{ij}

    where a bar marks the gradient. There is no second derivative.

    Args:
        outputs: numbers, computed without gradient.
        groups: what they were computed from, in groups of tensors of one shape.
        slopes: those of output i in all tensors of group g, stacked ``[len(group), ...]``; none
            where the output does not depend on them.
    """
    sizes = tuple(len(group) for group in groups)
    inputs = [tensor for group in groups for tensor in group]
    return _Attached.apply(sizes, tuple(slopes), tuple(slopes.values()), tuple(outputs), *inputs)  # pyright: ignore[reportReturnType]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        sizes: tuple[int, ...],
        links: tuple[tuple[int, int], ...],
        slopes: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.links = sizes, links
        ctx.save_for_backward(*slopes)
        return outputs

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
        totals: list[Tensor | None] = [None] * len(ctx.sizes)
        for (i, group), slope in zip(ctx.links, ctx.saved_tensors, strict=True):
            gradient, total = gradients[i], totals[group]
            if gradient is not None:
                totals[group] = (
                    gradient * slope if total is None else torch.addcmul(total, gradient, slope)
                )
        found: list[Tensor | None] = []
        for size, total in zip(ctx.sizes, totals, strict=True):
            found += [None] * size if total is None else total.unbind()
        return None, None, None, None, *found
