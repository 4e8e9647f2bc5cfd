"""Steps of an optimizer that a tensor allows or not: Adam and AdamW in a graph, others outside."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import adam, lr_scheduler  # pyright: ignore[reportAttributeAccessIssue]
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_adam = adam.adam
STATE = ("exp_avg", "exp_avg_sq", "step")


class Group(NamedTuple):
    """Parameters and options of a group."""

    at: tuple[int, ...]  #: positions of its parameters among those that are trained
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


def groups_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> tuple[Group, ...] | None:
    """Return the groups of an Adam or AdamW, or None: the optimizer steps outside of the graph."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or steps_otherwise(optimizer):
        return None
    position, groups = {id(p): n for n, p in enumerate(parameters)}, []
    for group in optimizer.param_groups:
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        rare = group.get("amsgrad") or group.get("maximize") or group.get("differentiable")
        if rare or any(isinstance(x, Tensor) for x in numbers):
            return None
        at = tuple(position[id(p)] for p in group["params"] if id(p) in position)
        decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        beta1, beta2, eps, decay = numbers
        groups.append(Group(at, beta1, beta2, eps, decay, bool(decoupled)))
    return tuple(groups)


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Set gradients as autograd does: each in a memory that no other has, strided as its parameter.

    torch's fused optimizers read both in the order of their memory.
    """
    taken = set[int]()
    for p, gradient in zip(parameters, gradients, strict=True):
        gradient = gradient.view_as(p)
        if gradient.stride() != p.stride() or gradient.data_ptr() in taken:
            gradient = torch.empty_like(p).copy_(gradient)
        taken.add(gradient.data_ptr())
        p.grad = gradient


def steps_otherwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook or a wrapper does more in a step; a scheduler's wrapper does not."""
    step: Any = vars(optimizer).get("step")
    is_of_scheduler = getattr(step, "__globals__", {}) is vars(lr_scheduler)
    is_plain = is_of_scheduler and inspect.unwrap(step) is inspect.unwrap(type(optimizer).step)
    hooks = (x for k, x in vars(optimizer).items() if "step_" in k and k.endswith("hooks"))
    return (
        any(hooks)
        or any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks))
        or not (step is None or is_plain)
        or not type(optimizer).step.__module__.startswith("torch.optim.")  # replaced in the class
        or adam.adam is not _adam
    )


def adam_step(
    groups: Sequence[Group],
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: Sequence[Sequence[Tensor]],
    rates: Sequence[Tensor],
    stepped: Tensor,
) -> None:
    """Step as torch's Adam and AdamW do, in place, where ``stepped`` is True.

    ``state`` is the lists of :data:`STATE`. (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1;
    Loshchilov and Hutter, 2019, arXiv:1711.05101, for the decoupled decay.)
    """
    means, squares, counts = state
    for group, rate in zip(groups, rates, strict=True):
        if not group.at:
            continue
        beta1, beta2, decay = group.beta1, group.beta2, group.weight_decay
        steps = [counts[n].squeeze().double() + 1 for n in group.at]
        sizes = rate / (1 - _powers(beta1, steps))
        roots = (1 - _powers(beta2, steps)).sqrt()
        for n, step, size, root in zip(
            group.at, steps, sizes.unbind(), roots.unbind(), strict=True
        ):
            x, gradient, mean, square = values[n], gradients[n], means[n], squares[n]
            new_x = x
            if decay and group.decoupled:
                new_x = x * (1 - rate * decay).to(x.dtype)
            elif decay:
                gradient = gradient + decay * x
            new_mean = mean.lerp(gradient, 1 - beta1)
            new_square = beta2 * square + (1 - beta2) * gradient * gradient
            width = new_square.sqrt() / root.to(x.dtype) + group.eps
            new_x = new_x - size.to(x.dtype) * (new_mean / width)
            moved = (mean, new_mean), (square, new_square), (counts[n], step), (x, new_x)
            for old, new in moved:
                old.copy_(torch.where(stepped, new.to(old.dtype).view_as(old), old))


def _powers(base: float, exponents: Sequence[Tensor]) -> Tensor:
    """Return a number to the power of each exponent, in float64: 1 - 0.999**2 is small.

    Inductor keeps a result with exp in memory, and recomputes others for every few numbers.
    """
    return torch.exp(torch.stack(list(exponents)) * (math.log(base) if base else -math.inf))


@torch.no_grad()
def step_where(stepped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer where a tensor is True; else parameters and state stay as they are.

    A fused optimizer skips the step by itself. For others, parameters and state are copied first;
    if they count steps on the host (Adam without ``fused`` or ``capturable``), it waits once. The
    first step of a parameter waits, too: only the optimizer knows how its state begins.
    """
    parts: Any = optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        {name: x for name, x in optimizer.state.get(p, {}).items() if isinstance(x, Tensor)}
        for p in parameters
    ]
    has_state = [bool(x) for p, x in zip(parameters, states, strict=True) if p.grad is not None]
    if all(has_state) and all(group.get("fused") for group in optimizer.param_groups):
        parts.grad_scale, parts.found_inf = None, (~stepped).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del parts.grad_scale, parts.found_inf
        return
    before = [p.detach().clone() for p in parameters]
    states = [{name: x.clone() for name, x in state.items()} for state in states]
    optimizer.step()
    flags = {stepped.device: stepped}
    is_skipped: bool | None = None  # read if a state is new
    for parameter, old, state in zip(parameters, before, states, strict=True):
        parameter.copy_(torch.where(stepped, parameter, old))
        for name, x in [*optimizer.state.get(parameter, {}).items()]:
            if not isinstance(x, Tensor) or (stepped.is_meta and not x.is_meta):
                continue
            if name not in state and is_skipped is None and not stepped.is_meta:
                is_skipped = not stepped.item()
            if name not in state and is_skipped:
                if state:
                    del optimizer.state[parameter][name]
                else:
                    optimizer.state.pop(parameter, None)
                continue
            if x.device not in flags:
                flags[x.device] = stepped.to(x.device)
            x.copy_(torch.where(flags[x.device], x, state.get(name, x)))
