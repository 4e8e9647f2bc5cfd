"""The policies that PPO meets most: log-probability and entropy, with their derivatives.

The distributions' own methods are right, but take a hundred small steps with a gradient for each,
which at a minibatch of 64 is more than the networks take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch import distributions as d
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Evaluated(NamedTuple):
    """Log-probability and entropy ``[*B, 1]``, and what they were computed from.

    The slopes are those of the two in each of the parameters, of whose shape ``[*B, F]`` they are;
    without them the two know their own gradient.
    """

    log_prob: Tensor
    entropy: Tensor
    parameters: list[Tensor]
    slopes: tuple[Sequence[Tensor], Sequence[Tensor]] | None

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
        slopes = (z / scale, (z.square() - 1) / scale), (by_loc, by_scale)
        log_prob, entropy = log_prob.sum(-1, keepdim=True), entropy.sum(-1, keepdim=True)
        return Evaluated(log_prob, entropy, self.parameters, slopes)


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
        chosen = index == torch.arange(probs.shape[-1], device=probs.device)
        slopes = (chosen.to(probs.dtype) - probs,), (-probs * (log_probs + entropy),)
        return Evaluated(log_prob, entropy, self.parameters, slopes)


Policy: TypeAlias = Evaluated | Normal | Categorical


class Form(NamedTuple):
    """How the policy of a known distribution is made of its parameters, in the order of names."""

    names: tuple[str, ...]
    make: Callable[..., Normal | Categorical | None]  # (samples, action, *parameters)


def known_form(
    distribution: Any, options: Mapping[str, Any], names: Collection[str]
) -> Form | None:
    """Return the form of a distribution, or None where the distribution itself is to be asked.

    Args:
        distribution: its class.
        options: its arguments beside the parameters.
        names: those of its parameters.
    """
    form = _FORMS.get(distribution)
    if form is None or set(form.names) != set(names):
        return None
    if distribution is not TanhNormal:
        return None if options.keys() - _UNHEEDED.get(distribution, set()) else form
    if any(options.get(name, value) != value for name, value in _TANH_NORMAL.items()):
        return None
    interval = _interval(options.get("low", -1.0), options.get("high", 1.0))
    if interval is None or options.keys() - _TANH_NORMAL.keys() - _UNHEEDED[TanhNormal]:
        return None
    return Form(form.names, partial(_tanh_normal, interval))


_TANH_NORMAL = {"safe_tanh": True, "tanh_loc": False, "event_dims": None}  # what is computed here
_UNHEEDED = {  # what the constructors leave alone, or is heeded above
    IndependentNormal: {"upscale", "tanh_loc"},
    OneHotCategorical: {"grad_method"},
    TanhNormal: {"low", "high", "upscale"},
}
_DTYPES = (torch.float32, torch.float64)


def _are_like(first: Any, *others: Any) -> bool:
    if not isinstance(first, Tensor) or first.ndim == 0 or first.dtype not in _DTYPES:
        return False
    return all(
        isinstance(x, Tensor) and x.shape == first.shape and x.dtype == first.dtype for x in others
    )


class Interval(NamedTuple):
    """Its middle and half its width, numbers or ``[F]`` each, and the mean logarithm of the latter.

    The sum of that logarithm over the dimensions is what counts.
    """

    middle: Any
    half_width: Any
    log_half_width: float


def _interval(low: Any, high: Any) -> Interval | None:
    """Return the interval between bounds as the distribution has it, or None where it is odd."""
    if not isinstance(low, int | float | Tensor) or not isinstance(high, int | float | Tensor):
        return None
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and (low, high) == (-1, 1):
        return Interval(0.0, 1.0, 0.0)
    low, high = torch.as_tensor(low), torch.as_tensor(high)  # float32, whatever the parameters are
    if low.ndim > 1 or high.ndim > 1 or not bool((low < high).all()):
        return None
    middle, half_width = torch.broadcast_tensors((high + low) / 2, (high - low) / 2)
    log_half_width = half_width.log().mean().item()
    same = all(bool((x == x.flatten()[0]).all()) for x in (middle, half_width))
    if same:
        middle, half_width = (x.flatten()[0].item() for x in (middle, half_width))
        log_half_width = torch.tensor(half_width).log().item()
    return Interval(middle, half_width, log_half_width)


def _normal(samples: int, action: Tensor, loc: Any, scale: Any) -> Normal | None:
    if not _are_like(loc, scale, action):
        return None
    return Normal(loc, scale, action, None, 0.0, 1.0, 0.0)


def _tanh_normal(
    interval: Interval, samples: int, action: Tensor, loc: Any, scale: Any
) -> Normal | None:
    if not _are_like(loc, scale, action):
        return None
    middle, half_width, log_half_width = interval
    if isinstance(middle, Tensor):
        if not _are_like(middle, loc[(0,) * (loc.ndim - 1)]) or middle.device != loc.device:
            return None
        action = (action - middle) / half_width
        interval = Interval(0.0, 1.0, log_half_width)
    # The same numbers as the distribution would draw.
    noise = torch.randn((samples, *loc.shape), dtype=loc.dtype, device=loc.device)
    return Normal(loc, scale, action, noise, *interval)


def _categorical(samples: int, action: Tensor, logits: Any) -> Categorical | None:
    if not _are_like(logits) or action.shape != logits.shape[:-1] or action.is_floating_point():
        return None
    return Categorical(logits, action)


def _one_hot(samples: int, action: Tensor, logits: Any) -> Categorical | None:
    if not _are_like(logits) or action.shape != logits.shape:
        return None
    return Categorical(logits, action.int().argmax(-1))


_FORMS: dict[Any, Form] = {
    IndependentNormal: Form(("loc", "scale"), _normal),
    TanhNormal: Form(("loc", "scale"), partial(_tanh_normal, Interval(0.0, 1.0, 0.0))),
    d.Categorical: Form(("logits",), _categorical),
    OneHotCategorical: Form(("logits",), _one_hot),
}
