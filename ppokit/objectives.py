"""The clipped PPO loss with dual clip, and diagnostics that mean what they say."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.ppo import (
    _broadcast_advantage_to_log_weight,
    _check_advantage_broadcast,
)
from torchrl.objectives.utils import _sum_td_features

from ppokit._keys import get_tensor
from ppokit.functional import clipped_critic_loss, kl_estimate, masked_mean, masked_std
from ppokit.functional._checks import check_range, check_same_shape
from ppokit.functional.surrogates import check_clip_epsilon, check_dual_clip

# Coefficients that scale a term (0 leaves it out), and bounds that shape one.
_COEFFICIENTS = ("entropy_coeff", "critic_coeff", "kl_coeff")


class DualClipPPOLoss(ClipPPOLoss):
    r"""Clipped PPO loss with dual clip: :class:`torchrl.objectives.ClipPPOLoss` and what it lacks.

    .. math::
        s &= \min(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) \\
        loss\_objective &= -\overline{s'}, \qquad
        s' = \max(s, c A) \text{ where } A < 0, \; s \text{ elsewhere}

    (Schulman et al., 2017, arXiv:1707.06347, equation 7; Ye et al., 2020, arXiv:1912.09729,
    equation 5.) Without dual clip the loss of a sample with A < 0 grows with its ratio without
    bound. With ``dual_clip=None`` and no mask in the batch, every loss, gradient and diagnostic of
    ``ClipPPOLoss`` is reproduced bit for bit.

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
        kl_coeff: coefficient of a penalty on ``"kl"``.
        **kwargs: arguments of ``ClipPPOLoss``.

    Coefficients are buffers, also the entropy coefficients of several heads: they are in
    ``state_dict`` and ``loss.entropy_coeff = 0.001`` changes them in place. A term built with a
    coefficient of None or 0 (``kl_coeff``, ``critic_coeff``) is absent, and setting its
    coefficient later is an error; one that is set to 0 later is masked, so that 0 * inf is not NaN.

    Raises:
        ValueError: ``dual_clip <= 1``, a coefficient is negative, ``clip_epsilon`` is out of range,
            or a tensor of the batch has the wrong shape.
        KeyError: the batch lacks a key that the loss needs.
        AttributeError: a coefficient is set that the loss was built without.

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

    dual_clip: Tensor | None
    critic_loss_clip: Tensor | None
    kl_coeff: Tensor | None
    clip_value: Tensor | None
    critic_coeff: Tensor
    entropy_coeff: Tensor

    _schedulable_buffers = frozenset({"dual_clip", "critic_loss_clip", "kl_coeff"})

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModule | None = None,
        *,
        dual_clip: float | None = None,
        critic_loss_clip: float | None = None,
        kl_coeff: float | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(dual_clip, critic_loss_clip, kl_coeff, kwargs)
        kwargs["clip_value"] = kwargs.get("clip_value") or None
        super().__init__(actor_network, critic_network, **kwargs)
        device = self._clip_bounds[0].device
        self.register_coeff_buffer("dual_clip", dual_clip, device=device)
        self.register_coeff_buffer("critic_loss_clip", critic_loss_clip, device=device)
        self.register_coeff_buffer("kl_coeff", kl_coeff or None, device=device)

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

    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the losses and the diagnostics of a minibatch.

        Args:
            tensordict: ``[*B]`` with the actor's and the critic's inputs, the action, its
                log-probability at collection ``[*B]``, the advantage and the value target
                ``[*B, 1]``; or, without an advantage, what the value estimator needs.
        """
        tensordict = tensordict.clone(False)
        for key in self._policy_keys:
            fix = "The policy writes it at collection (return_log_prob=True); see loss.set_keys()."
            get_tensor(tensordict, key, fix=fix)
        tensordict.set(self.tensor_keys.advantage, self._advantage(tensordict))
        self._fill_padding(tensordict)
        advantage = tensordict.get(self.tensor_keys.advantage)
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
        out.set("clip_fraction", _mean(clipped, mask))
        out.set("kl_approx", _mean(kl_approx.detach(), mask))
        if self.entropy_bonus:
            self._set_entropy(out, dist, advantage, mask)
        if self._has_critic:
            self._set_critic(out, tensordict)
        with torch.no_grad():
            _set_ratios(out, log_ratio, mask)
            out.set("kl", _mean(kl_estimate(log_weight), mask))
            out.set("dual_clip_fraction", self._dual_clip_fraction(log_ratio, advantage, mask))
        if self.kl_coeff is not None:
            out.set("loss_kl", _scaled(self.kl_coeff, kl_estimate(log_weight)))
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

    def loss_critic(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the critic loss (coefficient applied), clip fraction and explained variance."""
        if self.separate_losses:
            tensordict = tensordict.detach()
        keys = self.tensor_keys
        target = get_tensor(
            tensordict, keys.value_target, fix="GAE and the other value estimators write it."
        )
        old_value = None
        if self.clip_value is not None:
            fix = "clip_value needs the value predicted at collection; GAE stores it."
            old_value = get_tensor(tensordict, keys.value, fix=fix)
        with (
            self.critic_network_params.to_module(self.critic_network, preserve_module_state=False)
            if self.functional
            else contextlib.nullcontext()
        ):
            predicted = self.critic_network(tensordict)
        value = get_tensor(predicted, keys.value, fix="The critic does not write it; set_keys().")
        target, value, old_value = self._critic_loss_inputs(target, value, old_value)
        check_same_shape(
            {f"the value {keys.value!r}": value, f"the value target {keys.value_target!r}": target}
        )
        loss = clipped_critic_loss(
            value,
            target,
            old_value=old_value,
            clip_value=self.clip_value,
            loss_clip=self.critic_loss_clip,
            kind=self.loss_critic_type,
        )
        mask = self._mask(tensordict, value)
        with torch.no_grad():
            clip_fraction = None
            if old_value is not None and self.clip_value is not None:
                moved = value - old_value
                outside = moved != moved.clamp(-self.clip_value, self.clip_value)
                clip_fraction = _mean(outside.to(value.dtype), mask)
            explained = _explained_variance(target, value, mask)
        self._clear_weakrefs(tensordict, "critic_network_params", "target_critic_network_params")
        return (
            _scaled(self.critic_coeff, loss) if self._has_critic else loss,
            clip_fraction,
            explained if self.log_explained_variance else None,
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

    def _dual_clip_fraction(
        self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None
    ) -> Tensor:
        if self.dual_clip is None:
            return torch.zeros((), dtype=log_ratio.dtype, device=log_ratio.device)
        bounded = (advantage < 0) & (log_ratio > self.dual_clip.log())
        return _mean(bounded.to(log_ratio.dtype), mask)

    def _standardize_advantage(self, advantage: Tensor, tensordict: TensorDictBase) -> Tensor:
        mask = self._mask(tensordict, advantage)
        if mask is None:
            return super()._standardize_advantage(advantage, tensordict)
        excluded = {dim % advantage.ndim for dim in self.normalize_advantage_exclude_dims}
        dims = tuple(dim for dim in range(advantage.ndim) if dim not in excluded)
        mean = masked_mean(advantage, mask, dims, keepdim=True)
        std = masked_std(advantage, mask, dims, keepdim=True)
        # torchrl's floor, so that padding a batch changes nothing
        return (advantage - mean) / std.clamp_min(torch.finfo(torch.float).resolution)

    @property
    def _policy_keys(self) -> list[NestedKey]:
        named = (self.tensor_keys.action, self.tensor_keys.sample_log_prob)
        flat = [key for keys in named for key in (keys if isinstance(keys, list) else [keys])]
        return [key for key in flat if key is not None]

    def _fill_padding(self, tensordict: TensorDictBase) -> None:
        # Padding must be finite before it meets a network: the gradient it gets is 0, but
        # 0 * NaN is NaN, and a matrix product spreads it to every parameter. A copy of a valid
        # frame is as good as that frame, whatever the type of the entry; but episode starts within
        # the padding of a sequence would slow a recurrent network down.
        mask = self._mask(tensordict, tensordict.get(self.tensor_keys.advantage)[..., :1])
        if mask is None or mask.numel() != tensordict.numel():
            return
        mask = mask.reshape(tensordict.batch_size)
        valid_frame = mask.flatten().int().argmax().reshape(1)
        keys = [*self.actor_network.in_keys, self.tensor_keys.advantage]
        keys += [] if self.critic_network is None else self.critic_network.in_keys
        keys += [*self._policy_keys, self.tensor_keys.value_target, self.tensor_keys.value]
        keys = [key for key in keys if key != "is_init"]

        def fill(x: Tensor) -> Tensor:
            frame = x.flatten(0, mask.ndim - 1).index_select(0, valid_frame)
            keep = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
            return torch.where(keep, x, frame.reshape((1,) * mask.ndim + frame.shape[1:]))

        tensordict.update(tensordict.select(*keys, strict=False).apply(fill))

    def _mask(self, tensordict: TensorDictBase, like: Tensor) -> Tensor | None:
        masks = [tensordict.get(key, None) for key in self._loss_mask_keys()]
        found = [self._expand_loss_mask(mask, like) for mask in masks if mask is not None]
        if not found:
            return None
        return torch.stack(found).all(0) if len(found) > 1 else found[0]

    # -- entropy -------------------------------------------------------------

    def _set_entropy(
        self, out: TensorDict, dist: Any, advantage: Tensor, mask: Tensor | None
    ) -> None:
        entropy = self._get_entropy(dist, adv_shape=advantage.shape[:-1])
        total = entropy
        if is_tensor_collection(entropy):
            out.set("composite_entropy", entropy.detach())
            total = _sum_td_features(entropy)
        out.set("entropy", _mean(total.detach(), mask))
        out.set("loss_entropy", self._weighted_loss_entropy(entropy))

    def _weighted_loss_entropy(self, entropy: Tensor | TensorDictBase) -> Tensor:
        coefficients = self._entropy_coeff_map
        if coefficients is None:
            total = _sum_td_features(entropy) if is_tensor_collection(entropy) else entropy
            return _scaled(-self.entropy_coeff, total)
        assert not isinstance(entropy, Tensor)
        terms = []
        for key, value in entropy.items(include_nested=True, leaves_only=True):
            # torchrl calls the entropy of ("action", "go") ("action", "go_entropy")
            head = key if key in coefficients else _without_suffix(key, "_entropy")
            if head not in coefficients:
                raise KeyError(
                    f"entropy_coeff has no entry for the action head {head!r}; it has "
                    f"{list(coefficients)}."
                )
            terms.append(_scaled(-coefficients[head], value))
        return torch.stack(terms).sum(0)

    @property
    def _entropy_coeff_map(self) -> dict[NestedKey, Tensor] | None:
        # torchrl keeps plain floats here, outside state_dict; its readers take views as well.
        coefficients = self._buffers.get("head_entropy_coeff")
        return None if coefficients is None else dict(zip(self._heads, coefficients, strict=True))

    @_entropy_coeff_map.setter
    def _entropy_coeff_map(self, value: Mapping[NestedKey, float] | None) -> None:
        if value is not None:
            self._heads = tuple(value)
            self.register_buffer("head_entropy_coeff", torch.tensor(list(value.values())))

    # -- the critic ----------------------------------------------------------

    def _set_critic(self, out: TensorDict, tensordict: TensorDictBase) -> None:
        loss, clip_fraction, explained_variance = self.loss_critic(tensordict)
        out.set("loss_critic", loss)
        if clip_fraction is not None:
            out.set("value_clip_fraction", clip_fraction)
        if explained_variance is not None:
            out.set("explained_variance", explained_variance)

    # -- coefficients --------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (int, float)) and name in self._all_schedulable_buffers:
            buffers = self.__dict__.get("_buffers", {})
            if name == "entropy_coeff" and "head_entropy_coeff" in buffers:
                raise AttributeError(
                    f"entropy_coeff is one coefficient for each head here, {list(self._heads)}; "
                    'schedule ("entropy_coeff", head), or write to loss.head_entropy_coeff.'
                )
            if name in self.__dict__ or (name in buffers and buffers[name] is None):
                raise AttributeError(
                    f"{name} was None (or 0) when the loss was built, so its term is absent and "
                    f"setting it to {value} would have no effect. Give it a value at construction."
                )
        super().__setattr__(name, value)


def _check_arguments(
    dual_clip: float | None,
    critic_loss_clip: float | None,
    kl_coeff: float | None,
    kwargs: Mapping[str, Any],
) -> None:
    if dual_clip is not None:
        check_dual_clip(dual_clip)
    if critic_loss_clip is not None and not critic_loss_clip > 0:
        raise ValueError(f"critic_loss_clip must be positive, got {critic_loss_clip}.")
    epsilon = kwargs.get("clip_epsilon", 0.2)
    low, high = epsilon if isinstance(epsilon, (tuple, list)) else (epsilon, epsilon)
    check_clip_epsilon(low, high)
    for name in _COEFFICIENTS:
        value = kl_coeff if name == "kl_coeff" else kwargs.get(name)
        for one in value.values() if isinstance(value, Mapping) else [value]:
            if one is not None:
                check_range(name, one, 0, math.inf, consequence="the term would be maximised.")


def _without_suffix(key: NestedKey, suffix: str) -> NestedKey:
    if isinstance(key, str):
        return key.removesuffix(suffix)
    return (*key[:-1], str(key[-1]).removesuffix(suffix))


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.mean()
    return masked_mean(x, mask.reshape(x.shape) if mask.shape != x.shape else mask)


def _scaled(coefficient: Tensor, term: Tensor) -> Tensor:
    # A term scheduled down to 0 may hold inf, and 0 * inf is NaN.
    return torch.where(coefficient == 0, torch.zeros_like(term), coefficient * term)


def _set_ratios(out: TensorDict, log_ratio: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        log = log_ratio.squeeze(-1)
        size = log_ratio.shape[0]
        ratio = log_ratio.exp()
    else:
        log = torch.where(mask, log_ratio, -math.inf).flatten()
        size = mask.sum()
        ratio = log.exp()
    effective = (2 * log.logsumexp(0) - (2 * log).logsumexp(0)).exp()
    out.set("ESS", effective / size)
    out.set("max_ratio", ratio.max())
    out.set("mean_ratio", ratio.mean() if mask is None else ratio.sum() / size)


def _explained_variance(target: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    eps = torch.finfo(target.dtype).eps
    if mask is None:
        residual = torch.var(target - value, correction=0, dim=0)
        return 1.0 - residual / (torch.var(target, correction=0, dim=0) + eps)
    residual = masked_std(target - value, mask, correction=0).square()
    return 1.0 - residual / (masked_std(target, mask, correction=0).square() + eps)
