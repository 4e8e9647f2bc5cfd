"""The policy of a minibatch on tensors: the parameters of a known distribution, and its terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torch import distributions as d
from torchrl.modules import IndependentNormal, MaskedCategorical, OneHotCategorical, TanhNormal

from ppokit._calls import overridden
from ppokit.functional.distributions import (
    categorical_entropy,
    categorical_log_prob,
    normal_entropy,
    normal_log_density,
    tanh_interval,
    tanh_normal_terms,
)


class Terms(NamedTuple):
    """Log-probability of the action and entropy, ``[*B, 1]`` each."""

    log_prob: Tensor
    entropy: Tensor

    def terms(self) -> Terms:
        """Return itself."""
        return self


class Normal(NamedTuple):
    """A diagonal normal; with noise, the tanh of one between middle - half_width and + half_width.

    ``noise`` ``[S, *B, F]`` draws the samples that the entropy of the latter is estimated from. The
    last three are numbers, or tensors of shape ``[]`` or ``[F]``.
    """

    loc: Tensor
    scale: Tensor
    action: Tensor
    noise: Tensor | None = None
    middle: Any = 0.0
    half_width: Any = 1.0
    log_half_width: Any = 0.0

    def terms(self) -> Terms:
        """Return log-probability and entropy."""
        loc, scale, action, noise, *interval = self
        if noise is None:
            terms = normal_log_density((action - loc) / scale, scale), normal_entropy(scale)
        else:
            terms = tanh_normal_terms(loc, scale, action, noise, tuple(interval))  # pyright: ignore
        return Terms(*(term.sum(-1, keepdim=True) for term in terms))


class Categorical(NamedTuple):
    """A choice of one of F by unnormalised log-probabilities."""

    logits: Tensor
    action: Tensor

    def terms(self) -> Terms:
        """Return log-probability and entropy."""
        return Terms(categorical_log_prob(*self), categorical_entropy(self.logits))


Policy: TypeAlias = Terms | Normal | Categorical


def is_known(head: Any) -> bool:
    """Return whether a ProbabilisticTensorDictModule makes a distribution that is computed here."""
    distribution, options = head.distribution_class, head.distribution_kwargs
    if type(options) is not dict or not isinstance(distribution, type):
        return False
    if distribution not in _KNOWN or overridden(head, ProbabilisticTensorDictModule, ("get_dist",)):
        return False
    if "low" in options or "high" in options:
        low, high = options.get("low", -1.0), options.get("high", 1.0)
        others = [x for x in (low, high) if not isinstance(x, Tensor)]
        numbers = all(isinstance(x, (int, float)) for x in others)
        if not numbers or (len(others) == 2 and not low < high):
            return False
    _, ignored, needed = _KNOWN[distribution]
    for name, value in options.items():
        if name not in ignored and (name not in needed or value is not needed[name]):
            return False
    return True


def known_policy(
    head: Any, parameters: Mapping[str, Any], action: Tensor, samples: int
) -> Normal | Categorical | None:
    """Return the policy on tensors, or None where the distribution itself has to be asked.

    An entropy that has no closed form is estimated from so many samples.
    """
    if not is_known(head):
        return None
    distribution = head.distribution_class
    values: list[Any] = [parameters.get(name) for name in _KNOWN[distribution][0]]
    mask: Any = values.pop() if distribution is MaskedCategorical else None
    if parameters.keys() != {*_KNOWN[distribution][0]} or not _are_alike(*values):
        return None
    first = values[0]
    if mask is not None:
        if mask.dtype is not torch.bool or mask.shape != first.shape:
            return None
        first = first.masked_fill(~mask, -math.inf)
    if distribution is OneHotCategorical and action.shape == first.shape:
        numbers = action.int() if action.dtype is torch.bool else action
        return Categorical(first, numbers.argmax(-1))
    if distribution in (d.Categorical, OneHotCategorical, MaskedCategorical):
        fits = action.shape == first.shape[:-1] and not action.is_floating_point()
        return Categorical(first, action.long()) if fits else None
    if not _are_alike(first, action):
        return None
    if distribution is IndependentNormal:
        return Normal(first, values[1], action)
    return _squashed(first, values[1], action, head.distribution_kwargs, samples)


# Names of the parameters; other arguments that leave the distribution as it is, or are read here;
# and those that must have these values.
_KNOWN: dict[type, tuple[tuple[str, ...], frozenset[str], dict[str, Any]]] = {
    IndependentNormal: (("loc", "scale"), frozenset({"upscale", "tanh_loc"}), {}),
    TanhNormal: (
        ("loc", "scale"),
        frozenset({"upscale", "low", "high"}),
        {"safe_tanh": True, "tanh_loc": False, "event_dims": None},
    ),
    d.Categorical: (("logits",), frozenset(), {}),
    OneHotCategorical: (("logits",), frozenset({"grad_method"}), {}),
    MaskedCategorical: (("logits", "mask"), frozenset({"use_cross_entropy"}), {}),
}
_DTYPES = (torch.float32, torch.float64)


def _squashed(
    loc: Tensor, scale: Tensor, action: Tensor, options: dict[str, Any], samples: int
) -> Normal | None:
    """Return the tanh-normal policy, or None where its bounds are odd."""
    interval = 0.0, 1.0, 0.0
    if "low" in options or "high" in options:
        bounds = options.get("low", -1.0), options.get("high", 1.0)
        if (tensors := tanh_interval(*bounds, loc.device)) is not None:
            middle, half_width = tensors
            if middle.shape not in (torch.Size([]), loc.shape[-1:]):
                return None
            reads_values = loc.is_cpu and not torch.compiler.is_compiling()
            if reads_values and not bool((half_width > 0).all()):
                return None
            interval = middle, half_width, half_width.log()
    # The same numbers as the distribution would draw.
    noise = torch.randn((samples, *loc.shape), dtype=loc.dtype, device=loc.device)
    return Normal(loc, scale, action, noise, *interval)


def _are_alike(first: Any, *others: Any) -> bool:
    """Return whether these are tensors of one shape and of one dtype that is computed in here."""
    if not isinstance(first, Tensor) or first.ndim == 0 or first.dtype not in _DTYPES:
        return False
    for x in others:
        if not isinstance(x, Tensor) or x.shape != first.shape or x.dtype != first.dtype:
            return False
    return True
