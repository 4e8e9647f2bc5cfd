"""Sampling actions from the distributions that PPO uses most, with fewer operations than they.

The random numbers are the same, and so are the actions. The log-probabilities are left to the
distribution itself, for a whole batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as d
from torch.nn.functional import one_hot, softplus
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

from ppokit.collectors.batch import Column

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class NormalSampler:
    """A normal distribution of any shape."""

    names = ("loc", "scale")
    is_discrete = False

    def __init__(self, distribution: Callable[..., d.Distribution]) -> None:
        self._distribution = distribution
        self._actions = Column()
        self._events: int | None = None  # dimensions of one action

    def draw(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return actions ``[n, ...]``."""
        action = self._normal(loc, scale)
        self._actions.append(action)
        return action

    def sample(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action and its log-probability."""
        loc, scale = torch.broadcast_tensors(loc, scale)
        noise = torch.empty_like(loc).normal_()
        return loc + noise * scale, self._summed(_log_density(noise, scale), loc, scale)

    def _summed(self, log_density: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        if self._events is None:
            self._events = len(self._distribution(loc=loc, scale=scale).event_shape)
        events = self._events
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

    def __init__(self, distribution: Callable[..., d.Distribution]) -> None:
        super().__init__(distribution)
        self._drawn = Column()
        self._edge: float | None = None
        self._affine: tuple[Tensor, Tensor] | None = None
        self._is_set_up = False

    def draw(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return actions ``[n, ...]``."""
        drawn = self._normal(loc, scale)
        action = self._bounded(drawn, loc, scale)
        self._drawn.append(drawn)
        self._actions.append(action)
        return action

    def sample(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action and its log-probability."""
        loc, scale = torch.broadcast_tensors(loc, scale)
        noise = torch.empty_like(loc).normal_()
        drawn = loc + noise * scale
        action = self._bounded(drawn, loc, scale)
        # log(1 - tanh(x)^2), which does not cancel where tanh(x) is close to 1
        slope = 2 * (math.log(2.0) - drawn - softplus(-2 * drawn))
        if self._affine is not None:
            slope = slope + self._affine[1].log()
        return action, self._summed(_log_density(noise, scale) - slope, loc, scale)

    def _bounded(self, drawn: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        if not self._is_set_up:
            self._set_up(self._distribution(loc=loc, scale=scale))
        action = drawn.tanh()
        if self._edge is not None:
            action.clamp_(-self._edge, self._edge)
        return action if self._affine is None else self._affine[0] + self._affine[1] * action

    def finish(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return all actions ``[n, T, ...]`` since the last call, and how to score them."""
        action, _ = super().finish(parameters)
        drawn = self._drawn.take()
        self._is_set_up = False  # the bounds may have changed by the next batch
        distribution: Any = self._distribution(**dict(zip(self.names, parameters, strict=True)))
        (transform,) = distribution.transforms

        def score() -> Tensor:
            slope = transform.log_abs_det_jacobian(drawn, action)
            events = len(distribution.event_shape)
            slope = slope.flatten(slope.ndim - events).sum(-1) if events else slope
            return distribution.base_dist.log_prob(drawn) - slope

        return action, score

    def _set_up(self, distribution: Any) -> None:
        (transform,) = distribution.transforms
        tanh, *affine = getattr(transform, "parts", [transform])
        if type(tanh) is not d.TanhTransform:
            self._edge = 1 - torch.finfo(distribution.loc.dtype).resolution
        self._affine = (affine[0].loc, affine[0].scale) if affine else None
        self._is_set_up = True


class CategoricalSampler:
    """torch's ``Categorical``: samples one of K as the winner of K exponential races."""

    names = ("logits",)
    is_discrete = True

    def __init__(self, distribution: Callable[..., d.Distribution]) -> None:
        self._distribution = distribution
        self._choices = Column()

    def draw(self, logits: Tensor) -> Tensor:
        """Return choices ``[n]``."""
        choice = _race(logits.softmax(-1))
        self._choices.append(choice)
        return choice

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return a choice as it is stored, and its log-probability."""
        log_probs = logits.log_softmax(-1)
        choice = _race(logits.softmax(-1))
        log_prob = log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        return self.encoded(choice, logits), log_prob

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


def _log_density(noise: Tensor, scale: Tensor) -> Tensor:
    return -(noise.square() / 2 + scale.log() + _HALF_LOG_2PI)


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
