"""Checks of the arguments of a training step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ppokit._compiling import check_options, modules_of, parameters_of
from ppokit.trust_region import KLEarlyStopper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_arguments(
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    stopper: KLEarlyStopper | None,
    group: ProcessGroup | None,
    compile: bool | str | Mapping[str, Any],
) -> None:
    """Raise where an argument is of the wrong kind, out of range, or excludes another."""
    kinds: Any = {"loss": (loss, nn.Module), "optimizer": (optimizer, torch.optim.Optimizer)}
    if stopper is not None:
        kinds["stopper"] = stopper, KLEarlyStopper
    for name, (block, kind) in kinds.items():
        if not isinstance(block, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(block).__name__}.")
    if any(isinstance(x, nn.parallel.DistributedDataParallel) for x in loss.modules()):
        raise TypeError(
            "The step averages gradients over the ranks itself: leave out DistributedDataParallel."
        )
    if not hasattr(loss, "in_keys"):
        raise TypeError(
            f"{type(loss).__name__} has no in_keys, the entries of a minibatch that it reads: "
            "set in_keys = ['observation', ...]."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"The step of {type(optimizer).__name__} needs a closure, and an update evaluates "
            "each minibatch once. Use Adam, or another optimizer whose step() takes no closure."
        )
    check_trained(loss, optimizer)
    if not isinstance(compile, (bool, Mapping)) and compile != "cudagraphs":
        raise ValueError(
            f"compile must be a bool, 'cudagraphs' or options of torch.compile, got {compile!r}."
        )
    check_options(compile if isinstance(compile, Mapping) else {}, "compile")
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    if compile == "cudagraphs" and device.type != "cuda":
        raise ValueError(
            f"compile='cudagraphs' needs CUDA, and the parameters are on {device}. Move "
            "the loss before you build optimizer and step, or pass compile=True."
        )
    for name, block in (("loss", loss), ("stopper", stopper)):
        if getattr(block, "group", group) is not group:
            raise ValueError(f"The {name} has another group than the step: pass group= to both.")


def check_trained(loss: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise where the optimizer lacks a trainable parameter of the loss's actor or critic."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = parameters_of(modules_of({"loss": loss}))
    names = {names[0].removeprefix("loss."): id(p) for names, p in found}
    if names and held.issuperset(names.values()):
        return  # before the coefficient, which a device holds, is read
    if not held & {*names.values()}:
        raise ValueError(
            "None of the optimizer's parameters is a trainable one of the loss. Build the "
            "optimizer with loss.parameters()."
        )
    coefficient = getattr(loss, "critic_coeff", 1.0)
    has_critic = coefficient is not None and (
        getattr(coefficient, "is_meta", False) or bool(coefficient != 0)
    )
    networks = ["actor_network", "critic_network"][: 1 + has_critic]
    networks += [f"{network}_params" for network in networks]
    missing = [
        name
        for name, key in names.items()
        if key not in held and not {*networks}.isdisjoint(name.split("."))
    ]
    if missing:
        raise ValueError(
            f"The losses reach {len(missing)} parameters that the optimizer does not hold: "
            f"{', '.join(missing)}. Build it with loss.parameters(), or freeze them with "
            "requires_grad_(False)."
        )
