"""The losses of a minibatch with their derivatives, and the diagnostics, all without gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import scaled
from ppokit.objectives.policies import Evaluated

Slopes = dict[tuple[int, int], Tensor]


class Minibatch(NamedTuple):
    """What the losses are computed from beside the policy, ``[*B, 1]`` but for the first."""

    old_log_prob: Tensor  #: ``[*B]``
    advantage: Tensor
    value: Tensor | None
    target: Tensor | None
    old_value: Tensor | None
    mask: Tensor | None


class Options(NamedTuple):
    """Coefficients and bounds; None where a term is absent."""

    clip_epsilon: tuple[Tensor, Tensor]
    dual_clip: Tensor | None
    clip_value: Tensor | None
    loss_clip: Tensor | None
    entropy_coeff: Tensor | None
    critic_coeff: Tensor | None
    kl_coeff: Tensor | None
    loss_critic_type: str
    reduction: str
    log_explained_variance: bool


class Terms(NamedTuple):
    """Losses and diagnostics, and the slopes of loss i in the tensors of group g."""

    losses: dict[str, Tensor]
    diagnostics: dict[str, Tensor]
    groups: list[list[Tensor]]
    slopes: Slopes


LOSSES = ("loss_objective", "loss_entropy", "loss_critic", "loss_kl")
LOG_PROB, ENTROPY, VALUE = range(3)
INPUTS = (LOG_PROB, ENTROPY, VALUE, LOG_PROB)  # what each loss depends on


def loss_terms(policy: Evaluated, batch: Minibatch, options: Options) -> Terms:
    """Return the terms of the loss, in torch; to be called without gradient."""
    mask = batch.mask
    log_ratio = policy.log_prob - batch.old_log_prob.unsqueeze(-1)
    size = log_ratio.numel() if mask is None else mask.sum().clamp_min(1).to(log_ratio.dtype)
    weight = 1 / size if options.reduction == "mean" else 1.0
    losses: dict[str, Tensor] = {}
    slopes: Slopes = {}

    def add(kind: int, term: Tensor, slope: Tensor, coefficient: Tensor | None) -> None:
        if mask is not None:
            term, slope = torch.where(mask, term, 0), torch.where(mask, slope, 0)
        total, slope = weight * term.sum(), weight * slope
        if coefficient is not None:
            total, slope = scaled(coefficient, total), scaled(coefficient, slope)
        slopes[len(losses), INPUTS[kind]] = slope
        losses[LOSSES[kind]] = total

    gain, slope = _surrogate(log_ratio, batch.advantage, options)
    add(0, -gain, -slope, None)
    if options.entropy_coeff is not None:
        add(1, -policy.entropy, -torch.ones_like(policy.entropy), options.entropy_coeff)
    if batch.value is not None and batch.target is not None:
        loss, slope = _critic(batch.value, batch.target, batch.old_value, options)
        add(2, loss, slope, options.critic_coeff)
    if options.kl_coeff is not None:
        add(3, log_ratio.expm1() - log_ratio, log_ratio.expm1(), options.kl_coeff)
    found = _diagnostics(policy, batch, options, log_ratio)
    return Terms(losses, found, *through(policy, slopes, batch.value))


def through(
    policy: Evaluated, slopes: Slopes, value: Tensor | None
) -> tuple[list[list[Tensor]], Slopes]:
    """Return what the losses depend on in the end, and their slopes in that, by the chain rule."""
    values = [] if value is None else [[value]]
    inner = policy.slopes
    if inner is None:
        found = {link: slope.unsqueeze(0) for link, slope in slopes.items()}
        return [[policy.log_prob], [policy.entropy], *values], found
    found = {
        (loss, int(term == VALUE)): slope.unsqueeze(0) if term == VALUE else slope * inner[term]
        for (loss, term), slope in slopes.items()
    }
    return [policy.parameters, *values], found


def _diagnostics(
    policy: Evaluated, batch: Minibatch, options: Options, log_ratio: Tensor
) -> dict[str, Tensor]:
    mask = batch.mask
    low, high = _log_bounds(options)
    clipped = (log_ratio.clamp(low, high) != log_ratio).to(log_ratio.dtype)
    found = diagnostics.ratio_statistics(log_ratio, mask) | {
        "kl_approx": diagnostics.mean(-log_ratio, mask),
        "clip_fraction": diagnostics.mean(clipped, mask),
        "kl": diagnostics.mean(log_ratio.expm1() - log_ratio, mask),
        "dual_clip_fraction": diagnostics.dual_clip_fraction(
            log_ratio, batch.advantage, options.dual_clip, mask
        ),
    }
    if options.entropy_coeff is not None:
        found["entropy"] = diagnostics.mean(policy.entropy, mask)
    if batch.value is not None and batch.target is not None:
        if batch.old_value is not None and options.clip_value is not None:
            found["value_clip_fraction"] = diagnostics.value_clip_fraction(
                batch.value, batch.old_value, options.clip_value, mask
            )
        if options.log_explained_variance:
            found["explained_variance"] = diagnostics.explained_variance(
                batch.target, batch.value, mask
            )
    return found


def _log_bounds(options: Options) -> tuple[Tensor, Tensor]:
    low, high = options.clip_epsilon
    return (-low).log1p(), high.log1p()


def _surrogate(log_ratio: Tensor, advantage: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """What :func:`ppokit.functional.clipped_surrogate` computes, and its slope."""
    low, high = _log_bounds(options)
    lost = log_ratio.clamp_min(low)
    if options.dual_clip is not None:
        lost = lost.clamp_max(options.dual_clip.to(lost.dtype).log())
    bounded = torch.where(advantage < 0, lost, log_ratio.clamp_max(high))
    gain = bounded.exp() * advantage
    return gain, gain * (bounded == log_ratio)


def _critic(
    value: Tensor, target: Tensor, old_value: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """What :func:`ppokit.functional.clipped_critic_loss` computes, and its slope."""
    loss, slope = _distance(value, target, options.loss_critic_type)
    if options.clip_value is not None and old_value is not None:
        moved = value - old_value
        near_move = moved.clamp(-options.clip_value, options.clip_value)
        near_loss, _ = _distance(old_value + near_move, target, options.loss_critic_type)
        # Near enough, both losses are one; further out the clipped one does not move.
        far = moved != near_move
        slope = torch.where(far & (near_loss > loss), 0, slope)
        # The gradient of a maximum is shared where both are equal.
        slope = torch.where(far & (near_loss == loss), slope / 2, slope)
        loss = torch.where(far, torch.maximum(loss, near_loss), loss)
    if options.loss_clip is not None:
        slope = torch.where(loss > options.loss_clip, 0, slope)
        loss = loss.clamp_max(options.loss_clip)
    return loss, slope


def _distance(value: Tensor, target: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    error = value - target
    if kind == "l2":
        return error.square(), 2 * error
    if kind == "l1":
        return error.abs(), error.sign()
    return F.smooth_l1_loss(value, target, reduction="none"), error.clamp(-1, 1)
