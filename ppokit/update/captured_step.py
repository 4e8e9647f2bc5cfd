"""One graph of a training step: loss, gradients, norm, clipping and, for Adam, the optimizer."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.optim.adam import adam

from ppokit.update.graph_inputs import Structure

_numbers = itertools.count()


class Outputs(NamedTuple):
    """What a graph returns."""

    row: Tensor  #: the loss's outputs with one number each ``[K]``
    others: list[Tensor]  #: and those with more
    norm: Tensor  #: of all gradients together, before clipping
    flags: Tensor  #: stepped, finite, KL exceeded (0 or 1), and the KL, float64 ``[4]``
    gradients: list[Tensor]  #: clipped; empty if the optimizer is in the graph


class CapturedStep:
    """A training step of one structure, captured by ``torch.compile``.

    Args:
        loss: the loss.
        structure: what is constant.
        options: arguments of ``torch.compile``.
    """

    def __init__(self, loss: nn.Module, structure: Structure, options: Mapping[str, Any]) -> None:
        self.structure = structure
        self.keys: list[NestedKey] = []  # of the row; known once the graph is captured
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []  #: shape and dtype of each
        self.other_keys: list[NestedKey] = []
        function = graph_of(loss, structure, self.keys, self.kinds, self.other_keys)
        # Dynamo limits the graphs of one code object, and remembers dynamic shapes by its name.
        name = f"training_step_{next(_numbers)}"
        code = function.__code__.replace(co_name=name)
        own = FunctionType(code, function.__globals__, name, None, function.__closure__)
        if not {"backend", "mode", "options"} & options.keys() and _has_cpp_wrapper(loss):
            options = {**options, "options": {"cpp_wrapper": True}}
        self._compiled: Any = torch.compile(own, **{"fullgraph": True, **options})
        self._shapes: set[Any] = set()

    def is_new(self, minibatch: TensorDictBase) -> bool:
        """Return whether no graph has been captured for this shape."""
        return minibatch.batch_size not in self._shapes

    def __call__(self, minibatch: TensorDictBase, *arguments: Any) -> Outputs:
        """Run the graph; capture it first if it is new."""
        with torch.no_grad():
            outputs = self._compiled(minibatch, *arguments)
        self._shapes.add(minibatch.batch_size)
        return outputs


def _has_cpp_wrapper(loss: nn.Module) -> bool:
    return platform.system() == "Linux" and all(p.is_cpu for p in loss.parameters())


class _Holder(nn.Module):
    # functional_call of torchrl's own loss modules fails under Dynamo.
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        return self.loss(minibatch)


def graph_of(
    loss: nn.Module,
    structure: Structure,
    keys: list[NestedKey],
    kinds: list[tuple[torch.Size, torch.dtype]],
    other_keys: list[NestedKey],
) -> Callable[..., Outputs]:
    """Return the function to capture; when it is traced it writes the keys of its outputs."""
    holder, names, fixed_names = _Holder(loss), structure.names, structure.fixed

    def total_loss(
        values: list[Tensor], fixed: list[Tensor], minibatch: TensorDictBase
    ) -> tuple[Tensor, tuple[Tensor, Tensor, list[Tensor]]]:
        swapped = {name: x for x, places in zip(values, names, strict=True) for name in places}
        swapped |= {
            name: x for x, places in zip(fixed, fixed_names, strict=True) for name in places
        }
        context: Any = nullcontext()
        if structure.amp_dtype is not None:
            context = torch.autocast(values[0].device.type, structure.amp_dtype)
        with context:
            outputs = functional_call(holder, swapped, (minibatch,), tie_weights=False)
        total: Any = None
        row, others = [], []
        keys.clear()
        kinds.clear()
        other_keys.clear()
        kl = None
        for key, value in outputs.items(True, True):
            if isinstance(key, str) and key.startswith("loss_"):
                total = value if total is None else total + value
            value = value.detach()
            if key == structure.kl_key:
                kl = value.mean()
            if value.numel() == 1:
                keys.append(key)
                kinds.append((value.shape, value.dtype))
                row.append(
                    value.reshape(()) if value.is_floating_point() else value.double().reshape(())
                )
            else:
                other_keys.append(key)
                others.append(value)
        if kl is None:
            if structure.needs_kl:
                raise KeyError(structure.kl_key)
            kl = torch.zeros_like(total)
        return total, (torch.stack(row), kl, others)

    def graph(
        minibatch: TensorDictBase,
        values: list[Tensor],
        fixed: list[Tensor],
        state: list[list[Tensor]],
        numbers: Tensor,
        halted: Tensor,
    ) -> Outputs:
        gradients, (total, (row, kl, others)) = grad_and_value(total_loss, has_aux=True)(
            values, fixed, minibatch
        )
        largest, limit, is_checked, *rates = numbers.unbind()
        norm = (
            torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().to(row.dtype)
        )
        finite_kl = kl.isfinite()
        exceeded = (is_checked > 0) & ~(kl <= limit) & (finite_kl | total.isfinite())
        finite = torch.ones_like(exceeded)
        if structure.checks_finite:
            finite = norm.isfinite() & total.isfinite() & finite_kl
        stepped = finite & ~exceeded & ~halted
        if structure.clips:
            factor = torch.where(norm <= largest, 1.0, (largest / (norm + 1e-6)).clamp(max=1.0))
            gradients = [g * factor.to(g.dtype) for g in gradients]
        if structure.groups:
            _adam(structure.groups, values, gradients, state, rates, stepped)
            gradients = []
        flags = torch.stack([x.double() for x in (stepped, finite, exceeded, kl)])
        return Outputs(row, others, norm, flags, gradients)

    return graph


def _adam(
    groups: Any,
    values: list[Tensor],
    gradients: list[Tensor],
    state: list[list[Tensor]],
    rates: list[Tensor],
    stepped: Tensor,
) -> None:
    """Step as torch's Adam does, in place, where ``stepped`` is True."""
    for (at, hyperparameters), rate in zip(groups, rates, strict=True):
        if not at:
            continue
        old = [[kind[n] for n in at] for kind in (values, *state)]
        new = [[x.clone() for x in kind] for kind in old]
        parameters, means, squares, steps, *largest = new
        steps = [x.squeeze().double() for x in steps]  # 1 - 0.999**2 in float32 is off by 3e-5
        new[3] = steps
        step: Any = adam
        step(
            parameters,
            [gradients[n] for n in at],
            means,
            squares,
            *(largest or [[]]),
            steps,
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=False,
            grad_scale=None,
            found_inf=None,
            has_complex=False,
            lr=rate,
            **dict(hyperparameters),
        )
        for kind, moved in zip(old, new, strict=True):
            for x, y in zip(kind, moved, strict=True):
                x.copy_(torch.where(stepped, y.view_as(x), x))


def announce(loss: nn.Module) -> None:
    """Print what is going to take some seconds."""
    print(
        f"ppokit: compiling the training step of {type(loss).__name__} (some seconds; later "
        "processes find it in the cache)",
        file=sys.stderr,
        flush=True,
    )
