"""The arguments of the loss: their names, and the ranges of its coefficients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.objectives import ClipPPOLoss, PPOLoss

from ppokit._batch import State
from ppokit.functional import _checks
from ppokit.functional._checks import check_range
from ppokit.functional.surrogates import check_clip_epsilon, check_dual_clip

FLOATS = ("clip_epsilon", "clip_value", "entropy_coeff", "critic_coeff", "max_importance_ratio")


def check_names(names: Iterable[str], kind: type) -> None:
    """Raise a TypeError for an argument that a loss does not have; torchrl ignores it."""
    bases = (kind, ClipPPOLoss, PPOLoss)
    known = {name for base in bases for name in signature(base.__init__).parameters}
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


def check_arguments(coefficients: State) -> None:
    """Raise if a coefficient is out of range: a number, or several of one name."""
    for name, value in coefficients.items():
        if name == "clip_epsilon" and isinstance(value, (tuple, list)) and len(value) == 2:
            check_clip_epsilon(*value)
        elif name == "clip_epsilon" and (value is None or isinstance(value, (tuple, list))):
            raise ValueError(f"clip_epsilon must be a number or two, (low, high), got {value!r}.")
        elif name != "clip_value" or not isinstance(value, bool):  # True stands for clip_epsilon
            for number in value.values() if isinstance(value, Mapping) else [value]:
                check_coefficient(name, number)


def check_can_be_set(name: str, value: object, attributes: State) -> None:
    """Raise if a coefficient is set that a loss was built without, or out of range.

    Args:
        name: name of the coefficient.
        value: the value to set.
        attributes: the namespace of the loss.
    """
    buffers = attributes.get("_buffers", {})
    if value is None:  # torchrl's constructor sets those that are absent
        if name in ("clip_epsilon", "entropy_coeff") and buffers.get(name) is not None:
            raise ValueError(f"{name} must be a number: build another loss without the term.")
        return
    if name == "clip_epsilon" and "clip_epsilon_low" in buffers:
        raise AttributeError("The loss has clip_epsilon_low and clip_epsilon_high: set these two.")
    if not isinstance(value, Tensor):
        if name == "entropy_coeff" and "head_entropy_coeff" in buffers:
            raise AttributeError(
                "entropy_coeff is one coefficient for each head here: schedule "
                '("entropy_coeff", head), or write to loss.head_entropy_coeff.'
            )
        if name in attributes or (name in buffers and buffers[name] is None):
            raise AttributeError(
                f"{name} was None (or 0) when the loss was built, so its term is absent. Give it a "
                "value at construction."
            )
    check_coefficient(name, value)


def check_coefficient(name: str, value: Any) -> None:
    """Raise a ValueError if a coefficient is out of range; None is absent, a device is not read."""
    is_single = name.startswith(("clip_epsilon", "dual_clip")) or name in _WIDTHS
    count = value.numel() if isinstance(value, Tensor) else np.size(value)
    if is_single and (count != 1 or isinstance(value, str)):
        own = "; build a loss with clip_epsilon=(low, high)" * (name == "clip_epsilon")
        raise ValueError(f"{name} must be one number, got {value!r}{own}.")
    if value is None or (isinstance(value, Tensor) and not _checks.reads_are_free(value.device)):
        return
    if name == "dual_clip":
        check_dual_clip(value)
    elif name.startswith("clip_epsilon"):
        check_clip_epsilon(0 if name.endswith("high") else value, value)
    elif name in _WIDTHS and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}: {_WIDTHS[name]}")
    elif name in _FACTORS:
        consequence = "the term would be maximized, or infinite."
        check_range(name, value, 0, torch.finfo(torch.float32).max, consequence=consequence)


_FACTORS = ("entropy_coeff", "head_entropy_coeff", "critic_coeff", "kl_coeff")
_WIDTHS = {
    "critic_loss_clip": "the critic would not learn.",
    "clip_value": "the values would stay as they are. None turns it off.",
    "max_importance_ratio": "no ratio is below. None turns it off.",
}
