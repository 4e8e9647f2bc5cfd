"""The coefficients of the loss: buffers that are state, and are changed in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from numbers import Integral
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import ClipPPOLoss, PPOLoss
from torchrl.objectives.utils import _sum_td_features

from ppokit._keys import as_key, key_parts
from ppokit._state import WholeState
from ppokit.functional._checks import check_range
from ppokit.functional.surrogates import check_clip_epsilon, check_dual_clip


class Coefficients(NamedTuple):
    """Coefficients and bounds, one number each; None where a term is absent."""

    clip_epsilon_low: Tensor
    clip_epsilon_high: Tensor
    dual_clip: Tensor | None = None
    clip_value: Tensor | None = None
    loss_clip: Tensor | None = None
    entropy_coeff: Tensor | None = None
    critic_coeff: Tensor | None = None
    kl_coeff: Tensor | None = None


class CoefficientBuffers(WholeState, ClipPPOLoss):
    """``ClipPPOLoss`` with coefficients that are buffers, within range, and absent if None or 0."""

    dual_clip: Tensor | None
    critic_loss_clip: Tensor | None
    kl_coeff: Tensor | None
    clip_epsilon: Tensor
    clip_value: Tensor | None
    critic_coeff: Tensor
    entropy_coeff: Tensor

    _schedulable_buffers = frozenset({"dual_clip", "critic_loss_clip", "kl_coeff"})

    @property
    def _entropy_coeff_map(self) -> dict[NestedKey, Tensor] | None:
        # torchrl keeps plain floats here, outside state_dict; its readers take views as well.
        coefficients = self._buffers.get("head_entropy_coeff")
        return None if coefficients is None else dict(zip(self._heads, coefficients, strict=True))

    @_entropy_coeff_map.setter
    def _entropy_coeff_map(self, value: Mapping[NestedKey, float] | None) -> None:
        if value is not None:
            self._heads = tuple(value)
            self.register_buffer("head_entropy_coeff", torch.tensor(list(value.values())))

    def _weighted_loss_entropy(self, entropy: Tensor | TensorDictBase) -> Tensor:
        coefficients = self._entropy_coeff_map
        if coefficients is None:
            total = _sum_td_features(entropy) if is_tensor_collection(entropy) else entropy
            return scaled(-self.entropy_coeff, total)
        if isinstance(entropy, Tensor):
            raise ValueError(
                f"entropy_coeff has coefficients for {list(coefficients)}, but the action has one "
                "entropy. Call tensordict.nn.set_composite_lp_aggregate(False).set() "
                "before the actor is made, or pass one number."
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

    @property
    def coefficients(self) -> Coefficients:
        """All that a forward needs, one number each; None where a term is absent."""
        of = self._buffers.get
        low, high = of("clip_epsilon"), of("clip_epsilon")
        if low is None:
            low, high = of("clip_epsilon_low"), of("clip_epsilon_high")
        bounds = of("dual_clip"), of("clip_value"), of("critic_loss_clip")
        entropy = of("entropy_coeff") if self.entropy_bonus else None
        critic = of("critic_coeff") if self._has_critic else None
        return Coefficients(low, high, *bounds, entropy, critic, of("kl_coeff"))  # pyright: ignore

    # -- clip_value=True: one tensor under two names ---------------------------

    @property
    def _clip_value_follows(self) -> bool:
        buffers = self.__dict__.get("_buffers", {})
        clip_value = buffers.get("clip_value")
        return clip_value is not None and clip_value is buffers.get("clip_epsilon")

    def _follow_clip_epsilon(self) -> None:
        self._buffers["clip_value"] = self._buffers["clip_epsilon"]

    def _apply(self, fn: Any) -> CoefficientBuffers:  # pyright: ignore[reportIncompatibleMethodOverride]
        follows = self._clip_value_follows
        super()._apply(fn)  # makes two of them, on another device
        if follows:
            self._follow_clip_epsilon()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        follows = self._clip_value_follows
        if follows:
            self._buffers["clip_value"] = self.clip_epsilon.clone()  # so that it may be assigned to
        super()._load_from_state_dict(*args, **kwargs)
        if follows:
            self._follow_clip_epsilon()

    # -- what may be set -------------------------------------------------------

    def loaded_name(self, name: str) -> str:
        """Return the name in this loss of an entry that a functional loss, or another, wrote."""
        for network in ("actor_network.", "critic_network."):
            others = network[:-1] + "_params."
            here, there = (others, network) if self.functional else (network, others)
            if name.startswith(there):
                return here + name.removeprefix(there)
        return name

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError where a state holds a coefficient that the constructor refuses."""
        for name in (*self._all_schedulable_buffers, "head_entropy_coeff"):
            check_coefficient(name, state.get(name))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer; of a coefficient given as an int, one that can hold any number."""
        if tensor is not None and name in self._all_schedulable_buffers:
            tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
        super().register_buffer(name, tensor, persistent)

    def __setattr__(self, name: str, value: Any) -> None:
        follows = name in ("clip_value", "clip_epsilon") and self._clip_value_follows
        if follows and name == "clip_value":
            raise AttributeError(
                "clip_value follows clip_epsilon here, because the loss was built with "
                "clip_value=True. Build it with a number to set the two apart."
            )
        if isinstance(value, (int, float)) and name in self._all_schedulable_buffers:
            buffers = self.__dict__.get("_buffers", {})
            if name == "entropy_coeff" and "head_entropy_coeff" in buffers:
                raise AttributeError(
                    f"entropy_coeff is one coefficient for each head here, {list(self._heads)}; "
                    'schedule ("entropy_coeff", head), or write to loss.head_entropy_coeff.'
                )
            if name in self.__dict__ or (name in buffers and buffers[name] is None):
                raise AttributeError(
                    f"{name} was None (or 0) when the loss was built, so its term is absent and "
                    f"setting it to {value} would have no effect. Give it a value at construction."
                )
        if name in self._all_schedulable_buffers and isinstance(value, (int, float, Tensor)):
            check_coefficient(name, value)
        super().__setattr__(name, value)
        if follows:
            self._follow_clip_epsilon()


def scaled(coefficient: Tensor, term: Tensor) -> Tensor:
    """Return ``coefficient * term``, and 0 where the coefficient is 0 and the term infinite."""
    return coefficient * torch.where(coefficient == 0, 0, term)


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
    """Raise where a coefficient cannot be had: a number, or several of one name.

    Raises:
        ValueError: it is out of range.
        TypeError: it is of a critic's loss, and there is no critic.
    """
    samples = coefficients.get("samples_mc_entropy", 1)
    if isinstance(samples, bool) or not isinstance(samples, Integral) or samples < 1:
        raise ValueError(
            f"samples_mc_entropy must be a whole number of at least 1, got {samples!r}."
        )
    for name, value in coefficients.items():
        if name == "clip_epsilon" and isinstance(value, (tuple, list)):
            check_clip_epsilon(*value)
            continue
        for number in value.values() if isinstance(value, Mapping) else [value]:
            check_coefficient(name, number)
        if not has_critic and name in _OF_CRITIC and value:
            raise TypeError(
                f"{name}={value} is of a critic's loss, and there is no critic_network: pass one, "
                f"or {name}=None."
            )


def check_coefficient(name: str, value: float | Tensor | None) -> None:
    """Raise a ValueError where a coefficient is out of range; None is absent."""
    if value is None or isinstance(value, bool):
        return
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
