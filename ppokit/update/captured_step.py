"""One graph of a training step: loss, gradients, norm, clipping and, for Adam, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from ppokit._compiling import CompiledFunction
from ppokit.update.decisions import Kls, Limits, Outcome, decide, flags_of
from ppokit.update.graph_inputs import Groups, Structure


class Signature(NamedTuple):
    """The keys of a graph's outputs, constants of it."""

    keys: list[NestedKey]  #: of the row
    kinds: list[tuple[int, torch.dtype] | None]  #: dimensions and dtype; None: as in the row
    other_keys: list[NestedKey]


class Outputs(NamedTuple):
    """The outputs of a graph."""

    signature: Signature
    row: Tensor  #: the loss's outputs with one number each ``[K]``
    others: list[Tensor]  #: and those with more
    norm: Tensor  #: of all gradients together, before clipping; NaN without a step
    flags: Tensor  #: of ``flags_of``; unused with ``returns_gradients``
    gradients: list[Tensor]  #: clipped; empty if the optimizer is in the graph

    def losses(self) -> TensorDictBase:
        """Return what the loss returned, without gradient."""
        row = self.signature.keys, self.signature.kinds, self.row
        losses: Any = Outcome(None, row, self.norm, None).as_tensordict()
        return losses.update(dict(zip(self.signature.other_keys, self.others, strict=True)))


class CapturedStep:
    """A training step of one structure, captured by ``torch.compile``."""

    def __init__(self, loss: nn.Module, structure: Structure, options: Mapping[str, Any]) -> None:
        self.shapes: set[torch.Size] = set()  #: of minibatches that there is a graph for
        self.skips_guards = True  #: whether a graph is found without all of its guards
        self._compiled = CompiledFunction(
            graph_of(loss, structure),
            options,
            what=f"the training step of {type(loss).__name__}",
            on_cpu=all(p.is_cpu for p in loss.parameters()),
            constant=("structure", "values", "fixed", "state"),
        )

    @torch.no_grad()
    def __call__(self, *arguments: Any, checks: bool | None) -> Outputs:
        """Run the graph; see :class:`CompiledFunction` for ``checks``."""
        return self._compiled(*arguments, checks=checks)


class _Holder(nn.Module):
    # functional_call of torchrl's own loss modules fails under Dynamo.
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        return self.loss(minibatch)


def graph_of(loss: nn.Module, structure: Structure) -> Callable[..., Outputs]:
    """Return the function to capture."""
    holder = _Holder(loss)

    def total_loss(
        signature: Signature,
        values: list[Tensor],
        fixed: list[Tensor],
        minibatch: TensorDictBase,
        scale: Any,
    ) -> tuple[Tensor, tuple[Tensor, list[Tensor], list[Tensor]]]:
        values = [x.view(shape) for x, shape in zip(values, structure.shapes, strict=True)]
        given = zip([*values, *fixed], [*structure.names, *structure.fixed], strict=True)
        swapped = {name: x for x, names in given for name in names}
        context: Any = nullcontext()
        if structure.amp_dtype is not None:
            context = torch.autocast(values[0].device.type, structure.amp_dtype)
        with context:
            outputs = functional_call(holder, swapped, (minibatch,), tie_weights=False)
        total, aux = _collect(outputs, structure, signature)
        return total * scale, aux

    def training_step(
        minibatch: TensorDictBase,
        values: list[Tensor],
        fixed: list[Tensor],
        state: list[list[Tensor]],
        numbers: Tensor,
        halted: Tensor,
    ) -> Outputs:
        signature = Signature([], [], [])
        scale = numbers[0].float() if structure.returns_gradients else 1.0
        # As an argument of torch.func the minibatch would go through tensordict's pytree functions.
        # They change a global that the graph depends on: the next call would capture it again.
        batch = minibatch.copy()
        function = grad_and_value(
            lambda values: total_loss(signature, values, fixed, batch, scale), has_aux=True
        )
        gradients, (total, (row, kls, others)) = function(values)
        if structure.returns_gradients:
            return Outputs(signature, row, others, total, total, [g / scale for g in gradients])
        largest, limit, is_due, *rates = numbers.unbind()
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        limits = Limits(limit, is_due > 0, structure.nonfinite is not None)
        is_halted = halted[0] > 0
        decision = decide(total, norm.square(), Kls(*kls), limits, is_halted)
        if structure.clips:
            factor = torch.where(norm <= largest, 1.0, (largest / (norm + 1e-6)).clamp(max=1.0))
            gradients = [g * factor.to(g.dtype) for g in gradients]
        if structure.groups:
            _adam(structure.groups, values, gradients, state, rates, decision.stepped)
            gradients = []
        flags = flags_of(decision, kls[0], is_halted, structure.nonfinite)
        norm = torch.where(decision.stepped, norm, math.nan)
        return Outputs(signature, row, others, norm, flags, gradients)

    return training_step


class WithGradients(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the number; its gradients are those given, one for each parameter."""
        ctx.gradients = gradients
        return number.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients times a weight."""
        return None, None, *(weight * gradient for gradient in ctx.gradients)


def _collect(
    outputs: TensorDictBase, structure: Structure, signature: Signature
) -> tuple[Tensor, tuple[Tensor, list[Tensor], list[Tensor]]]:
    """Return the sum of the losses; and the row, the KLs and the other outputs of a loss."""
    keys, kinds, other_keys = signature
    total: Any = None
    row, others = [], []
    for key, value in outputs.items(True, True):
        if isinstance(key, str) and key.startswith("loss_"):
            total = value if total is None else total + value
        value = value.detach()
        if value.numel() == 1:
            keys.append(key)
            kinds.append((value.ndim, value.dtype))
            number = value.reshape(())
            row.append(number if number.is_floating_point() else number.double())
        else:
            other_keys.append(key)
            others.append(value)
    found = [outputs.get(key, None) for key in (structure.kl_key, "kl")]
    if found[0] is None and structure.needs_kl:
        raise KeyError(structure.kl_key)
    total = total.reshape(())
    kls = [torch.zeros_like(total) if kl is None else kl.detach().mean() for kl in found]
    stacked = torch.stack(row)
    kinds[:] = [None if kind == (0, stacked.dtype) else kind for kind in kinds]
    return total, (stacked, kls, others)


def _adam(
    groups: Groups,
    values: list[Tensor],
    gradients: list[Tensor],
    state: list[list[Tensor]],
    rates: list[Tensor],
    stepped: Tensor,
) -> None:
    """Step as torch's Adam and AdamW do, in place, where ``stepped`` is True.

    (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, 2019,
    arXiv:1711.05101, for the decoupled decay.)
    """
    means, squares, counts = state
    for (at, hyperparameters), rate in zip(groups, rates, strict=True):
        if not at:
            continue
        options: Any = dict(hyperparameters)
        beta1, beta2 = options["beta1"], options["beta2"]
        steps = [counts[n].squeeze().double() + 1 for n in at]
        sizes = rate / (1 - _powers(beta1, steps))
        roots = (1 - _powers(beta2, steps)).sqrt()
        for n, step, size, root in zip(at, steps, sizes.unbind(), roots.unbind(), strict=True):
            x, gradient, mean, square = values[n], gradients[n], means[n], squares[n]
            decay, new_x = options["weight_decay"], x
            if decay and options["decoupled_weight_decay"]:
                new_x = x * (1 - rate * decay).to(x.dtype)
            elif decay:
                gradient = gradient + decay * x
            new_mean = mean.lerp(gradient, 1 - beta1)
            new_square = beta2 * square + (1 - beta2) * gradient * gradient
            width = new_square.sqrt() / root.to(x.dtype) + options["eps"]
            new_x = new_x - size.to(x.dtype) * (new_mean / width)
            moved = (mean, new_mean), (square, new_square), (counts[n], step), (x, new_x)
            for old, new in moved:
                old.copy_(torch.where(stepped, new.to(old.dtype).view_as(old), old))


def _powers(base: float, exponents: list[Tensor]) -> Tensor:
    """Return a number to the power of each exponent, in float64: 1 - 0.999**2 is small.

    Inductor keeps a result with exp in memory, and recomputes others for every few numbers.
    """
    return torch.exp(torch.stack(exponents) * (math.log(base) if base else -math.inf))
