"""The losses of a minibatch with their derivatives, and the diagnostics, all without gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import scaled
from ppokit.objectives.policies import Evaluated
from ppokit.objectives.slopes import Group


class Minibatch(NamedTuple):
    """What the losses are computed from beside the policy, ``[*B, 1]`` but for the first."""

    old_log_prob: Tensor  #: ``[*B]``
    advantage: Tensor
    value: Tensor | None
    target: Tensor | None
    old_value: Tensor | None
    mask: Tensor | None


class Coefficients(NamedTuple):
    """Coefficients and bounds, one number each; None where a term is absent."""

    clip_epsilon_low: Tensor
    clip_epsilon_high: Tensor
    dual_clip: Tensor | None
    clip_value: Tensor | None
    loss_clip: Tensor | None
    entropy_coeff: Tensor | None
    critic_coeff: Tensor | None
    kl_coeff: Tensor | None


class Settings(NamedTuple):
    """What else tells how the terms are computed."""

    loss_critic_type: str
    reduction: str
    log_explained_variance: bool


class Summary(NamedTuple):
    """The results that someone waits for, as numbers."""

    loss_objective: float
    loss_critic: float
    kl: float
    ess: float


class Terms(NamedTuple):
    """Losses and diagnostics, and what the losses depend on, and how."""

    losses: dict[str, Tensor]
    diagnostics: dict[str, Tensor]
    groups: list[Group]
    summary: Summary | None = None


LOSSES = ("loss_objective", "loss_entropy", "loss_critic", "loss_kl")
CRITIC = LOSSES.index("loss_critic")
LOG_PROB, ENTROPY, VALUE = range(3)
INPUTS = (LOG_PROB, ENTROPY, VALUE, LOG_PROB)  # what each loss depends on


def loss_terms(
    policy: Evaluated, batch: Minibatch, coefficients: Coefficients, settings: Settings
) -> Terms:
    """Return the terms of the loss, in torch; to be called without gradient."""
    mask = batch.mask
    log_ratio = policy.log_prob - batch.old_log_prob.unsqueeze(-1)
    size = log_ratio.numel() if mask is None else mask.sum().clamp_min(1).to(log_ratio.dtype)
    weight = 1 / size if settings.reduction == "mean" else 1.0
    losses: dict[str, Tensor] = {}
    slopes: dict[int, Tensor] = {}

    def add(kind: int, term: Tensor, slope: Tensor, coefficient: Tensor | None) -> None:
        if mask is not None:
            term, slope = torch.where(mask, term, 0), torch.where(mask, slope, 0)
        total, slope = weight * term.sum(), weight * slope
        if coefficient is not None:
            total, slope = scaled(coefficient, total), scaled(coefficient, slope)
        slopes[kind], losses[LOSSES[kind]] = slope, total

    gain, slope = _surrogate(log_ratio, batch.advantage, coefficients)
    add(0, -gain, -slope, None)
    if coefficients.entropy_coeff is not None:
        add(1, -policy.entropy, -torch.ones_like(policy.entropy), coefficients.entropy_coeff)
    if batch.value is not None and batch.target is not None:
        kind = settings.loss_critic_type
        loss, slope = _critic(batch.value, batch.target, batch.old_value, kind, coefficients)
        add(2, loss, slope, coefficients.critic_coeff)
    if coefficients.kl_coeff is not None:
        add(3, log_ratio.expm1() - log_ratio, log_ratio.expm1(), coefficients.kl_coeff)
    found = _diagnostics(policy, batch, coefficients, settings, log_ratio)
    return Terms(losses, found, through(policy, slopes, batch.value))


def through(policy: Evaluated, slopes: Mapping[int, Tensor], value: Tensor | None) -> list[Group]:
    """Return what the losses depend on in the end, by the chain rule.

    Args:
        policy: what they depend on at first, with its own slopes.
        slopes: of each kind of loss there is, in that, ``[*B, 1]``.
        value: the critic's.
    """
    number = {kind: i for i, kind in enumerate(slopes)}

    def group(tensors: list[Tensor], *terms: int, inner: Any = None) -> Group:
        kinds = [kind for kind in slopes if INPUTS[kind] in terms]
        found = [
            [slopes[kind]] if inner is None else [slopes[kind] * x for x in inner[INPUTS[kind]]]
            for kind in kinds
        ]
        return Group(
            tensors, tuple(number[kind] for kind in kinds), tuple(range(len(found))), found
        )

    values = [] if value is None else [group([value], VALUE)]
    if policy.slopes is None:
        return [group([policy.log_prob], LOG_PROB), group([policy.entropy], ENTROPY), *values]
    return [group(policy.parameters, LOG_PROB, ENTROPY, inner=policy.slopes), *values]


def _diagnostics(
    policy: Evaluated,
    batch: Minibatch,
    coefficients: Coefficients,
    settings: Settings,
    log_ratio: Tensor,
) -> dict[str, Tensor]:
    mask = batch.mask
    low, high = _log_bounds(coefficients)
    clipped = (log_ratio.clamp(low, high) != log_ratio).to(log_ratio.dtype)
    found = diagnostics.ratio_statistics(log_ratio, mask) | {
        "kl_approx": diagnostics.mean(-log_ratio, mask),
        "clip_fraction": diagnostics.mean(clipped, mask),
        "kl": diagnostics.mean(log_ratio.expm1() - log_ratio, mask),
        "dual_clip_fraction": diagnostics.dual_clip_fraction(
            log_ratio, batch.advantage, coefficients.dual_clip, mask
        ),
    }
    if coefficients.entropy_coeff is not None:
        found["entropy"] = diagnostics.mean(policy.entropy, mask)
    value, target, old_value = batch[2:5]
    if value is not None and old_value is not None and coefficients.clip_value is not None:
        found["value_clip_fraction"] = diagnostics.value_clip_fraction(
            value, old_value, coefficients.clip_value, mask
        )
    if value is not None and target is not None and settings.log_explained_variance:
        found["explained_variance"] = diagnostics.explained_variance(target, value, mask)
    return found


def _log_bounds(coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    return (-coefficients.clip_epsilon_low).log1p(), coefficients.clip_epsilon_high.log1p()


def _surrogate(
    log_ratio: Tensor, advantage: Tensor, coefficients: Coefficients
) -> tuple[Tensor, Tensor]:
    """What :func:`ppokit.functional.clipped_surrogate` computes, and its slope."""
    low, high = _log_bounds(coefficients)
    lost = log_ratio.clamp_min(low)
    if coefficients.dual_clip is not None:
        lost = lost.clamp_max(coefficients.dual_clip.to(lost.dtype).log())
    bounded = torch.where(advantage < 0, lost, log_ratio.clamp_max(high))
    gain = bounded.exp() * advantage
    return gain, gain * (bounded == log_ratio)


def _critic(
    value: Tensor,
    target: Tensor,
    old_value: Tensor | None,
    kind: str,
    coefficients: Coefficients,
) -> tuple[Tensor, Tensor]:
    """What :func:`ppokit.functional.clipped_critic_loss` computes, and its slope."""
    loss, slope = _distance(value, target, kind)
    if coefficients.clip_value is not None and old_value is not None:
        moved = value - old_value
        near_move = moved.clamp(-coefficients.clip_value, coefficients.clip_value)
        near_loss, _ = _distance(old_value + near_move, target, kind)
        # Near enough, both losses are one; further out the clipped one does not move.
        far = moved != near_move
        slope = torch.where(far & (near_loss > loss), 0, slope)
        # The gradient of a maximum is shared where both are equal.
        slope = torch.where(far & (near_loss == loss), slope / 2, slope)
        loss = torch.where(far, torch.maximum(loss, near_loss), loss)
    if coefficients.loss_clip is not None:
        slope = torch.where(loss > coefficients.loss_clip, 0, slope)
        loss = loss.clamp_max(coefficients.loss_clip)
    return loss, slope


def _distance(value: Tensor, target: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    error = value - target
    if kind == "l2":
        return error.square(), 2 * error
    if kind == "l1":
        return error.abs(), error.sign()
    return F.smooth_l1_loss(value, target, reduction="none"), error.clamp(-1, 1)
