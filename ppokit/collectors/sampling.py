"""Sampling actions from the distributions that PPO uses most, with fewer operations than they.

The random numbers are the same, and so are the actions. Log-probabilities are computed by the
distributions' own formulas, so that they are equal to the last digit, but for a ``TanhNormal``'s.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as d
from torch.nn.functional import one_hot
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
)

from ppokit.functional.distributions import log_tanh_slope, tanh_interval

_LOG_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


class Sampler(ABC):
    """Draws and scores samples of a distribution, given its parameters."""

    names: tuple[str, ...]  #: of the parameters
    encoding: str | None = None  #: of a choice of one of several, "index" or "one-hot"

    def __init__(self, distribution: Any, options: Mapping[str, Any]) -> None:
        self._options = options

    @abstractmethod
    def draw(self, *parameters: Tensor) -> Tensor:
        """Return samples ``[n, ...]``."""

    def action(self, sample: Tensor) -> Tensor:
        """Return the actions that samples stand for, as the environments take them."""
        return sample

    def encoded(self, action: Tensor, parameter: Tensor) -> Tensor:
        """Return actions as they are stored."""
        return action

    @abstractmethod
    def log_prob(self, sample: Tensor, *parameters: Tensor) -> Tensor:
        """Return the log-probability of the actions that samples stand for."""

    def checked(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters that must be finite; of logits some may be minus infinity."""
        return parameters


class NormalSampler(Sampler):
    """A normal distribution of any shape."""

    names = ("loc", "scale")

    def __init__(self, distribution: Any, options: Mapping[str, Any]) -> None:
        super().__init__(distribution, options)
        events = options.get("event_dim", options.get("event_dims"))
        default = 0 if distribution is d.Normal else 1
        self._events = default if events is None else events  # dimensions of one action

    def draw(self, loc: Tensor, scale: Tensor) -> Tensor:  # pyright: ignore
        """Return samples ``[n, ...]``."""
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        return loc + torch.empty_like(loc).normal_() * scale

    def log_prob(self, sample: Tensor, loc: Tensor, scale: Tensor) -> Tensor:  # pyright: ignore
        """Return the log-probability of the actions that samples stand for."""
        density = -((sample - loc) ** 2) / (2 * scale**2) - scale.log() - _LOG_SQRT_2PI
        density = density - self._log_slope(sample)
        events = min(self._events, density.ndim)
        return density.flatten(density.ndim - events).sum(-1) if events else density

    def _log_slope(self, sample: Tensor) -> Tensor | float:
        """Return the logarithm of the slope of actions over samples, element by element."""
        return 0.0


class TanhNormalSampler(NormalSampler):
    """torchrl's ``TanhNormal``, scored before the tanh."""

    def action(self, sample: Tensor) -> Tensor:
        """Return the actions that samples stand for, as the environments take them."""
        action = sample.tanh()
        if self._options.get("safe_tanh", True):
            edge = 1 - torch.finfo(sample.dtype).resolution
            action.clamp_(-edge, edge)
        interval = self._interval(sample)
        return action if interval is None else interval[0] + interval[1] * action

    def _log_slope(self, sample: Tensor) -> Tensor:
        interval = self._interval(sample)
        slope = log_tanh_slope(sample)
        return slope if interval is None else slope + interval[1].log()

    def _interval(self, sample: Tensor) -> tuple[Tensor, Tensor] | None:
        low, high = self._options.get("low", -1.0), self._options.get("high", 1.0)
        return tanh_interval(low, high, sample.device)


class CategoricalSampler(Sampler):
    """torch's ``Categorical``: samples one of K as the winner of K exponential races."""

    names = ("logits",)
    encoding = "index"

    def draw(self, *parameters: Tensor) -> Tensor:
        """Return samples ``[n, ...]``."""
        # what torch.multinomial does for one sample, once it has looked for bad probabilities
        probs = self.checked(*parameters)[0].softmax(-1)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)

    def log_prob(self, sample: Tensor, *parameters: Tensor) -> Tensor:
        """Return the log-probability of the actions that samples stand for."""
        (logits,) = self.checked(*parameters)
        log_probs = logits - logits.logsumexp(-1, keepdim=True)
        return log_probs.gather(-1, sample.unsqueeze(-1)).squeeze(-1)


class OneHotSampler(CategoricalSampler):
    """torchrl's ``OneHotCategorical``."""

    encoding = "one-hot"

    def encoded(self, action: Tensor, parameter: Tensor) -> Tensor:
        """Return actions as they are stored."""
        return one_hot(action, parameter.shape[-1])


class MaskedSampler(CategoricalSampler):
    """torchrl's ``MaskedCategorical``."""

    names = ("logits", "mask")

    def checked(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of what the mask allows, and minus infinity elsewhere."""
        logits, mask = parameters
        return (logits.masked_fill(~mask, -math.inf),)


class MaskedOneHotSampler(MaskedSampler, OneHotSampler):
    """torchrl's ``MaskedOneHotCategorical``."""


def find_sampler(
    distribution: Any, options: Mapping[str, Any], names: Collection[str]
) -> Sampler | str:
    """Return the sampler of a distribution, or why there is none.

    Args:
        distribution: its class.
        options: its arguments beside the parameters.
        names: the names of its parameters.
    """
    name = getattr(distribution, "__name__", repr(distribution))
    # by identity: a class need not be hashable, nor comparable
    row = next((row for row in _SAMPLERS if row[0] is distribution), None)
    if row is None:
        return f"the distribution {name} is not known"
    _, sampler, known_options = row
    if set(sampler.names) != set(names):
        return f"the parameters {sorted(names)} of {name} are not known"
    if unknown := sorted(options.keys() - known_options):
        return f"the arguments {unknown} of {name} are not known"
    if options.get("tanh_loc"):
        return f"{name} has tanh_loc=True"
    return sampler(distribution, options)


_SAMPLERS: tuple[tuple[type, type[Sampler], set[str]], ...] = (
    (d.Normal, NormalSampler, set()),
    (IndependentNormal, NormalSampler, {"upscale", "event_dim"}),
    (
        TanhNormal,
        TanhNormalSampler,
        {"low", "high", "upscale", "tanh_loc", "event_dims", "safe_tanh"},
    ),
    (d.Categorical, CategoricalSampler, set()),
    (OneHotCategorical, OneHotSampler, {"grad_method"}),
    (MaskedCategorical, MaskedSampler, set()),
    (MaskedOneHotCategorical, MaskedOneHotSampler, {"grad_method"}),
)
