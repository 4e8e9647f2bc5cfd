"""Warnings of what keeps a policy or a critic from learning, once each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

LARGEST_CRITIC_LOSS = 100.0  # beside a policy loss of 1; RLlib's
SMALLEST_ESS = 0.1
CLAMPED = 0.9  # of critic_loss_clip: hardly a frame is below it
PATIENCE = 10  # minibatches in a row; a single one may be odd by chance


def check(loss: Any, losses: Mapping[str, Tensor]) -> None:
    """Warn as :meth:`ppokit.DualClipPPOLoss.watch` says; the loss keeps what was seen."""
    kl, ess = _number(losses["kl"]), _number(losses["ESS"])
    if not math.isfinite(kl):
        _warn(
            loss,
            "kl",
            f"The KL divergence is {kl}. A log-probability is not finite; look for actions at "
            "the edge of a bounded distribution, or a learning rate that is too high.",
        )
    if _lasts(loss, "ESS", ess < SMALLEST_ESS):
        _warn(
            loss,
            "ESS",
            f"The effective sample size is {ess:.2g} of the minibatch: a few samples outweigh "
            "all others, because the policy has moved far from the one that collected the "
            "data. Take fewer epochs or a lower learning rate, or stop early (KLEarlyStopper); "
            "and make sure that both policies are in the same train or eval mode.",
        )
    if "loss_critic" in losses.keys():
        _check_critic(loss, _number(losses["loss_critic"]), _number(losses["loss_objective"]))


def _check_critic(loss: Any, critic_loss: float, policy_loss: float) -> None:
    if loss.critic_loss_clip is not None and loss.reduction == "mean":
        clip, coefficient = loss.critic_loss_clip.item(), loss.critic_coeff.item()
        if _lasts(loss, "critic_loss_clip", critic_loss >= CLAMPED * coefficient * clip > 0):
            _warn(
                loss,
                "critic_loss_clip",
                f"critic_loss_clip={clip:g} clamps nearly every frame (the mean critic "
                f"loss is {critic_loss / coefficient:.3g}), and a clamped frame "
                "has no gradient: the critic cannot learn. Set it above the square of the "
                "scale of the returns, scale the rewards (RewardNormalizer), or leave it out.",
            )
    dwarfs = critic_loss > LARGEST_CRITIC_LOSS * max(1.0, abs(policy_loss))
    if _lasts(loss, "loss_critic", dwarfs) and _shares_parameters(loss):
        _warn(
            loss,
            "loss_critic",
            f"The critic loss is {critic_loss:.3g} beside a policy loss of {policy_loss:.2g}, "
            "and actor and critic share parameters: the policy's gradient is lost in the "
            "critic's. Lower critic_coeff, scale the rewards (RewardNormalizer), or use "
            "separate networks.",
        )


def _lasts(loss: Any, kind: str, happens: bool) -> bool:
    if happens:
        loss._in_a_row[kind] = loss._in_a_row.get(kind, 0) + 1
        return loss._in_a_row[kind] >= PATIENCE
    loss._in_a_row.pop(kind, None)
    return False


def _warn(loss: Any, kind: str, message: str) -> None:
    if kind not in loss._warned:
        loss._warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _number(x: Tensor) -> float:
    return x.item() if x.numel() == 1 else x.detach().mean().item()


def _shares_parameters(loss: Any) -> bool:
    suffix = "_params" if loss.functional else ""
    networks = [getattr(loss, name + suffix) for name in ("actor_network", "critic_network")]
    actor, critic = (
        {id(p) for p in network.parameters()} if isinstance(network, nn.Module) else set()
        for network in networks
    )
    return bool(actor & critic)
