"""Warnings of what keeps a policy or a critic from learning, once each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ppokit.objectives.critic import CriticLoss
from ppokit.objectives.terms import Summary

LARGEST_CRITIC_LOSS = 100.0  # beside a policy loss of 1; RLlib's
SMALLEST_ESS = 0.1
CLAMPED = 0.9  # of critic_loss_clip: hardly a frame is below it
PATIENCE = 10  # minibatches in a row; a single one may be odd by chance


class WatchedLoss(CriticLoss):
    """``ClipPPOLoss`` that looks at what it returns."""

    _warned: set[str]
    _seen: dict[str, int]  # for how many minibatches in a row

    def _look_at(self, losses: Mapping[str, Tensor], summary: Summary | None = None) -> None:
        """Watch where that makes nobody wait, and breaks no graph."""
        if summary is not None:
            self._watch(summary)
        elif losses["kl"].is_cpu and not torch.compiler.is_compiling():
            self.watch(losses)

    def watch(self, losses: Mapping[str, Tensor]) -> None:
        """Warn, once each, of what keeps the policy or the critic from learning.

        ``forward`` calls this itself on the CPU. On a device it would make the host wait, so call
        it there yourself, once per batch.

        - the KL is not finite;

        or, in ten calls in a row,

        - the effective sample size is below a tenth: a few samples outweigh all others;
        - the critic loss is more than 100 times the policy loss, and above 100, while actor and
          critic share parameters;
        - ``critic_loss_clip`` clamps nearly every frame, so that the critic gets no gradient.

        Args:
            losses: what ``forward`` returned.
        """
        names = ("loss_objective", "loss_critic", "kl", "ESS")
        self._watch(Summary(*(_number(losses.get(name)) for name in names)))

    def _watch(self, summary: Summary) -> None:
        policy_loss, critic_loss, kl, ess = summary
        if not math.isfinite(kl):
            self._warn(
                "kl",
                f"The KL divergence is {kl}. A log-probability is not finite; look for actions at "
                "the edge of a bounded distribution, or a learning rate that is too high.",
            )
        if self._lasts("ESS", ess < SMALLEST_ESS):
            self._warn(
                "ESS",
                f"The effective sample size is {ess:.2g} of the minibatch: a few samples outweigh "
                "all others, because the policy has moved far from the one that collected the "
                "data. Take fewer epochs or a lower learning rate, or stop early (KLEarlyStopper); "
                "and make sure that both policies are in the same train or eval mode.",
            )
        if self._has_critic:
            self._watch_critic(critic_loss, policy_loss)

    def _watch_critic(self, critic_loss: float, policy_loss: float) -> None:
        clip = self._buffers.get("critic_loss_clip")
        if clip is not None and self.reduction == "mean":
            bound = self.critic_coeff.item() * clip.item()
            if self._lasts("critic_loss_clip", critic_loss >= CLAMPED * bound > 0):
                self._warn(
                    "critic_loss_clip",
                    f"critic_loss_clip={clip.item():g} clamps nearly every frame (the mean critic "
                    f"loss is {critic_loss / self.critic_coeff.item():.3g}), and a clamped frame "
                    "has no gradient: the critic cannot learn. Set it above the square of the "
                    "scale of the returns, scale the rewards (RewardNormalizer), or leave it out.",
                )
        dwarfs = critic_loss > LARGEST_CRITIC_LOSS * max(1.0, abs(policy_loss))
        if self._lasts("loss_critic", dwarfs) and self._shares():
            self._warn(
                "loss_critic",
                f"The critic loss is {critic_loss:.3g} beside a policy loss of {policy_loss:.2g}, "
                "and actor and critic share parameters: the policy's gradient is lost in the "
                "critic's. Lower critic_coeff, scale the rewards (RewardNormalizer), or use "
                "separate networks.",
            )

    def _lasts(self, kind: str, happens: bool) -> bool:
        if happens:
            self._seen[kind] = self._seen.get(kind, 0) + 1
            return self._seen[kind] >= PATIENCE
        self._seen.pop(kind, None)
        return False

    def _shares(self) -> bool:
        networks = (
            (self.actor_network_params, self.critic_network_params)
            if self.functional
            else (self.actor_network, self.critic_network)
        )
        actor, critic = (
            {id(p) for p in network.parameters()} if isinstance(network, nn.Module) else set()
            for network in networks
        )
        return bool(actor & critic)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _number(x: Tensor | None) -> float:
    if x is None:
        return 0.0
    return x.item() if x.numel() == 1 else x.detach().mean().item()
