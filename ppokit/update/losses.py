"""Checks of the result of a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import valid_mask
from ppokit.trust_region.mean_kl import find_kl


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
