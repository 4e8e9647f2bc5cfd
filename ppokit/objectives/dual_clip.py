"""The clipped PPO loss with dual clip, and diagnostics that mean what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor
from torchrl.objectives.ppo import (
    _broadcast_advantage_to_log_weight,
    _check_advantage_broadcast,
)
from torchrl.objectives.utils import _sum_td_features

from ppokit._keys import get_tensor
from ppokit._recurrent import check_own_states, check_stored
from ppokit._state import WholeState
from ppokit.distributed import resolve_group
from ppokit.functional import kl_estimate
from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import check_arguments
from ppokit.objectives.fast import FastPath
from ppokit.objectives.penalty import exact_kl, stored_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DualClipPPOLoss(WholeState, FastPath):
    r"""Clipped PPO loss with dual clip: :class:`torchrl.objectives.ClipPPOLoss` and what it lacks.

    .. math::
        s &= \min(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) \\
        loss\_objective &= -\overline{s'}, \qquad
        s' = \max(s, c A) \text{ where } A < 0, \; s \text{ elsewhere}

    (Schulman et al., 2017, arXiv:1707.06347, equation 7; Ye et al., 2020, arXiv:1912.09729,
    equation 5.) Without dual clip the loss of a sample with A < 0 grows with its ratio without
    bound. With ``dual_clip=None``, ``fast=False`` and no mask in the batch, every loss, gradient
    and diagnostic of ``ClipPPOLoss`` is reproduced bit for bit.

    At the end of ``out_keys`` come ``"kl"`` (the k3 estimate of KL(old || new), in nats, mean over
    the frames), ``"dual_clip_fraction"`` (the share of frames whose loss the dual clip bounds) and,
    with ``kl_coeff``, ``"loss_kl"``. As with torchrl's losses, coefficients are already applied:
    sum every ``loss_*``. Ratios, ``"kl"``, ``"ESS"`` and ``"clip_fraction"`` are those of the
    unclamped ratio. Where the batch holds a mask of valid frames (``loss_mask_key``), every
    diagnostic and the advantage normalisation are over valid frames, too.

    Args:
        actor_network: the policy.
        critic_network: the value network; None if there is no critic loss.
        dual_clip: bound c > 1 on the ratio where the advantage, after normalisation, is negative.
            3 in the paper, 5 is common. None turns it off.
        critic_loss_clip: largest critic loss of a frame (rl8's and RLlib's ``vf_clip_param``), in
            units of the loss. ``clip_value`` is PPO2's clipped value, a different thing.
        kl_coeff: coefficient of a penalty on the KL divergence from the policy that collected the
            data: the exact one where the batch holds that policy's parameters, as a
            ProbabilisticActor stores them, and their KL has a closed form; else the k3 estimate.
            An actor that is run on the batch once more overwrites them.
        fast: compute with no TensorDict on the way and with derivatives in closed form, where no
            other option forbids it (``delay_actor``, ``max_importance_ratio``, several action
            heads, ``reduction="none"``). The results are the same to 1e-6 (float64: 1e-12) under
            the same random state; there is no second derivative. A network that actor and critic
            share is called once, unless it has dropout, batch normalisation or the like. False is
            torchrl's path.
        group: process group over whose ranks the advantage is normalised, with
            ``normalize_advantage=True``; all ranks must then see as many minibatches. None is the
            default group if ``torch.distributed`` is initialised, and no communication otherwise.
        **kwargs: arguments of ``ClipPPOLoss``.

    The advantage is normalised per minibatch with ``normalize_advantage=True``; for once per batch,
    there is ``GAE(average_gae=True)``.

    Coefficients are buffers, also the entropy coefficients of several heads: they are in
    ``state_dict`` and ``loss.entropy_coeff = 0.001`` changes them in place. With
    ``clip_value=True`` the two are one: ``clip_value`` goes wherever ``clip_epsilon`` goes, whereas
    torchrl's stays where ``clip_epsilon`` was at construction. A term built with a
    coefficient of None or 0 (``kl_coeff``, ``critic_coeff``) is absent, and setting its
    coefficient later is an error; one that is set to 0 later is masked, so that 0 * inf is not NaN.

    Raises:
        ValueError: ``dual_clip <= 1``, a coefficient is negative, ``clip_epsilon`` is out of range,
            a tensor of the batch has the wrong shape, or two recurrent modules share a state.
        KeyError: the batch lacks a key that the loss needs, such as a recurrent network's state.
        AttributeError: a coefficient is set that the loss was built without, or ``clip_value`` of a
            loss built with ``clip_value=True``.

    Example:
        >>> from torch import nn
        >>> from torchrl.modules import ProbabilisticActor, ValueOperator
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"]),
        ...     in_keys=["logits"], distribution_class=torch.distributions.Categorical)
        >>> critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        >>> loss = DualClipPPOLoss(actor, critic, dual_clip=5.0)
        >>> losses = loss(TensorDict({
        ...     "observation": torch.randn(4, 3), "action": torch.zeros(4, dtype=torch.long),
        ...     "action_log_prob": torch.zeros(4), "advantage": torch.randn(4, 1),
        ...     "value_target": torch.randn(4, 1)}, [4]))
        >>> sorted(losses.keys())[:4]
        ['ESS', 'clip_fraction', 'dual_clip_fraction', 'entropy']
    """

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModule | None = None,
        *,
        dual_clip: float | None = None,
        critic_loss_clip: float | None = None,
        kl_coeff: float | None = None,
        fast: bool = True,
        group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        resolve_group(group)
        check_arguments(dual_clip, critic_loss_clip, kl_coeff, kwargs)
        check_own_states(actor_network, critic_network)
        kwargs["clip_value"] = kwargs.get("clip_value") or None
        super().__init__(actor_network, critic_network, **kwargs)
        if kwargs["clip_value"] is True:
            self._follow_clip_epsilon()
        self.fast, self.group = fast, group
        self._warned, self._seen = set(), {}
        device = self._clip_bounds[0].device
        self.register_coeff_buffer("dual_clip", dual_clip, device=device)
        self.register_coeff_buffer("critic_loss_clip", critic_loss_clip, device=device)
        self.register_coeff_buffer("kl_coeff", kl_coeff or None, device=device)
        if all(self._has_update_associated.values()):
            # torchrl's only hook, which warns of target networks that nobody updates
            self._forward_pre_hooks.clear()
        self._make_plan()

    @property
    def out_keys(self) -> list[str]:
        """The parent's keys, then ``kl``, ``dual_clip_fraction`` and, if any, ``loss_kl``."""
        if self._out_keys is None:
            ours = ["kl", "dual_clip_fraction"]
            if self.kl_coeff is not None:
                ours.append("loss_kl")
            self._out_keys = [*super().out_keys, *ours]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[str]) -> None:
        self._out_keys = values

    def _full_forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_stored(tensordict, self._stored_keys)
        tensordict = tensordict.clone(False)
        for key in self._policy_keys:
            fix = "The policy writes it at collection (return_log_prob=True); see loss.set_keys()."
            get_tensor(tensordict, key, fix=fix)
        tensordict.set(self.tensor_keys.advantage, self._advantage(tensordict))
        self._fill_padding(tensordict)
        advantage = tensordict.get(self.tensor_keys.advantage)
        stored = self._stored_parameters(tensordict)
        log_weight, dist, kl_approx, *behaviour = self._log_weight(
            tensordict, adv_shape=advantage.shape[:-1]
        )
        advantage = _broadcast_advantage_to_log_weight(advantage, log_weight)
        _check_advantage_broadcast(advantage, log_weight)
        # pi_new / pi_collection; log_weight is pi_new / pi_proximal, on which the clipping acts.
        correction = behaviour[0] if behaviour and behaviour[0] is not None else None
        log_ratio = log_weight if correction is None else log_weight + correction
        mask = self._mask(tensordict, log_weight)

        gain, log_clipped = self._gain(log_weight, log_ratio, correction, advantage)
        out = TensorDict({"loss_objective": -gain})
        clipped = (log_clipped != log_weight).to(log_weight.dtype)
        out.set("clip_fraction", diagnostics.mean(clipped, mask))
        out.set("kl_approx", diagnostics.mean(kl_approx.detach(), mask))
        if self.entropy_bonus:
            self._set_entropy(out, dist, advantage, mask)
        if self._has_critic:
            self._set_critic(out, tensordict)
        with torch.no_grad():
            out.update(diagnostics.ratio_statistics(log_ratio, mask))
            out.set("kl", diagnostics.mean(kl_estimate(log_weight), mask))
            bounded = diagnostics.dual_clip_fraction(log_ratio, advantage, self.dual_clip, mask)
            out.set("dual_clip_fraction", bounded)
        if self.kl_coeff is not None:
            out.set("loss_kl", self.kl_coeff * self._kl(tensordict, stored, log_weight))
        out = out.named_apply(
            lambda name, value: (
                self._reduce_loss(value, tensordict).squeeze(-1)
                if name.startswith("loss_")
                else value
            )
        )
        assert out is not None
        self._clear_weakrefs(
            tensordict,
            out,
            "actor_network_params",
            "critic_network_params",
            "target_actor_network_params",
            "target_critic_network_params",
        )
        return out

    def _stored_parameters(self, tensordict: TensorDictBase) -> dict[Any, Tensor] | None:
        # With delay_actor it is the delayed policy that runs last, and leaves its parameters.
        actor: Any = self.actor_network
        known = isinstance(actor, ProbabilisticTensorDictSequential)
        if self.kl_coeff is None or self.delay_actor or not known:
            return None
        return stored_parameters(actor[-1], tensordict)

    def _kl(
        self, tensordict: TensorDictBase, old: dict[Any, Tensor] | None, log_weight: Tensor
    ) -> Tensor:
        """Return KL(old || new): exact, or else the k3 estimate."""
        assert self.kl_coeff is not None
        actor: Any = self.actor_network
        if old is not None:
            new = {key: tensordict.get(key) for key in old}
            kl = exact_kl(actor[-1], old, new, self.kl_coeff)
            if kl is not None and kl.shape == log_weight.shape:
                return kl
        # Masked before the exponential, so that no 0 * inf is in the gradient either.
        return kl_estimate(
            torch.where(self.kl_coeff == 0, torch.zeros_like(log_weight), log_weight)
        )

    # -- the policy ----------------------------------------------------------

    def _advantage(self, tensordict: TensorDictBase) -> Tensor:
        key = self.tensor_keys.advantage
        advantage: Any = tensordict.get(key, None, as_padded_tensor=True)  # pyright: ignore
        computed_here = advantage is None
        if computed_here:
            if self.critic_network is None:
                raise KeyError(
                    f"{key!r} is not in the batch, and without a critic it cannot be computed. "
                    "Call GAE on the batch first."
                )
            self.value_estimator(
                tensordict,
                params=self._cached_critic_network_params_detached,
                target_params=self.target_critic_network_params,
            )
            advantage = tensordict.get(key)
        if advantage.shape == tensordict.batch_size:
            raise ValueError(
                f"The advantage {key!r} has shape {list(advantage.shape)}, the shape of the batch: "
                "it lacks the trailing dimension and would broadcast into an outer product over "
                "samples. Use advantage.unsqueeze(-1)."
            )
        return self._maybe_normalize_advantage(advantage, tensordict, update_norm=computed_here)

    def _gain(
        self, log_weight: Tensor, log_ratio: Tensor, correction: Tensor | None, advantage: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = self._clip_bounds
        log_clipped = log_weight.clamp(low, high)
        shift = torch.zeros_like(log_weight) if correction is None else correction
        if self.dual_clip is None:
            # torchrl's own lines, so that the results are torchrl's to the last bit
            log_both = (log_ratio, log_clipped if correction is None else log_clipped + correction)
            gains = torch.stack([log.exp() * advantage for log in log_both], -1)
            return gains.min(dim=-1).values, log_clipped
        # min and max taken before the exponential: the same value and gradient, and an overflowing
        # ratio that is clipped away leaves no 0 * inf in the backward pass.
        upper = self.dual_clip.to(log_weight.dtype).log()
        gained = log_weight.clamp(max=high) + shift
        lost = (log_weight.clamp(min=low) + shift).clamp(max=upper)
        return torch.where(advantage < 0, lost, gained).exp() * advantage, log_clipped

    # -- entropy -------------------------------------------------------------

    def _set_entropy(
        self, out: TensorDict, dist: Any, advantage: Tensor, mask: Tensor | None
    ) -> None:
        entropy = self._get_entropy(dist, adv_shape=advantage.shape[:-1])
        total = entropy
        if is_tensor_collection(entropy):
            out.set("composite_entropy", entropy.detach())
            total = _sum_td_features(entropy)
        out.set("entropy", diagnostics.mean(total.detach(), mask))
        out.set("loss_entropy", self._weighted_loss_entropy(entropy))
