"""Checks of a training step: its arguments, and the result of its loss."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._batch import Options, valid_mask
from ppokit._calls import modules_of, parameters_of
from ppokit._compiling import check_options
from ppokit.trust_region import KLEarlyStopper
from ppokit.trust_region.mean_kl import find_kl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_arguments(
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    stopper: KLEarlyStopper | None,
    group: ProcessGroup | None,
    compile: bool | str | Options,
) -> None:
    """Raise where an argument is of the wrong kind, out of range, or excludes another."""
    kinds = {"loss": (loss, nn.Module), "optimizer": (optimizer, torch.optim.Optimizer)}
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
    check_groups_of_ranks({"loss": loss, "stopper": stopper}, group)


def warn_of_slow_bfloat16() -> None:
    """Warn on a CPU that has no instructions for bfloat16."""
    has_list = hasattr(torch.cpu, "get_capabilities")  # torch 2.11 has not
    found = torch.cpu.get_capabilities() if has_list else {}
    if found and not any(there for name, there in found.items() if "bf16" in name):
        warnings.warn(
            "This processor has no instructions for bfloat16, which is several times slower than "
            "float32 on it: leave out amp_dtype.",
            stacklevel=3,
        )


def check_groups_of_ranks(blocks: Mapping[str, object], group: ProcessGroup | None) -> None:
    """Raise a ValueError where a block averages over another group of ranks than the step."""
    for name, block in blocks.items():
        if getattr(block, "group", group) is not group:
            raise ValueError(f"The {name} has another group than the step: pass group= to both.")


def numbers_in(losses: TensorDictBase, tensors: Sequence[Tensor]) -> list[NestedKey]:
    """Return the keys of the single numbers that lie in the memory of these tensors."""
    memory = {x.untyped_storage().data_ptr() for x in tensors}
    single = [
        (k, x) for k, x in losses.items(True, True) if isinstance(x, Tensor) and x.numel() == 1
    ]
    return [key for key, x in single if x.untyped_storage().data_ptr() in memory]


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
            "optimizer with loss.parameters(). copy.deepcopy gives a loss with functional=True "
            "other parameters than its optimizer: use its state_dict."
        )
    coefficient = getattr(loss, "critic_coeff", 1.0)
    is_meta = isinstance(coefficient, Tensor) and coefficient.is_meta
    has_critic = coefficient is not None and (is_meta or bool(coefficient != 0))
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


def loss_names(losses: TensorDictBase, name: str) -> list[str]:
    """Return the names of the losses to sum, of which there must be one; ``name`` is the loss's."""
    names = [key for key in losses.keys() if str(key).startswith("loss_")]
    if not names:
        raise TypeError(
            f"{name} returns no entry that begins with 'loss_', but "
            f"{', '.join(map(str, losses.keys()))}: there is nothing to minimize."
        )
    return names


def check_losses(losses: TensorDictBase, name: str, kl_keys: Iterable[NestedKey | None]) -> None:
    """Raise where no values of these losses can be trained with, or a KL that is read is missing.

    A key of None is ignored.
    """
    if not is_tensor_collection(losses):
        raise TypeError(f"{name} returns a {type(losses).__name__}: return a TensorDict.")
    names = loss_names(losses, name)
    for key in names:
        value = losses[key]
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"{key!r} is a {type(value).__name__} of shape {list(value.shape)}; a loss is one "
                'number. Build the loss with reduction="mean".'
            )
    if not any(losses[key].requires_grad for key in names):
        raise ValueError(
            f"None of {', '.join(names)} has a gradient. Compute them outside of torch.no_grad(), "
            "without detach() or .data."
        )
    for key in kl_keys:
        if key is not None:
            find_kl(losses, key)


def total_and_kls(
    losses: TensorDictBase, kl_key: NestedKey, *, needs_kl: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the losses, and the KLs of the stopper and of the loss, all ``[]``.

    A KL that is not there is 0, or raises a KeyError if the stopper needs it.
    """
    total: Any = None
    for key, x in losses.items():
        if isinstance(key, str) and key.startswith("loss_"):
            total = x if total is None else total + x
    if total.ndim:
        total = total.reshape(())
    found = [losses.get(key, None) for key in (kl_key, "kl")]
    if found[0] is None and needs_kl:
        find_kl(losses, kl_key)
    kls = [x.detach() if isinstance(x, Tensor) else torch.zeros_like(total) for x in found]
    return total, [x.mean() if x.ndim else x for x in kls]


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
