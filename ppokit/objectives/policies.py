"""The policies that PPO meets most: log-probability and entropy, with their derivatives.

The distributions' own methods are right, but take a hundred small steps with a gradient for each,
which at a minibatch of 64 is more than the networks take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch import distributions as d
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Evaluated(NamedTuple):
    """Log-probability and entropy ``[*B, 1]``, and what they were computed from.

    The slopes ``[2, P, *B, F]`` are those of the two in each of P parameters ``[*B, F]``; without
    them the two know their own gradient.
    """

    log_prob: Tensor
    entropy: Tensor
    parameters: list[Tensor]
    slopes: Tensor | None

    def evaluate(self) -> Evaluated:
        """Return itself."""
        return self


class Normal(NamedTuple):
    """A diagonal normal; with noise, the tanh of one between middle - half_width and + half_width.

    ``noise`` ``[S, *B, F]`` draws the samples that the entropy of the latter is estimated from.
    """

    loc: Tensor
    scale: Tensor
    action: Tensor
    noise: Tensor | None
    middle: float
    half_width: float
    log_half_width: float

    @property
    def parameters(self) -> list[Tensor]:
        """What the networks give."""
        return [self.loc, self.scale]

    def evaluate(self) -> Evaluated:
        """Return log-probability and entropy; to be called without gradient."""
        loc, scale, x = self.loc, self.scale, self.action
        entropy, by_loc, by_scale = scale.log() + _HALF_LOG_2PI, torch.zeros_like(loc), 1 / scale
        log_slope: Tensor | float = 0.0
        if self.noise is None:
            entropy = entropy + 0.5
        else:
            edge = 1 - torch.finfo(loc.dtype).resolution
            x = ((x - self.middle) / self.half_width).clamp(-edge, edge).atanh()
            log_slope = _log_slope_of_tanh(x) + self.log_half_width
            # -log_prob of samples; in what the normal adds to it the sample itself cancels.
            drawn, noise, share = loc + scale * self.noise, self.noise, 1 / max(len(self.noise), 1)
            sampled = noise.square() / 2 + _log_slope_of_tanh(drawn)
            entropy = entropy + self.log_half_width + share * sampled.sum(0)
            slope = -2 * share * drawn.tanh()
            by_loc, by_scale = slope.sum(0), by_scale + (slope * noise).sum(0)
        z = (x - loc) / scale
        log_prob = -(z.square() / 2 + scale.log() + _HALF_LOG_2PI + log_slope)
        slopes = torch.stack((z / scale, (z.square() - 1) / scale, by_loc, by_scale))
        return Evaluated(
            log_prob.sum(-1, keepdim=True),
            entropy.sum(-1, keepdim=True),
            self.parameters,
            slopes.unflatten(0, (2, 2)),
        )


def _log_slope_of_tanh(x: Tensor) -> Tensor:
    # log(1 - tanh(x)^2), which does not cancel where tanh(x) is close to 1
    return 2 * (math.log(2.0) - x - F.softplus(-2 * x))


class Categorical(NamedTuple):
    """A choice of one of F by unnormalised log-probabilities."""

    logits: Tensor
    action: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        """What the networks give."""
        return [self.logits]

    def evaluate(self) -> Evaluated:
        """Return log-probability and entropy; to be called without gradient."""
        log_probs = self.logits.log_softmax(-1)
        probs, index = log_probs.exp(), self.action.long().unsqueeze(-1)
        log_prob = log_probs.gather(-1, index)
        # torch's Categorical bounds the logits, so that an impossible action adds 0, not 0 * inf
        log_probs = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
        entropy = -(probs * log_probs).sum(-1, keepdim=True)
        slope = (-probs).scatter_add_(-1, index, torch.ones_like(log_prob))
        slopes = torch.stack((slope, -probs * (log_probs + entropy)))
        return Evaluated(log_prob, entropy, self.parameters, slopes.unsqueeze(1))


Policy: TypeAlias = Evaluated | Normal | Categorical


def known_policy(
    distribution: Any, parameters: Mapping[str, Any], options: Any, action: Any, samples: int
) -> Normal | Categorical | None:
    """Return the policy if it is one of those, and else None: ask the distribution itself.

    Args:
        distribution: its class.
        parameters: its parameters by name, as networks give them.
        options: its other arguments.
        action: what was done.
        samples: how many are drawn where the entropy has no closed form, the same numbers as the
            distribution would draw; 0 where the entropy is not wanted.
    """
    form = _FORMS.get(distribution)
    if form is None:
        return None
    tensors = list(parameters.values())
    like = tensors[0]
    if not isinstance(like, Tensor) or like.ndim == 0 or like.dtype not in _DTYPES:
        return None
    for x in tensors[1:]:
        if not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != like.dtype:
            return None
    return form(parameters, options, action, samples)


_DTYPES = (torch.float32, torch.float64)


def _normal(
    parameters: Mapping[str, Tensor], options: Mapping[str, Any], action: Tensor, samples: int
) -> Normal | None:
    unheeded = {"upscale", "tanh_loc"}  # its constructor leaves them alone
    loc = parameters.get("loc")
    if loc is None or len(parameters) != 2 or options.keys() - unheeded or not _like(action, loc):
        return None
    return Normal(loc, parameters["scale"], action, None, 0.0, 1.0, 0.0)


def _tanh_normal(
    parameters: Mapping[str, Tensor], options: Mapping[str, Any], action: Tensor, samples: int
) -> Normal | None:
    loc = parameters.get("loc")
    if loc is None or len(parameters) != 2 or not _like(action, loc):
        return None
    bounds: dict[str, float | Tensor] = {"low": -1.0, "high": 1.0}
    for name, value in options.items():
        if name in bounds:
            if isinstance(value, Tensor) and (value.numel() != 1 or not value.is_cpu):
                return None
            bounds[name] = value
        elif value != _TANH_NORMAL.get(name, value):
            return None
    noise = torch.randn((samples, *loc.shape), dtype=loc.dtype, device=loc.device)
    return Normal(loc, parameters["scale"], action, noise, *_interval(**bounds))


def _interval(low: float | Tensor, high: float | Tensor) -> tuple[float, float, float]:
    """Return its middle, half its width and the logarithm of that, as the distribution has them."""
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and (low, high) == (-1, 1):
        return 0.0, 1.0, 0.0
    low, high = torch.as_tensor(low), torch.as_tensor(high)  # float32, whatever loc is
    half_width = (high - low) / 2
    return ((high + low) / 2).item(), half_width.item(), half_width.log().item()


_TANH_NORMAL = {"safe_tanh": True, "tanh_loc": False, "event_dims": None}  # what is computed here


def _like(action: Tensor, parameter: Tensor) -> bool:
    return action.shape == parameter.shape and action.dtype == parameter.dtype


def _categorical(
    parameters: Mapping[str, Tensor], options: Mapping[str, Any], action: Tensor, samples: int
) -> Categorical | None:
    logits = parameters.get("logits")
    if logits is None or len(parameters) > 1 or options or action.is_floating_point():
        return None
    return Categorical(logits, action) if action.shape == logits.shape[:-1] else None


def _one_hot(
    parameters: Mapping[str, Tensor], options: Mapping[str, Any], action: Tensor, samples: int
) -> Categorical | None:
    logits = parameters.get("logits")
    if logits is None or action.shape != logits.shape or options.keys() - {"grad_method"}:
        return None
    return _categorical(parameters, {}, action.int().argmax(-1), samples)


_FORMS: dict[Any, Callable[..., Normal | Categorical | None]] = {
    IndependentNormal: _normal,
    TanhNormal: _tanh_normal,
    d.Categorical: _categorical,
    OneHotCategorical: _one_hot,
}
