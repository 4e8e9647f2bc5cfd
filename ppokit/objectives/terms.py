"""Terms of the loss for each frame, their reductions, and diagnostics, over the valid frames.

Without a valid frame the diagnostics are as for a policy that has not moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit import _checks
from ppokit._keys import as_key, key_parts
from ppokit.functional import kl_estimate, masked_std
from ppokit.functional.distributions import sum_of_heads
from ppokit.functional.surrogates import clip_log_ratio
from ppokit.objectives.policy import exact_kl


def clipped_loss(
    log_ratio: Tensor, correction: Any, advantage: Tensor, low: Any, high: Any, upper: Any
) -> Tensor:
    """Return the negative clipped objective ``[*B, 1]``; ``upper`` is the log of the dual clip.

    Clipping is relative to the policy of ``log_ratio``; ``correction`` is the log-ratio of that
    policy to the one that collected the data, which the dual clip includes.
    """
    if upper is None:
        upper = math.inf
    elif correction is not None:
        upper = upper - correction
    clipped = clip_log_ratio(log_ratio, advantage, low, high, upper)
    return (clipped if correction is None else clipped + correction).exp() * -advantage


def scaled(coefficient: Tensor, term: Tensor) -> Tensor:
    """Return ``coefficient * term``, and 0 if the coefficient is 0 and the term infinite."""
    # A number does not promote float16, in which gradients that a GradScaler scales overflow.
    term = term.to(torch.promote_types(term.dtype, coefficient.dtype))
    if not _is_read_as_nonzero(coefficient):  # else where() would take longer than the product
        term = torch.where(coefficient == 0, 0, term)
    return coefficient * term


def _is_read_as_nonzero(number: Tensor) -> bool:
    if not _checks.reads_are_free(number.device):
        return False
    try:
        return number.item() != 0
    except RuntimeError:  # several numbers, as under torch.vmap
        return False


def entropy_loss(
    entropy: Any, coefficient: Tensor, coefficients: Mapping[NestedKey, Tensor] | None
) -> Tensor:
    """Return the negative entropy ``[*B, 1]``, times the coefficient of each head if it has one.

    ``entropy`` is ``[*B, 1]``, or a TensorDict with that of each head.
    """
    if coefficients is None:
        return scaled(-coefficient, total_entropy(entropy))
    of_heads = {} if isinstance(entropy, Tensor) else dict(entropy.items(True, True))
    terms = []
    for key, value in of_heads.items():
        # torchrl calls the entropy of ("action", "go") ("action", "go_entropy")
        *parents, name = key_parts(key)
        head = key if key in coefficients else as_key((*parents, name.removesuffix("_entropy")))
        if head in coefficients:
            terms.append(scaled(-coefficients[head], value))
    if len(terms) < max(len(of_heads), 1):
        raise KeyError(
            f"entropy_coeff has coefficients for {list(coefficients)}, the policy entropies "
            f"of {list(of_heads) or 'the whole action'}. Give each head a coefficient, and call "
            "tensordict.nn.set_composite_lp_aggregate(False).set() before the actor is made."
        )
    return torch.stack(terms).sum(0)


def total_entropy(entropy: Any) -> Tensor:
    """Return the sum ``[*B, 1]`` of the entropies of all heads."""
    if isinstance(entropy, Tensor):
        return entropy
    return sum_of_heads(entropy.values(True, True), entropy.ndim)


def kl_penalty(
    head: Any, old: Any, minibatch: TensorDictBase, coefficient: Tensor, log_ratio: Tensor
) -> Tensor:
    """Return KL(old || new) ``[*B, 1]``: exact if the old parameters are known, or k3."""
    if old is not None:
        new = {key: minibatch.get(key) for key in old}
        kl = exact_kl(head, old, new, coefficient, log_ratio.shape[:-1])
        if kl is not None and kl.shape == log_ratio.shape:
            return kl
    # Masked before the exponential, so that no 0 * inf is in the gradient either.
    return kl_estimate(torch.where(coefficient == 0, torch.zeros_like(log_ratio), log_ratio))


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    r"""Return the share of the variance that the value explains.

    .. math:: 1 - \frac{\mathrm{Var}(target - V)}{\mathrm{Var}(target)}
    """
    if mask is None:
        residual = torch.var(target - value, correction=0, dim=0)
        total = torch.var(target, correction=0, dim=0)
    else:
        valid = mask | ~mask.any()
        errors = (torch.where(mask, x, 0) for x in (target - value, target))
        residual, total = (masked_std(x, valid, correction=0).square() for x in errors)
    return 1.0 - residual / (total + torch.finfo(target.dtype).eps)


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
    term = term if mask is None else torch.where(mask, term, 0)
    return term.sum() if reduction == "sum" else term.squeeze(-1)


def policy_diagnostics(
    log_ratio: Tensor,
    advantage: Tensor,
    bounds: tuple[Tensor, Tensor],
    upper: Tensor | None,
    mask: Tensor | None,
    ratio: Tensor,
) -> dict[str, Tensor]:
    r"""Return diagnostics of how far the policy has moved from the one that collected the data.

    .. math:: ESS = \frac{(\sum_i \rho_i)^2}{N \sum_i \rho_i^2}

    is 1 if all ratios are equal, and 1/N if one outweighs the others. All tensors are ``[*B, 1]``.
    Clipping acts on ``log_ratio``. ``ratio`` is the log-ratio to the policy that collected the
    data, which differs from it with a delayed actor.
    """
    if mask is not None:
        empty = ~mask.any()
        mask = mask | empty
        log_ratio, ratio = (torch.where(empty, 0, x) for x in (log_ratio, ratio))
    clipped = log_ratio.clamp(*bounds) != log_ratio
    if upper is None:
        bounded = log_ratio.new_zeros(())
    else:
        bounded = mean((advantage < 0) & (ratio > upper), mask, log_ratio.dtype)
    if mask is None:
        log, size = ratio.squeeze(-1), ratio.shape[0]
    else:
        log, size = torch.where(mask, ratio, -math.inf).flatten(), mask.sum()
    relative = (log - log.amax(0)).exp()  # which does not overflow
    total, ratios = relative.sum(0), log.exp()
    return {
        "kl_approx": -mean(log_ratio, mask),
        "clip_fraction": mean(clipped, mask, log_ratio.dtype),
        "ESS": total * total / (relative * relative).sum(0) / size,
        "max_ratio": ratios.max(),
        "mean_ratio": ratios.mean() if mask is None else ratios.sum() / size,
        "kl": mean(kl_estimate(log_ratio), mask),
        "dual_clip_fraction": bounded,
    }
