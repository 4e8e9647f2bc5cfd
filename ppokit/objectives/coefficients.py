"""The coefficients of the loss: their names and ranges, and how they enter a term."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import ClipPPOLoss, PPOLoss

from ppokit._keys import as_key, key_parts
from ppokit.functional._checks import check_range
from ppokit.functional.distributions import sum_of_heads
from ppokit.functional.surrogates import check_clip_epsilon, check_dual_clip


def scaled(coefficient: Tensor, term: Tensor) -> Tensor:
    """Return ``coefficient * term``, and 0 if the coefficient is 0 and the term infinite."""
    # A number does not promote float16, in which gradients that a GradScaler scales overflow.
    term = term.to(torch.promote_types(term.dtype, coefficient.dtype))
    return coefficient * torch.where(coefficient == 0, 0, term)


def entropy_loss(loss: Any, entropy: Tensor | TensorDictBase) -> Tensor:
    """Return the negative entropy ``[*B, 1]``, times the coefficient of each head if it has one.

    Args:
        loss: with ``entropy_coeff``, or with a coefficient for each head.
        entropy: ``[*B, 1]``, or a TensorDict with that of each head.
    """
    coefficients = loss._entropy_coeff_map
    if coefficients is None:
        return scaled(-loss.entropy_coeff, total_entropy(entropy))
    if isinstance(entropy, Tensor):
        raise ValueError(
            f"entropy_coeff has coefficients for {list(coefficients)}, but the action has one "
            "entropy. "
            "Call tensordict.nn.set_composite_lp_aggregate(False).set() before the actor is made, "
            "or pass one number."
        )
    terms = []
    for key, value in entropy.items(include_nested=True, leaves_only=True):
        # torchrl calls the entropy of ("action", "go") ("action", "go_entropy")
        *parents, name = key_parts(key)
        head = key if key in coefficients else as_key((*parents, name.removesuffix("_entropy")))
        if head not in coefficients:
            raise KeyError(
                f"entropy_coeff has no entry for the action head {head!r}; it has "
                f"{list(coefficients)}."
            )
        terms.append(scaled(-coefficients[head], value))
    return torch.stack(terms).sum(0)


def total_entropy(entropy: Any) -> Tensor:
    """Return the sum ``[*B, 1]`` of the entropies of all heads."""
    if isinstance(entropy, Tensor):
        return entropy
    return sum_of_heads(entropy.values(True, True), entropy.ndim)


def check_names(names: Iterable[str], kind: type) -> None:
    """Raise a TypeError for a keyword argument that a loss does not have; torchrl ignores it.

    Args:
        names: of the arguments.
        kind: class of the loss.
    """
    known = {
        x for base in (kind, ClipPPOLoss, PPOLoss) for x in signature(base.__init__).parameters
    }
    for name in names:
        if name not in known:
            nearest = _ELSEWHERE.get(name) or next(iter(get_close_matches(name, known, 1)), None)
            advice = "" if nearest is None else f" Did you mean {nearest}?"
            raise TypeError(f"{kind.__name__} has no argument {name!r}.{advice}")


# Names in other libraries.
_ELSEWHERE = {
    "ent_coef": "entropy_coeff",
    "vf_coef": "critic_coeff",
    "clip_range": "clip_epsilon",
    "clip_range_vf": "clip_value",
    "vf_clip_param": "critic_loss_clip",
    "target_kl": "KLEarlyStopper(target_kl), an argument of TrainingStep",
    "max_grad_norm": "TrainingStep(max_grad_norm=...)",
}


def check_arguments(coefficients: Mapping[str, Any], *, has_critic: bool) -> None:
    """Raise where a coefficient cannot be had: a number, or several of one name."""
    samples = coefficients.get("samples_mc_entropy", 1)
    if isinstance(samples, bool) or not isinstance(samples, Integral) or samples < 1:
        raise ValueError(f"samples_mc_entropy must be 1 or more samples, got {samples!r}.")
    for name, value in coefficients.items():
        if name == "clip_epsilon" and isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise ValueError(f"clip_epsilon must be a number or (low, high), got {value}.")
            check_clip_epsilon(*value)
            continue
        is_flag = name == "clip_value" and isinstance(value, bool)  # the number is clip_epsilon
        for number in value.values() if isinstance(value, Mapping) else [value]:
            check_coefficient(name, None if is_flag else number)
        if not has_critic and name in _OF_CRITIC and value:
            raise TypeError(
                f"{name}={value} is of a critic's loss, and there is no critic_network: pass one, "
                f"or {name}=None."
            )


def check_can_be_set(loss: Any, name: str, value: float | Tensor) -> None:
    """Raise where a coefficient is set that the loss was built without, or out of range."""
    buffers = loss.__dict__.get("_buffers", {})
    if not isinstance(value, Tensor):
        if name == "entropy_coeff" and "head_entropy_coeff" in buffers:
            raise AttributeError(
                "entropy_coeff is one coefficient for each head here, "
                f"{list(loss._entropy_coeff_map)}; "
                'schedule ("entropy_coeff", head), or write to loss.head_entropy_coeff.'
            )
        if name in loss.__dict__ or (name in buffers and buffers[name] is None):
            raise AttributeError(
                f"{name} was None (or 0) when the loss was built, so its term is absent and "
                f"setting it to {value} would have no effect. Give it a value at construction."
            )
    check_coefficient(name, value)


def check_coefficient(name: str, value: float | Tensor | None) -> None:
    """Raise where a coefficient is no number or out of range; None is absent."""
    if value is None or not (name.startswith(("dual_", "clip_")) or name in _OTHERS):
        return
    if isinstance(value, bool) or not isinstance(value, (float, Integral, Tensor)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if name == "dual_clip":
        check_dual_clip(value)
    elif name.startswith("clip_epsilon"):
        check_clip_epsilon(0 if name.endswith("high") else value, value)
    elif name in _POSITIVE:
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}: {_POSITIVE[name]}")
    elif name in _NOT_NEGATIVE:
        check_range(name, value, 0, math.inf, consequence=_NOT_NEGATIVE[name])


_POSITIVE = {
    "critic_loss_clip": "the critic would get no gradient.",
    "max_importance_ratio": "no ratio is below it.",
}
_OF_CRITIC = ("critic_coeff", "critic_loss_clip", "clip_value")
_FACTORS = ("entropy_coeff", "head_entropy_coeff", "critic_coeff", "kl_coeff")
_NOT_NEGATIVE = {
    "clip_value": "the interval around the old value would be empty.",
    **dict.fromkeys(_FACTORS, "the term would be maximised."),
}
_OTHERS = _POSITIVE.keys() | _NOT_NEGATIVE.keys()
