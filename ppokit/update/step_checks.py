"""Checks of TrainingStep: its arguments, and what a loss returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._compiling import check_options, modules_of, parameters_of
from ppokit._keys import valid_mask
from ppokit._state import WholeState, check_groups
from ppokit.functional import _checks
from ppokit.trust_region import KLEarlyStopper
from ppokit.trust_region.mean_kl import find_kl

if TYPE_CHECKING:
    from ppokit.update.training_step import TrainingStep


def check_step(step: TrainingStep, compile: Any) -> None:
    """Raise where an argument is of the wrong kind, out of range, or excludes another."""
    loss, optimizer, stopper = step.loss, step.optimizer, step.stopper
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
            f"{type(loss).__name__} has no in_keys, the entries of a minibatch that it reads: set "
            "in_keys = ['observation', ...]."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"The step of {type(optimizer).__name__} needs a closure, and an update evaluates each "
            "minibatch once. Use Adam, or another optimizer whose step() takes no closure."
        )
    _check_trained(loss, optimizer)
    if not isinstance(compile, (bool, Mapping)) and compile != "cudagraphs":
        raise ValueError(
            f"compile must be a bool, 'cudagraphs' or options of torch.compile, got {compile!r}."
        )
    check_options(compile if isinstance(compile, Mapping) else {}, "compile")
    if compile == "cudagraphs" and step.device.type != "cuda":
        raise ValueError(
            f"compile='cudagraphs' needs CUDA, and the parameters are on {step.device}. Move the "
            "loss before you build optimizer and step, or pass compile=True."
        )
    for name, block in (("loss", loss), ("stopper", stopper)):
        if getattr(block, "group", step.group) is not step.group:
            raise ValueError(f"The {name} has another group than the step: pass group= to both.")


def _check_trained(loss: Any, optimizer: torch.optim.Optimizer) -> None:
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


def check_settings(step: TrainingStep, *, waits: bool = False) -> None:
    """Raise a ValueError where a number that can be set unchecked is out of range.

    These are the options of the optimizer's groups, and coefficients of the loss that were filled
    in place. Tensors on a device are read only with ``waits``. Parameters may have been replaced.
    """
    check_groups(step.optimizer.param_groups, step.optimizer, waits=waits)
    if waits or _checks.reads_are_free(step.device):
        _check_trained(step.loss, step.optimizer)
        check_buffers(step.loss)
    if (step.amp_dtype is torch.float16) != (step.scaler is not None):
        raise ValueError("amp_dtype=torch.float16 scales the losses: build another TrainingStep.")


def check_buffers(block: Any) -> None:
    """Raise a ValueError where a buffer of a block was filled with a number out of range."""
    if isinstance(block, WholeState):
        buffers = dict(block.named_buffers(recurse=False))
        block.check_state({k: x.item() if x.numel() == 1 else x for k, x in buffers.items()})


def loss_names(loss: nn.Module, losses: TensorDictBase) -> list[str]:
    """Return the names of the losses to sum, of which there must be one."""
    names = [name for name in losses.keys() if str(name).startswith("loss_")]
    if not names:
        raise TypeError(
            f"{type(loss).__name__} returns no entry that begins with 'loss_', but "
            f"{', '.join(map(str, losses.keys()))}: there is nothing to minimize."
        )
    return names


def check_losses(
    loss: Any, losses: TensorDictBase, stopper: KLEarlyStopper | None, *, kl_key: Any = None
) -> None:
    """Raise where no values of these losses can be trained with."""
    if not is_tensor_collection(losses):
        raise TypeError(
            f"{type(loss).__name__} returns a {type(losses).__name__}: return a TensorDict."
        )
    names = loss_names(loss, losses)
    for name in names:
        value = losses[name]
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"{name!r} is a {type(value).__name__} of shape {list(value.shape)}; a loss is one "
                'number. Build the loss with reduction="mean".'
            )
    if not any(losses[name].requires_grad for name in names):
        raise ValueError(
            f"None of {', '.join(names)} has a gradient. Compute them outside of torch.no_grad(), "
            "without detach() or .data."
        )
    for key in (None if stopper is None else stopper.kl_key, kl_key):
        if key is not None:
            find_kl(losses, key)


def nonfinite_error(
    minibatch: TensorDictBase, losses: TensorDictBase, mask_key: NestedKey | None
) -> FloatingPointError:
    """Return the error of a step that would have made parameters NaN."""
    names = [name for name in losses.keys() if str(name).startswith("loss_") or name == "kl"]
    numbers = {name: losses[name] for name in names if isinstance(losses[name], Tensor)}
    said = ", ".join(f"{name} is {x.double().mean():.4g}" for name, x in numbers.items())
    mask = valid_mask(minibatch, mask_key)
    valid: Any = minibatch if mask is None else minibatch[mask]
    items = valid.items(include_nested=True, leaves_only=True)
    entries = [repr(key) for key, value in items if not value.isfinite().all()]
    return FloatingPointError(
        "The gradients, losses or KL of a minibatch are not finite, here or on another rank "
        f"({said}); the parameters are as before the step. Entries of the minibatch that "
        f"are not finite: {', '.join(entries) or 'none'}. It is kept at nonfinite_minibatch of the "
        "TrainingStep. Lower the learning rate, set max_grad_norm, look for log-probabilities at "
        "the edge of a bounded distribution; or pass nonfinite='skip' to leave such steps out."
    )
