"""Diagnostics and reductions of the loss, over the valid frames if there is a mask.

Without a valid frame the diagnostics are those of a policy that has not moved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppokit.functional import kl_estimate, masked_std


def mean(x: Tensor, mask: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean over the valid frames; of a bool in a dtype."""
    if mask is None:
        return x.mean(dtype=dtype)
    mask = mask.expand_as(x)
    return torch.where(mask, x, 0).sum(dtype=dtype) / mask.sum().clamp_min(1)


def reduce(term: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Return the mean or the sum over the valid frames; with "none" the terms, 0 elsewhere."""
    if reduction == "mean":
        return mean(term, mask)
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
    term = term if mask is None else torch.where(mask, term, 0)
    return term.sum() if reduction == "sum" else term.squeeze(-1)


def of_policy(
    log_ratio: Tensor,
    advantage: Tensor,
    bounds: tuple[Tensor, Tensor],
    dual_clip: Tensor | None,
    mask: Tensor | None,
    behaviour_log_ratio: Tensor | None = None,
) -> dict[str, Tensor]:
    r"""Return what tells how far the policy has moved from the one that collected the data.

    .. math:: ESS = \frac{(\sum_i \rho_i)^2}{N \sum_i \rho_i^2}

    is 1 where all ratios are equal, and 1/N where one outweighs the rest. All tensors are
    ``[*B, 1]``. Clipping acts on ``log_ratio``; the ratio to the policy that collected the data may
    be another one.
    """
    ratio = log_ratio if behaviour_log_ratio is None else behaviour_log_ratio
    if mask is not None:
        empty = ~mask.any()
        mask = mask | empty
        log_ratio, ratio = (torch.where(empty, 0, x) for x in (log_ratio, ratio))
    clipped = log_ratio.clamp(*bounds) != log_ratio
    bounded = torch.zeros_like(clipped)
    if dual_clip is not None:
        bounded = (advantage < 0) & (ratio > dual_clip.to(ratio.dtype).log())
    return {
        "kl_approx": -mean(log_ratio, mask),
        "clip_fraction": mean(clipped, mask, log_ratio.dtype),
        **_ratio_statistics(ratio, mask),
        "kl": mean(kl_estimate(log_ratio), mask),
        "dual_clip_fraction": mean(bounded, mask, log_ratio.dtype),
    }


def _ratio_statistics(log_ratio: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    if mask is None:
        log, size = log_ratio.squeeze(-1), log_ratio.shape[0]
    else:
        log, size = torch.where(mask, log_ratio, -math.inf).flatten(), mask.sum()
    largest = log.amax(0)  # the ratios are relative to it, and do not overflow
    relative = (log - largest).exp()
    total = relative.sum(0)
    effective = total.square() / relative.square().sum(0)
    ratio = log.exp()
    average = ratio.mean() if mask is None else ratio.sum() / size
    return {"ESS": effective / size, "max_ratio": ratio.max(), "mean_ratio": average}


def of_critic(
    value: Tensor,
    target: Tensor,
    old_value: Tensor | None,
    clip_value: Tensor | None,
    mask: Tensor | None,
    log_explained_variance: bool,
) -> dict[str, Tensor]:
    r"""Return the share of clipped values and of the variance that the value explains.

    .. math:: 1 - \frac{\mathrm{Var}(target - V)}{\mathrm{Var}(target)}
    """
    found: dict[str, Tensor] = {}
    if old_value is not None and clip_value is not None:
        moved = value - old_value
        clipped = moved != moved.clamp(-clip_value, clip_value)
        found["value_clip_fraction"] = mean(clipped, mask, value.dtype)
    if log_explained_variance:
        eps = torch.finfo(target.dtype).eps
        if mask is None:
            residual = torch.var(target - value, correction=0, dim=0)
            total = torch.var(target, correction=0, dim=0)
        else:
            valid = mask | ~mask.any()
            target, error = (torch.where(mask, x, 0) for x in (target, target - value))
            residual = masked_std(error, valid, correction=0).square()
            total = masked_std(target, valid, correction=0).square()
        found["explained_variance"] = 1.0 - residual / (total + eps)
    return found
