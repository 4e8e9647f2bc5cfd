"""The losses and diagnostics of a minibatch, on tensors and under autograd."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppokit.functional import clipped_critic_loss, kl_estimate
from ppokit.functional.surrogates import clip_log_ratio
from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import Coefficients, scaled
from ppokit.objectives.policy_terms import Policy


class Minibatch(NamedTuple):
    """What the losses are computed from beside the policy, ``[*B, 1]`` but for the first."""

    old_log_prob: Tensor  #: ``[*B]``
    advantage: Tensor
    value: Tensor | None = None
    target: Tensor | None = None
    old_value: Tensor | None = None
    mask: Tensor | None = None


Outputs = dict[str, Tensor]


def loss_terms(policy: Policy, batch: Minibatch, coefficients: Coefficients, loss: Any) -> Outputs:
    """Return the losses, ``"loss_*"``, and the diagnostics, which have no gradient."""
    mask, (log_prob, entropy) = batch.mask, policy.terms()
    log_ratio = log_prob - batch.old_log_prob.unsqueeze(-1)

    def reduced(term: Tensor, coefficient: Tensor | None) -> Tensor:
        total = reduce(term, mask, loss.reduction)
        return total if coefficient is None else scaled(coefficient, total)

    low, high, dual_clip, clip_value, loss_clip, *factors = coefficients
    entropy_coeff, critic_coeff, kl_coeff = factors
    bounds = (-low).log1p(), high.log1p()
    upper = math.inf if dual_clip is None else dual_clip.to(log_ratio.dtype).log()
    gain = clip_log_ratio(log_ratio, batch.advantage, *bounds, upper).exp() * batch.advantage
    losses = {"loss_objective": reduced(-gain, None)}
    if entropy_coeff is not None:
        losses["loss_entropy"] = reduced(-entropy, entropy_coeff)
    if kl_coeff is not None:
        losses["loss_kl"] = reduced(kl_estimate(silenced(log_ratio, kl_coeff)), kl_coeff)
    value, target, old_value = batch.value, batch.target, batch.old_value
    if value is not None and target is not None:
        of_critic = clipped_critic_loss(
            value,
            target,
            old_value=old_value,
            clip_value=clip_value,
            loss_clip=loss_clip,
            kind=loss.loss_critic_type,
        )
        losses["loss_critic"] = reduced(of_critic, critic_coeff)
    with torch.no_grad():
        found = {} if entropy_coeff is None else {"entropy": diagnostics.mean(entropy, mask)}
        if value is not None and target is not None:
            found |= diagnostics.of_critic(
                value, target, old_value, clip_value, mask, loss.log_explained_variance
            )
        found |= diagnostics.of_policy(log_ratio, batch.advantage, bounds, dual_clip, mask)
    return losses | found


def reduce(term: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Return the sum or the mean over the valid frames."""
    if reduction == "mean":
        return diagnostics.mean(term, mask)
    return (term if mask is None else torch.where(mask, term, 0)).sum()


def silenced(log_ratio: Tensor, coefficient: Tensor) -> Tensor:
    """Return 0 in place of a log-ratio whose coefficient is 0: its exponential may overflow."""
    return torch.where(coefficient == 0, torch.zeros_like(log_ratio), log_ratio)
