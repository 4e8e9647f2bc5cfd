"""The graph of a training step: losses, gradients, their norm, clipping, and Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.overrides import TorchFunctionMode

from ppokit.functional._checks import at_least_float32
from ppokit.update.checks import total_and_kls
from ppokit.update.decision import Limits, Outcome, decide
from ppokit.update.optimizers import Group, adam_step


class Settings(NamedTuple):
    """The options of a step that are constants of a graph."""

    device_type: str
    amp_dtype: torch.dtype | None
    kl_key: NestedKey
    needs_kl: bool  #: a stopper reads it
    clips: bool
    nonfinite: str | None
    returns_gradients: bool  #: and neither clips nor steps


#: the name of each recurrent module, and the positions of its weights among the parameters
Memories = tuple[tuple[str, tuple[int, ...]], ...]


class Structure(NamedTuple):
    """The constants of a graph; another structure needs another graph."""

    names: tuple[tuple[str, ...], ...]  #: places of each trained parameter in the loss
    fixed: tuple[tuple[str, ...], ...]  #: places of parameters that have no gradient
    scalars: tuple[int, ...]  #: positions of trained parameters without dimensions
    shared: tuple[int, ...]  #: for each, the first in the same memory; empty if all have their own
    memories: Memories  #: recurrent modules
    groups: tuple[Group, ...] | None  #: of an Adam in the graph; None if the optimizer is outside
    settings: Settings


class Signature(NamedTuple):
    """The keys of a graph's outputs, constants of it."""

    keys: list[NestedKey]  #: of the row
    kinds: list[tuple[int, torch.dtype] | None]  #: dimensions and dtype; None: as in the row
    other_keys: list[NestedKey]
    no_tensors: list[NestedKey]  #: left out


class Outputs(NamedTuple):
    """The outputs of a graph."""

    signature: Signature
    row: Tensor  #: the loss's outputs with one number each ``[K]``
    others: list[Tensor]  #: and those with more
    norm: Tensor  #: of all gradients together, before clipping; NaN without a step
    flags: Tensor  #: of the decision; unused with ``returns_gradients``
    gradients: list[Tensor]  #: clipped; empty if the optimizer is in the graph

    def outcome(self) -> Outcome:
        """Return the outcome of the step, without its decision."""
        keys, kinds, other_keys, _ = self.signature
        outcome = Outcome(None, (keys, kinds, self.row), self.norm)
        if other_keys:
            others = dict(zip(other_keys, self.others, strict=True))
            outcome.losses = outcome.as_tensordict().update(others)
        return outcome

    def losses(self) -> TensorDictBase:
        """Return what the loss returned, without gradient."""
        return self.outcome().as_tensordict()


class _FlatLinear(TorchFunctionMode):
    """Gives linear layers inputs of two dimensions: other sizes torch.func makes constants."""

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: object,
        args: Sequence[Tensor] = (),
        kwargs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return what the function returns."""
        if func is not nn.functional.linear or args[0].ndim < 3:
            return func(*args, **(kwargs or {}))
        x, *others = args
        return func(x.flatten(0, -2), *others, **(kwargs or {})).unflatten(0, x.shape[:-1])


class Holder(nn.Module):
    """Calls a loss. functional_call of torchrl's loss modules themselves fails under Dynamo."""

    def __init__(self, loss: nn.Module, memories: Memories) -> None:
        super().__init__()
        self.loss, self.memories = loss, memories

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the losses of a minibatch."""
        with _FlatLinear() if self.memories else nullcontext():
            return self.loss(minibatch)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Give recurrent modules their weights among the tensors; none are taken away again."""
        for name, places in self.memories:
            module: Any = self.get_submodule(name)
            module.graph_weights = tuple(tensors[n] for n in places) if tensors else ()


def graph_of(loss: nn.Module, structure: Structure) -> Callable[..., Outputs]:
    """Return the function to capture."""
    holder = Holder(loss, structure.memories)

    @torch.compiler.assume_constant_result
    def constants() -> Structure:  # without guards, which each call would check
        return structure

    def training_step(
        minibatch: TensorDictBase,
        values: list[Tensor],
        fixed: list[Tensor],
        state: list[list[Tensor]],
        numbers: Tensor,
        halted: Tensor,
    ) -> Outputs:
        structure, signature = constants(), Signature([], [], [], [])
        settings = structure.settings
        scale = numbers[0].float() if settings.returns_gradients else 1.0
        function = differentiated(holder, signature, structure, fixed, minibatch, scale)
        gradients, (total, (row, kls, others)) = function(values)
        if settings.returns_gradients:
            return Outputs(signature, row, others, total, total, gradients)
        largest, limit, is_due, *rates = numbers.unbind()
        squares = [at_least_float32(g).square().sum() for g in gradients]
        norm = torch.stack(squares).sum().sqrt()
        limits = Limits(limit, is_due > 0, settings.nonfinite)
        decision = decide(total, norm.square(), kls, limits, halted[0] > 0)
        if settings.clips:
            factor = torch.where(norm <= largest, 1.0, (largest / (norm + 1e-6)).clamp(max=1.0))
            gradients = [g * factor.to(g.dtype) for g in gradients]
        if structure.groups is not None:
            adam_step(structure.groups, values, gradients, state, rates, decision.stepped)
            gradients = []
        norm = torch.where(decision.stepped, norm, math.nan)
        return Outputs(signature, row, others, norm, decision.flags(), gradients)

    return training_step


def pack_numbers(
    largest: float, limits: Limits, optimizer: torch.optim.Optimizer, device: torch.device
) -> Tensor:
    """Return largest norm, KL limit, whether it is due, and the learning rates, float64."""
    numbers = [largest, limits.kl, float(limits.is_due)]
    on_device = {}
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor) and not rate.is_cpu:
            on_device[len(numbers)], rate = rate, 0.0
        numbers.append(0.0 if rate is None else float(rate))
    # torch.tensor(device=...) would wait for the device
    found = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    for position, rate in on_device.items():
        found[position] = rate
    return found


def differentiated(
    holder: Holder,
    signature: Signature,
    structure: Structure,
    fixed: list[Tensor],
    minibatch: TensorDictBase,
    scale: Any,
) -> Callable[..., Any]:
    """Return the function of the parameters that returns gradients, and :func:`total_loss`."""
    # As an argument of torch.func the minibatch would go through tensordict's pytree functions.
    # They change a global that the graph depends on: the next call would capture it again.
    batch = minibatch.copy()

    def scaled_loss(values: list[Tensor]) -> Any:
        values = [x.view(()) if n in structure.scalars else x for n, x in enumerate(values)]
        tensors, prefixes = [*values, *fixed], tuple(f"{name}." for name, _ in structure.memories)
        given = zip(tensors, [*structure.names, *structure.fixed], strict=True)
        all_names = ((name, x) for x, names in given for name in names)
        swapped = {name: x for name, x in all_names if not name.startswith(prefixes)}
        holder.give(tensors)
        run = lambda: functional_call(holder, swapped, (batch,), tie_weights=False)  # noqa: E731
        total, aux = total_loss(run, structure.settings, signature)
        holder.give(())
        return total * scale, aux

    return grad_and_value(scaled_loss, has_aux=True)


def total_loss(
    run_loss: Callable[[], TensorDictBase], settings: Settings, signature: Signature
) -> tuple[Tensor, tuple[Tensor, list[Tensor], list[Tensor]]]:
    """Return the sum of the losses, and the row, the KLs and the other outputs of a loss."""
    context = nullcontext()
    if settings.amp_dtype is not None:
        context = torch.autocast(settings.device_type, settings.amp_dtype)
    with context:
        outputs = run_loss()
    keys, kinds, other_keys, no_tensors = signature
    names = outputs.keys(True, True, is_leaf=is_leaf_nontensor)
    no_tensors += [key for key in names if not isinstance(outputs.get(key), Tensor)]
    total, kls = total_and_kls(outputs, settings.kl_key, needs_kl=settings.needs_kl)
    row, others = [], []
    for key, value in outputs.items(True, True):
        value = value.detach()
        if value.numel() == 1 and not value.is_complex():  # they go through float64
            keys.append(key)
            kinds.append((value.ndim, value.dtype))
            number = value.reshape(())
            row.append(number if number.is_floating_point() else number.double())
        else:
            other_keys.append(key)
            others.append(value)
    stacked = torch.stack(row)
    kinds[:] = [None if kind == (0, stacked.dtype) else kind for kind in kinds]
    return total, (stacked, kls, others)


class WithGradients(torch.autograd.Function):
    """A number whose gradients are known, times a scale."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, number: Tensor, gradients: list[Tensor], scale: float, *_: Tensor
    ) -> Tensor:
        """Return the number; its gradients are those given, one for each parameter."""
        ctx.gradients, ctx.scale = gradients, scale
        return number.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients times a weight."""
        weight = weight / ctx.scale
        return None, None, None, *(weight * gradient for gradient in ctx.gradients)
