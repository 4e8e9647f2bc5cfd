"""Sampling actions from the distributions that PPO uses most, with fewer operations than they.

The random numbers are the same, and so are the actions. The log-probabilities are left to the
distribution itself, for a whole batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributions as d
from torch.nn.functional import one_hot
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

from ppokit.collectors.batch import Column
from ppokit.functional.distributions import (
    categorical_log_prob,
    log_tanh_slope,
    normal_log_density,
    tanh_interval,
)


class NormalSampler:
    """A normal distribution of any shape."""

    names = ("loc", "scale")
    is_discrete = False

    def __init__(self, distribution: Callable[..., d.Distribution], options: Any) -> None:
        self._distribution, self._options = partial(distribution, **options), options
        self._actions = Column()
        self._events = 0  # dimensions of one action
        if distribution is not d.Normal:
            self._events = options.get("event_dim", options.get("event_dims"))
            self._events = 1 if self._events is None else self._events

    def draw(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return actions ``[n, ...]``."""
        action = self._normal(loc, scale)
        self._actions.append(action)
        return action

    def sample(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action and its log-probability."""
        loc, scale = torch.broadcast_tensors(loc, scale)
        noise = torch.empty_like(loc).normal_()
        return loc + noise * scale, self._summed(normal_log_density(noise, scale))

    def _summed(self, log_density: Tensor) -> Tensor:
        events = min(self._events, log_density.ndim)
        return log_density.flatten(log_density.ndim - events).sum(-1) if events else log_density

    def _normal(self, loc: Tensor, scale: Tensor) -> Tensor:
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        return loc + torch.empty_like(loc).normal_() * scale

    def encoded(self, action: Tensor, parameter: Tensor) -> Tensor:
        """Return the action as it is stored."""
        return action

    def finish(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return all actions ``[n, T, ...]`` since the last call, and how to score them."""
        action = self._actions.take()
        distribution = self._distribution(**dict(zip(self.names, parameters, strict=True)))
        return action, lambda: distribution.log_prob(action)


class TanhNormalSampler(NormalSampler):
    """torchrl's ``TanhNormal``, which scores the sample before the tanh."""

    def __init__(self, distribution: Callable[..., d.Distribution], options: Any) -> None:
        super().__init__(distribution, options)
        self._drawn = Column()
        self._is_safe = options.get("safe_tanh", True)

    def draw(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return actions ``[n, ...]``."""
        drawn = self._normal(loc, scale)
        action, _ = self._bounded(drawn)
        self._drawn.append(drawn)
        self._actions.append(action)
        return action

    def sample(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action and its log-probability."""
        loc, scale = torch.broadcast_tensors(loc, scale)
        noise = torch.empty_like(loc).normal_()
        drawn = loc + noise * scale
        action, half_width = self._bounded(drawn)
        slope = log_tanh_slope(drawn)
        if half_width is not None:
            slope = slope + half_width.log()
        return action, self._summed(normal_log_density(noise, scale) - slope)

    def _bounded(self, drawn: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the action and half the width of its interval, or None for [-1, 1]."""
        action = drawn.tanh()
        if self._is_safe:
            edge = 1 - torch.finfo(drawn.dtype).resolution
            action.clamp_(-edge, edge)
        low, high = self._options.get("low", -1.0), self._options.get("high", 1.0)
        interval = tanh_interval(low, high, drawn.device)
        if interval is None:
            return action, None
        middle, half_width = interval
        return middle + half_width * action, half_width

    def finish(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return all actions ``[n, T, ...]`` since the last call, and how to score them."""
        action, _ = super().finish(parameters)
        drawn = self._drawn.take()
        distribution: Any = self._distribution(**dict(zip(self.names, parameters, strict=True)))
        (transform,) = distribution.transforms

        def score() -> Tensor:
            slope = transform.log_abs_det_jacobian(drawn, action)
            events = len(distribution.event_shape)
            slope = slope.flatten(slope.ndim - events).sum(-1) if events else slope
            return distribution.base_dist.log_prob(drawn) - slope

        return action, score


class CategoricalSampler:
    """torch's ``Categorical``: samples one of K as the winner of K exponential races."""

    names = ("logits",)
    is_discrete = True

    def __init__(self, distribution: Callable[..., d.Distribution], options: Any) -> None:
        self._distribution = partial(distribution, **options)
        self._choices = Column()

    def draw(self, logits: Tensor) -> Tensor:
        """Return choices ``[n]``."""
        choice = _race(logits.softmax(-1))
        self._choices.append(choice)
        return choice

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return a choice as it is stored, and its log-probability."""
        choice = _race(logits.softmax(-1))
        return self.encoded(choice, logits), categorical_log_prob(logits, choice).squeeze(-1)

    def finish(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return all actions ``[n, T, ...]`` since the last call, and how to score them."""
        (logits,) = parameters
        action = self.encoded(self._choices.take(), logits)
        distribution = self._distribution(logits=logits)
        return action, lambda: distribution.log_prob(action)

    def encoded(self, action: Tensor, parameter: Tensor) -> Tensor:
        """Return choices as they are stored."""
        return action


class OneHotSampler(CategoricalSampler):
    """torchrl's ``OneHotCategorical``."""

    def encoded(self, action: Tensor, parameter: Tensor) -> Tensor:
        """Return choices as they are stored."""
        return one_hot(action, parameter.shape[-1])


def _race(probs: Tensor) -> Tensor:
    # what torch.multinomial does for one sample, once it has looked for bad probabilities
    return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)


Sampler = NormalSampler | CategoricalSampler


def find_sampler(
    distribution: Any, options: Mapping[str, Any], names: Sequence[str]
) -> type[Sampler] | str:
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
    return sampler


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
)
