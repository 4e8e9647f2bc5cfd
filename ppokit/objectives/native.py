"""The same losses and diagnostics with their derivatives, in one pass over the minibatch, in C."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ppokit.kernels import direct_kernel
from ppokit.objectives.coefficients import Coefficients
from ppokit.objectives.policy_terms import Normal, Policy, Terms
from ppokit.objectives.terms import Minibatch, Outputs

LARGEST = 2**16  # elements; beyond it torch's vectors and threads are as fast

# In the kernel's order: first the losses, of policy, entropy, KL and critic.
LOSSES = ("loss_objective", "loss_entropy", "loss_kl", "loss_critic")
_RESULTS = (
    *LOSSES,
    *("entropy", "value_clip_fraction", "explained_variance", "kl_approx", "clip_fraction"),
    *("ESS", "max_ratio", "mean_ratio", "kl", "dual_clip_fraction"),
)


def loss_terms(
    policy: Policy, batch: Minibatch, coefficients: Coefficients, loss: Any
) -> Outputs | None:
    """Return what :func:`ppokit.objectives.terms.loss_terms` does, or None where it has to."""
    kernel, advantage = direct_kernel(), batch.advantage
    if kernel is None or batch.mask is not None or advantage.ndim != 2 or not advantage.is_cpu:
        return None
    if isinstance(policy, Terms) or max(advantage.numel(), policy[0].numel()) > LARGEST:
        return None
    for x in (*coefficients, *policy[4:]):  # bounds may be learned, too
        if isinstance(x, Tensor) and x.requires_grad:
            return None
    factors: list[Any] = [None if x is None else x.item() for x in coefficients]
    low, high, dual_clip, clip_value, loss_clip, entropy_coeff, critic_coeff, kl_coeff = factors
    has_critic, has_entropy = batch.value is not None, entropy_coeff is not None
    has_old_value, explained = batch.old_value is not None, loss.log_explained_variance
    present = True, has_entropy, kl_coeff is not None, has_critic, has_entropy, has_old_value
    names = _names(*present, has_critic and explained)
    clip = _log_bounds(low, high, dual_clip, coefficients[0].dtype, advantage.dtype)
    weight = 1 / advantage.numel() if loss.reduction == "mean" else 1.0
    bounds = *clip, clip_value or 0.0, math.inf if loss_clip is None else loss_clip
    numbers = (*bounds, entropy_coeff or 0.0, critic_coeff or 0.0, kl_coeff or 0.0, weight)
    arguments = *batch[:-1], numbers, loss.loss_critic_type, names
    if isinstance(policy, Normal):
        results = kernel.normal_loss_terms(*_with_numbers(policy), *arguments)
    else:
        results = kernel.categorical_loss_terms(*policy, *arguments)
    if results is NotImplemented:
        return None
    outputs, slopes, value_slopes = results
    # Apart, so that the losses of separate networks can be run backward one by one.
    losses = [outputs.get(name) for name in LOSSES[:3]]
    attached: Any = _Linear.apply((slopes, losses), *policy[: slopes.shape[1]])
    outputs |= {name: x for name, x in zip(LOSSES, attached, strict=False) if x is not None}
    if has_critic:
        known = value_slopes, [outputs["loss_critic"]]
        (outputs["loss_critic"],) = _Linear.apply(known, batch.value)  # pyright: ignore
    return outputs


class _Linear(torch.autograd.Function):
    r"""Numbers whose derivatives in some tensors are known.

    .. math:: \bar x_j = \sum_i \bar y_i \, s_{ij}

    where a bar marks the gradient. ``known`` is the slopes ``[K, P, *S]`` of K numbers in P
    tensors ``[*S]``, and the numbers, None where one is left out.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, known: tuple[Tensor, list[Tensor | None]], *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        # Neither inputs nor outputs, and no one else's: autograd need not keep watch over them.
        ctx.slopes, numbers = known
        return tuple(numbers)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A second derivative is asked for (create_graph=True), and the fast path of the "
                "loss has none: its first derivative would count as a constant. Build the loss "
                "with fast=False."
            )
        slopes, kernel = ctx.slopes, direct_kernel()
        sums = NotImplemented if kernel is None else kernel.weighted_slopes(slopes, gradients)
        if sums is NotImplemented:
            given = [slopes.new_zeros(()) if x is None else x.to(slopes.dtype) for x in gradients]
            sums = torch.tensordot(torch.stack(given), slopes, 1).unbind(0)
        return (None, *sums)


def _with_numbers(policy: Normal) -> Normal:
    """Return a policy whose interval is given in numbers."""
    middle, half_width, log_half_width = policy[4:]
    if not isinstance(middle, Tensor):
        return policy
    if middle.numel() == 1:
        return Normal(*policy[:4], middle.item(), half_width.item(), log_half_width.item())
    action = (policy.action - middle) / half_width
    return Normal(*policy[:2], action, policy.noise, 0.0, 1.0, log_half_width.mean().item())


@lru_cache
def _names(*present: bool) -> tuple[str | None, ...]:
    """Return the names of the results, None in place of those that are absent."""
    names = [name if there else None for name, there in zip(_RESULTS, present, strict=False)]
    return (*names, *_RESULTS[len(names) :])


@lru_cache
def _log_bounds(
    low: float, high: float, dual_clip: float | None, dtype: torch.dtype, result_dtype: torch.dtype
) -> tuple[float, ...]:
    """Return the bounds of the log-ratio.

    Logarithms are taken by torch, in the dtype of the coefficient, so that both kernels clip at the
    same ratio.
    """
    bounds = torch.tensor([-low, high], dtype=dtype).log1p().tolist()
    if dual_clip is None:
        return (*bounds, math.inf)
    return (*bounds, torch.tensor(dual_clip, dtype=result_dtype).log().item())
