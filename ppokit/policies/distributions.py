"""Known distributions: the policies that PPO meets most, by formula.

Each class gives the numbers of a distribution of torch or torchrl with fewer operations: samples
from the same random numbers; log-probabilities and entropies up to rounding. A *latent* is the
index of a choice, or a normal variable before the tanh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch import distributions as d
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
)
from torchrl.modules import TanhNormal as TorchRLTanhNormal

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _Known:
    """A distribution whose latents are actions as an environment takes and a batch stores them."""

    def to_action(self, latent: Tensor) -> Tensor:
        """Return the actions of latents, as an environment takes them."""
        return latent

    def encode(self, action: Tensor) -> Tensor:
        """Return an environment's actions as a batch stores them."""
        return action


class Normal(_Known):
    r"""Independent normals.

    .. math:: \log \pi(a) = \sum_i -\tfrac12 z_i^2 - \log \sigma_i - \tfrac12 \log 2 \pi,
        \qquad z = (a - \mu) / \sigma

    Args:
        loc: mean, ``[*B, F]``.
        scale: standard deviation, of the same shape, or of one that broadcasts to it.
        event_dims: number of dimensions of an action, which the sum is over.
    """

    def __init__(self, loc: Tensor, scale: Tensor, *, event_dims: int = 1) -> None:
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)
        self.loc, self.scale, self._event_dims = loc, scale, min(event_dims, loc.ndim)
        self._log_scale = scale.log()

    def has_log_prob_of(self, action: Tensor) -> bool:
        """Return whether the formulas hold for an action of this shape and dtype."""
        return action.shape == self.loc.shape and action.dtype == self.loc.dtype

    def sample(self) -> Tensor:
        """Draw latents ``[*B, F]``."""
        return self.loc + torch.empty_like(self.loc).normal_() * self.scale

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of stored actions ``[*B, F]``."""
        return self.log_prob_of_latent(action)

    def log_prob_of_latent(self, latent: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of the actions of latents."""
        return self._sum(-_HALF_LOG_2PI - self._energy(latent))

    def entropy(self, samples: int = 1) -> Tensor:
        """Return the entropy ``[*B]`` in nats; without a closed form, of so many samples."""
        return self._sum(self._log_scale + (_HALF_LOG_2PI + 0.5))

    def kl(self, new: Any) -> Tensor:
        r"""Return KL(self || new) ``[*B]`` in nats.

        .. math:: \tfrac12 \left( r + \frac{(\mu - \mu')^2}{\sigma'^2} - 1 - \log r \right),
            \qquad r = \sigma^2 / \sigma'^2
        """
        variances = (self.scale / new.scale).square()
        distance = ((self.loc - new.loc) / new.scale).square()
        return self._sum(0.5 * (variances + distance - 1 - variances.log()))

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters that must be finite; some logits may be minus infinity."""
        return self.loc, self.scale

    def _energy(self, x: Tensor) -> Tensor:
        """Return the negative log-density, less its constant."""
        z = (x - self.loc) / self.scale
        return torch.addcmul(self._log_scale, z, z, value=0.5)

    def _sum(self, x: Tensor) -> Tensor:
        if self._event_dims == 1:
            return x.sum(-1)
        return x.flatten(x.ndim - self._event_dims).sum(-1) if self._event_dims else x


class TanhNormal(Normal):
    r"""The tanh of independent normals, mapped to the interval from ``low`` to ``high``.

    .. math:: a = m + h \tanh x, \qquad
        \log \pi(a) = \log p(x) - \log h - \log(1 - \tanh^2 x)

    with the middle m and half the width h of the interval. The map is a bijection, so the KL
    divergence is that of the normals.

    ``low`` and ``high`` are numbers or ``[F]``. ``safe_tanh`` keeps actions away from the ends of
    the interval, where log-probabilities are infinite. The rest is as in :class:`Normal`.
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        *,
        low: float | Tensor = -1.0,
        high: float | Tensor = 1.0,
        safe_tanh: bool = True,
        event_dims: int = 1,
    ) -> None:
        super().__init__(loc, scale, event_dims=event_dims)
        self._edge = 1 - torch.finfo(loc.dtype).resolution if safe_tanh else None
        self._interval: tuple[Tensor, Tensor] | None = None  # middle and half the width
        if not all(isinstance(x, int | float) for x in (low, high)) or (low, high) != (-1, 1):
            # Numbers are rounded to float32 for every dtype of the parameters, as in torchrl.
            low, high = (torch.as_tensor(bound, device=loc.device) for bound in (low, high))
            self._interval = (high + low) / 2, (high - low) / 2

    def to_action(self, latent: Tensor) -> Tensor:
        """Return the actions of latents, as an environment takes them."""
        action = self._away_from_ends(latent.tanh())
        return action if self._interval is None else self._interval[0] + self._interval[1] * action

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of stored actions ``[*B, F]``."""
        if self._interval is not None:
            action = (action - self._interval[0]) / self._interval[1]
        return self.log_prob_of_latent(self._away_from_ends(action).atanh())

    def log_prob_of_latent(self, latent: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of the actions of latents."""
        return self._sum(-self._log_slope(latent) - self._energy(latent))

    def entropy(self, samples: int = 1) -> Tensor:
        """Return an estimate of the entropy ``[*B]`` in nats from so many samples."""
        # The random numbers that the distribution itself would draw.
        loc, scale = self.loc, self.scale
        shape = loc.shape if samples == 1 else (samples, *loc.shape)
        noise = torch.randn(shape, dtype=loc.dtype, device=loc.device)
        slope = self._log_slope(torch.addcmul(loc, scale, noise))
        entropy = torch.addcmul(slope + self._log_scale, noise, noise, value=0.5)
        return self._sum(entropy if samples == 1 else entropy.mean(0))

    def _away_from_ends(self, x: Tensor) -> Tensor:
        return x if self._edge is None else x.clamp(-self._edge, self._edge)

    def _log_slope(self, latent: Tensor) -> Tensor:
        """Return the logarithm of the derivative of actions by latents, plus that of sqrt(2 pi).

        1 - tanh(x)^2 would cancel for large x, so it is written with softplus.
        """
        shifted = torch.sub(latent, F.softplus(latent, beta=-2.0), alpha=2)  # x + softplus(-2 x)
        slope = torch.rsub(shifted, 2 * math.log(2.0) + _HALF_LOG_2PI, alpha=2)
        return slope if self._interval is None else slope + self._interval[1].log()


def bernoulli_kl(old: Tensor, new: Tensor) -> Tensor:
    r"""Return KL(old || new) of bits with these logits, which is finite where a bit is certain.

    .. math:: p \log \frac{p}{q} + (1 - p) \log \frac{1 - p}{1 - q}
    """
    log = F.logsigmoid
    return old.sigmoid() * (log(old) - log(new)) + (-old).sigmoid() * (log(-old) - log(-new))


class Categorical(_Known):
    r"""A choice of one of F, from unnormalized log-probabilities.

    .. math:: H = -\sum_i p_i \log p_i

    Args:
        logits: ``[*B, F]``; minus infinity where a choice is impossible.
        mask: True where a choice is possible; None allows all.
    """

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        self.logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)

    def has_log_prob_of(self, action: Tensor) -> bool:
        """Return whether the formulas hold for an action of this shape and dtype."""
        return action.shape == self.logits.shape[:-1] and not action.is_floating_point()

    def sample(self) -> Tensor:
        """Draw indices ``[*B]``: the winners of F exponential races, as torch.multinomial does."""
        probs = self.logits.softmax(-1)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of stored actions."""
        return self.log_prob_of_latent(action.long())

    def log_prob_of_latent(self, latent: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of choices ``[*B]``."""
        return self.logits.log_softmax(-1).gather(-1, latent.unsqueeze(-1)).squeeze(-1)

    def entropy(self, samples: int = 1) -> Tensor:
        """Return the entropy ``[*B]`` in nats; an impossible choice adds 0."""
        log_probs = self.logits.log_softmax(-1)
        bounded = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)  # 0 times it is 0
        return -(log_probs.exp() * bounded).sum(-1)

    def kl(self, new: Any) -> Tensor:
        """Return KL(self || new) ``[*B]`` in nats; an impossible choice adds 0."""
        before, after = self.logits.log_softmax(-1), new.logits.log_softmax(-1)
        gap = torch.where(before == -math.inf, 0, before - after)
        return (before.exp() * gap).sum(-1)

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters that must be finite; some logits may be minus infinity."""
        return (self.logits,)


class OneHot(Categorical):
    """A choice that a batch stores as a one-hot vector ``[*B, F]``."""

    def has_log_prob_of(self, action: Tensor) -> bool:
        """Return whether the formulas hold for an action of this shape and dtype."""
        return action.shape == self.logits.shape

    def encode(self, action: Tensor) -> Tensor:
        """Return an environment's actions as a batch stores them."""
        return F.one_hot(action, self.logits.shape[-1])

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of stored actions."""
        numbers = action.int() if action.dtype is torch.bool else action
        return self.log_prob_of_latent(numbers.argmax(-1))


KnownDistribution: TypeAlias = Normal | Categorical


class Family(NamedTuple):
    """A known distribution without its parameters; call it with them."""

    known: type[Normal] | type[Categorical]
    names: tuple[str, ...]  #: of the parameters, in order
    options: dict[str, Any] = {}  # noqa: RUF012  # not written to
    #: torchrl's further arguments, and the option that each is; None for one without effect
    arguments: dict[str, str | None] = {}  # noqa: RUF012

    def __call__(self, *parameters: Tensor) -> KnownDistribution:
        """Return the distribution of these parameters."""
        return self.known(*parameters, **self.options)


_LOC_SCALE, _MASKED = ("loc", "scale"), ("logits", "mask")
_UNUSED: dict[str, str | None] = {"upscale": None, "tanh_loc": None}
_OF_TANH = {name: name for name in ("low", "high", "safe_tanh", "event_dims")} | _UNUSED
_FAMILIES: tuple[tuple[type, Family], ...] = (
    (d.Normal, Family(Normal, _LOC_SCALE, {"event_dims": 0})),
    (IndependentNormal, Family(Normal, _LOC_SCALE, {}, {"event_dim": "event_dims", **_UNUSED})),
    (TorchRLTanhNormal, Family(TanhNormal, _LOC_SCALE, {}, _OF_TANH)),
    (d.Categorical, Family(Categorical, ("logits",))),
    (OneHotCategorical, Family(OneHot, ("logits",), {}, {"grad_method": None})),
    (MaskedCategorical, Family(Categorical, _MASKED, {}, {"use_cross_entropy": None})),
    (MaskedOneHotCategorical, Family(OneHot, _MASKED, {}, {"grad_method": None})),
)


def find_family(kind: Any, options: Any, names: Collection[str]) -> Family | str:
    """Return the distribution of a class with options and names of parameters, or why none is."""
    # by identity: a class need not be hashable, nor comparable
    family = next((family for of, family in _FAMILIES if of is kind), None)
    if family is None or type(options) is not dict:
        return f"the distribution {getattr(kind, '__name__', repr(kind))} is not known"
    name, found = kind.__name__, dict(family.options)
    if {*family.names} != {*names}:
        return f"the parameters {sorted(names)} of {name} are not known"
    if options.get("tanh_loc"):
        return f"{name} has tanh_loc=True"
    for key, value in options.items():
        if key not in family.arguments:
            return f"the argument {key!r} of {name} is not known"
        option = family.arguments[key]
        if option is not None and value is not None:
            found[option] = value
    return family._replace(options=found)


def sum_of_heads(terms: Iterable[Tensor], ndim: int) -> Tensor:
    """Sum the terms ``[*B, ...]`` of heads to one number a frame, ``[*B]`` of this ``ndim``."""
    return reduce(torch.add, (x.flatten(ndim).sum(-1) if x.ndim > ndim else x for x in terms))
