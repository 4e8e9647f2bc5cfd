"""Diagnostics of a PPO loss, over the valid frames where there is a mask.

Without a mask each is computed as torchrl computes it, to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppokit.functional import masked_mean, masked_std


def mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the valid frames."""
    return x.mean() if mask is None else masked_mean(x, mask.reshape(x.shape))


def ratio_statistics(log_ratio: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    r"""Return the effective sample size and the largest and mean ratio.

    .. math:: ESS = \frac{(\sum_i \rho_i)^2}{N \sum_i \rho_i^2}

    1 where all ratios are equal, 1/N where one outweighs the rest.
    """
    if mask is None:
        log, size, ratio = log_ratio.squeeze(-1), log_ratio.shape[0], log_ratio.exp()
    else:
        log = torch.where(mask, log_ratio, -math.inf).flatten()
        size, ratio = mask.sum(), log.exp()
    effective = (2 * log.logsumexp(0) - (2 * log).logsumexp(0)).exp()
    average = ratio.mean() if mask is None else ratio.sum() / size
    return {"ESS": effective / size, "max_ratio": ratio.max(), "mean_ratio": average}


def explained_variance(target: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    r"""Return the share of the target's variance that the value explains.

    .. math:: 1 - \frac{\mathrm{Var}(target - V)}{\mathrm{Var}(target)}
    """
    eps = torch.finfo(target.dtype).eps
    if mask is None:
        residual = torch.var(target - value, correction=0, dim=0)
        return 1.0 - residual / (torch.var(target, correction=0, dim=0) + eps)
    residual = masked_std(target - value, mask, correction=0).square()
    return 1.0 - residual / (masked_std(target, mask, correction=0).square() + eps)


def value_clip_fraction(
    value: Tensor, old_value: Tensor, clip_value: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the share of values that moved further than ``clip_value``."""
    moved = value - old_value
    return mean((moved != moved.clamp(-clip_value, clip_value)).to(value.dtype), mask)


def dual_clip_fraction(
    log_ratio: Tensor, advantage: Tensor, dual_clip: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Return the share of samples whose loss the dual clip bounds."""
    if dual_clip is None:
        return log_ratio.new_zeros(())
    bounded = (advantage < 0) & (log_ratio > dual_clip.to(log_ratio.dtype).log())
    return mean(bounded.to(log_ratio.dtype), mask)
