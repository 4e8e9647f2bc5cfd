"""Log-densities, entropies and divergences of the policies that PPO meets most.

The distributions' own methods give the same, in a hundred small steps with a gradient for each.
Where no closed form of a divergence is known, it is estimated from samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ppokit.functional._checks import at_least_float32, check_float

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def sum_of_heads(terms: Iterable[Tensor], ndim: int) -> Tensor:
    """Sum the terms ``[*B, ...]`` of an action's heads to one number a frame ``[*B]``.

    ``ndim`` is the number of dimensions of B.
    """
    return reduce(torch.add, (x.flatten(ndim).sum(-1) if x.ndim > ndim else x for x in terms))


def normal_log_density(z: Tensor, scale: Tensor) -> Tensor:
    r"""Log-density of a normal at :math:`loc + scale \cdot z`, element by element.

    .. math:: -\tfrac12 z^2 - \log \sigma - \tfrac12 \log 2 \pi
    """
    return torch.addcmul(-_HALF_LOG_2PI - scale.log(), z, z, value=-0.5)


def normal_entropy(scale: Tensor) -> Tensor:
    r"""Entropy of a normal in nats, :math:`\log \sigma + \tfrac12 \log 2 \pi e`, by element."""
    return scale.log() + (0.5 + _HALF_LOG_2PI)


def normal_kl(loc: Tensor, scale: Tensor, new_loc: Tensor, new_scale: Tensor) -> Tensor:
    r"""KL(old || new) of two normals in nats, element by element.

    .. math:: \tfrac12 \left( r + \frac{(\mu - \mu')^2}{\sigma'^2} - 1 - \log r \right),
        \qquad r = \sigma^2 / \sigma'^2

    The same holds after a bijection of both, such as a tanh.
    """
    variances = (scale / new_scale).square()
    return 0.5 * (variances + ((loc - new_loc) / new_scale).square() - 1 - variances.log())


def tanh_interval(
    low: float | Tensor, high: float | Tensor, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return middle and half the width of the interval that a tanh is mapped to.

    None stands for [-1, 1] in numbers. The dtype is the bounds' own, as torchrl's ``TanhNormal``
    has it: rounded to float32, whatever the parameters are, where they are numbers.
    """
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and (low, high) == (-1, 1):
        return None
    low, high = (torch.as_tensor(bound, device=device) for bound in (low, high))
    return (high + low) / 2, (high - low) / 2


def log_tanh_slope(x: Tensor) -> Tensor:
    r"""Return :math:`\log(1 - \tanh^2 x)`, which does not cancel where tanh(x) is close to 1."""
    shifted = torch.sub(x, F.softplus(x, beta=-2.0), alpha=2)  # x + softplus(-2 x)
    return torch.rsub(shifted, 2 * math.log(2.0), alpha=2)


def tanh_normal_terms(
    loc: Tensor, scale: Tensor, action: Tensor, noise: Tensor, interval: tuple[Any, Any, Any]
) -> tuple[Tensor, Tensor]:
    """Log-probability of a tanh-normal action, and an estimate of the entropy, ``[*B, F]`` each.

    Args:
        loc: of the normal, ``[*B, F]``.
        scale: of the normal, likewise.
        action: within the interval, likewise.
        noise: standard normal, ``[S, *B, F]``: draws what the entropy is estimated from.
        interval: its middle, half its width and the logarithm of that.
    """
    middle, half_width, log_half_width = interval
    edge = 1 - torch.finfo(loc.dtype).resolution
    x = ((action - middle) / half_width).clamp(-edge, edge).atanh()
    log_prob = normal_log_density((x - loc) / scale, scale) - (log_tanh_slope(x) + log_half_width)
    sampled = log_tanh_slope(torch.addcmul(loc, scale, noise)).mean(0)
    of_normal = noise.square().mean(0) / 2 + _HALF_LOG_2PI + log_half_width
    return log_prob, sampled + scale.log() + of_normal


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Log-probability ``[*B, 1]`` of choices ``[*B]`` under unnormalised ones ``[*B, F]``."""
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1))


def categorical_entropy(logits: Tensor) -> Tensor:
    r"""Entropy ``[*B, 1]`` in nats, :math:`-\sum_i p_i \log p_i`; an impossible choice adds 0."""
    log_probs = logits.log_softmax(-1)
    bounded = log_probs.clamp_min(torch.finfo(logits.dtype).min)  # 0 times it is 0
    return -(log_probs.exp() * bounded).sum(-1, keepdim=True)


def categorical_kl(logits: Tensor, new_logits: Tensor) -> Tensor:
    """KL(old || new) ``[*B, 1]`` in nats; what was impossible adds 0."""
    old, new = logits.log_softmax(-1), new_logits.log_softmax(-1)
    gap = torch.where(old == -math.inf, 0, old - new)
    return (old.exp() * gap).sum(-1, keepdim=True)


def kl_estimate(log_ratio: Tensor, *, estimator: str = "k3") -> Tensor:
    r"""Estimate of KL(old || new) per sample, in nats, from actions drawn by the old policy.

    .. math::
        k_1 = -d, \qquad k_2 = \tfrac12 d^2, \qquad k_3 = e^d - 1 - d,
        \qquad d = \log \pi_{new}(a|s) - \log \pi_{old}(a|s)

    (Schulman, 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.) k1 is
    unbiased but negative half of the time near zero; k2 is biased; k3 is unbiased, never negative
    up to rounding, and has the smallest variance of the three when the policies are close.

    Args:
        log_ratio: d, of any shape.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.

    Returns:
        The estimate per sample, of the shape and dtype of ``log_ratio``.

    Raises:
        TypeError: ``log_ratio`` is not a float tensor.
        ValueError: ``estimator`` is unknown.

    Example:
        >>> kl_estimate(torch.tensor([0.0, 0.1, -0.1]))
        tensor([0.0000, 0.0052, 0.0048])
    """
    check_float("log_ratio", log_ratio)
    d = at_least_float32(log_ratio)
    if estimator == "k1":
        kl = -d
    elif estimator == "k2":
        kl = d.square() / 2
    elif estimator == "k3":
        kl = torch.expm1(d) - d
    else:
        raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}.")
    return kl.to(log_ratio.dtype)
