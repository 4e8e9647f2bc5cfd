"""The clipped PPO loss with dual clip, and diagnostics that mean what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    composite_lp_aggregate,
    dispatch,
)
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import as_key, get_if_any, key_list
from ppokit._recurrent import check_own_states
from ppokit.distributed import resolve_group, standardized
from ppokit.objectives import fast, torchrl_path
from ppokit.objectives.coefficients import CoefficientBuffers, check_arguments, check_names
from ppokit.objectives.masking import mask_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DualClipPPOLoss(CoefficientBuffers):
    r"""Clipped PPO loss with dual clip: :class:`torchrl.objectives.ClipPPOLoss` and what it lacks.

    .. math::
        s &= \min(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) \\
        loss\_objective &= -\overline{s'}, \qquad
        s' = \max(s, c A) \text{ where } A < 0, \; s \text{ elsewhere}

    (Schulman et al., 2017, arXiv:1707.06347, equation 7; Ye et al., 2020, arXiv:1912.09729,
    equation 5.) Without dual clip the loss of a sample with A < 0 grows with its ratio without
    bound. With ``dual_clip=None`` and no mask in the batch, losses, gradients and diagnostics equal
    those of ``ClipPPOLoss`` to 1e-6 (float64: 1e-12). ``repr`` shows whether the policy is computed
    by formula, or why its distribution is asked.

    At the end of ``out_keys`` come ``"kl"`` (the k3 estimate of KL(old || new), in nats, mean over
    the frames), ``"dual_clip_fraction"`` (the share of frames whose loss the dual clip bounds) and,
    with ``kl_coeff``, ``"loss_kl"``. As with torchrl's losses, coefficients are already applied:
    sum every ``loss_*``. Ratios, ``"kl"``, ``"ESS"`` and ``"clip_fraction"`` are those of the
    unclamped ratio. If the batch holds a mask of valid frames (``loss_mask_key``), the diagnostics
    and the advantage normalisation use valid frames only.

    Several action heads (``CompositeDistribution``) are clipped by their joint ratio. If their
    log-probabilities are stored one by one (``set_composite_lp_aggregate(False)``), the loss also
    returns the mean KL of each head as ``("composite_kl", *head)``, for ``"gear"`` named
    ``"gear_kl"``, beside torchrl's ``"composite_entropy"`` of each frame and head.

    Args:
        actor_network: the policy.
        critic_network: the value network; None if there is no critic loss. If actor and critic
            share an encoder, pass the value head alone: it reads what the actor wrote, and the
            encoder runs once. The losses must then be run backward together, unless they are
            separate (``separate_losses``). GAE takes the whole value network. If the loss gets it,
            too, the encoder runs twice.
        dual_clip: bound c > 1 on the ratio where the advantage, after normalisation, is negative.
            3 in the paper, 5 is common. None turns it off.
        critic_loss_clip: largest critic loss of a frame (rl8's and RLlib's ``vf_clip_param``), in
            units of the loss. ``clip_value`` is PPO2's clipped value, a different thing.
        kl_coeff: coefficient of a penalty on the KL divergence from the policy that collected the
            data: the exact one where the batch holds that policy's parameters, as a
            ProbabilisticActor stores them, and their KL has a closed form; else the k3 estimate.
            An actor that is run on the batch once more overwrites them.
        functional: whether the loss holds the parameters apart from the networks, as torchrl's
            losses do by default: it costs 9 to 33% of a training loop, and excludes
            DistributedDataParallel. None is True with ``delay_actor``, which needs it, and False
            otherwise. States are loaded across both, torchrl's own too.
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
    coefficient of 0 (``kl_coeff`` also with None) is absent, and setting its
    coefficient later is an error; one that is set to 0 later is masked, so that 0 * inf is not NaN.

    Raises:
        TypeError: there is no such argument.
        ValueError: ``dual_clip <= 1``, a coefficient is negative, ``clip_epsilon`` is out of range,
            at construction or later; a tensor of the batch has the wrong shape, such as a
            log-probability ``[B, 1]``; or two recurrent modules share a state.
        KeyError: the batch lacks a key that the loss needs, such as a recurrent network's state.
        AttributeError: a coefficient is set that the loss was built without, or ``clip_value`` of a
            loss built with ``clip_value=True``.

    Example:
        >>> from tensordict import TensorDict
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
        functional: bool | None = None,
        group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        resolve_group(group)
        check_names(kwargs, DualClipPPOLoss)
        if functional is None:
            functional = bool(kwargs.get("delay_actor"))
        own = {"dual_clip": dual_clip, "critic_loss_clip": critic_loss_clip, "kl_coeff": kl_coeff}
        check_arguments(own | kwargs, has_critic=critic_network is not None)
        check_own_states(actor_network, critic_network)
        kwargs["clip_value"] = kwargs.get("clip_value") or None
        if critic_network is None:
            kwargs["critic_coeff"] = None  # 0 would be a coefficient that could be raised
        super().__init__(actor_network, critic_network, functional=functional, **kwargs)
        if kwargs["clip_value"] is True:
            self._follow_clip_epsilon()
        self._set_keys_of_heads()
        self.group = group
        self._last: dict[str, Any] = {"reason": None}  # why a minibatch took torchrl's path
        device = self._clip_bounds[0].device
        self.register_coeff_buffer("dual_clip", dual_clip, device=device)
        self.register_coeff_buffer("critic_loss_clip", critic_loss_clip, device=device)
        self.register_coeff_buffer("kl_coeff", kl_coeff or None, device=device)
        if all(self._has_update_associated.values()):
            # torchrl's only hook, which warns of target networks that are not updated
            self._forward_pre_hooks.clear()

    def _set_keys_of_heads(self) -> None:
        """Read all heads of a composite action, where torchrl reads the first or none of them."""
        actor, head, _ = fast.networks_of(self)
        is_composite = getattr(head, "distribution_class", None) is CompositeDistribution
        if is_composite and not actor.return_composite:
            keys = {"action": head.dist_sample_keys}
            if not composite_lp_aggregate():
                keys["sample_log_prob"] = head.log_prob_keys
            self.set_keys(**keys)

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
                ``[*B, 1]``; of several agents ``[*B, A]`` and ``[*B, A, 1]``. Or, without an
                advantage, what the value estimator needs, in time order: ``[B, T]``, or with a
                dimension named "time".
        """
        reason, losses = fast.losses_of(self, tensordict, DualClipPPOLoss)
        if not torch.compiler.is_compiling():
            self._last["reason"] = reason
        return losses

    def loss_critic(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the critic loss (coefficient applied), clip fraction and explained variance."""
        return torchrl_path.critic_loss(self, tensordict)

    def extra_repr(self) -> str:
        """Say which path the loss takes, and why it is torchrl's."""
        reason = (
            fast.obstacle(self, fast.networks_of(self), DualClipPPOLoss) or self._last["reason"]
        )
        return "path=tensors" if reason is None else f"path=torchrl's, because {reason}"

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]},\n    {self.extra_repr()})"

    @property
    def policy_keys(self) -> list[NestedKey]:
        """The keys of actions and of their log-probabilities."""
        keys = self.tensor_keys
        return [*key_list(keys.action), *key_list(keys.sample_log_prob)]

    def entries(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the names of what a forward reads of a batch, of those that are there."""
        keys = [*self.actor_network.in_keys, *self.policy_keys, self.tensor_keys.advantage]
        if self.critic_network is not None:  # a value head reads what the actor writes again
            written = self.actor_network.out_keys
            keys += [key for key in self.critic_network.in_keys if key not in written]
        keys += [self.tensor_keys.value_target, self.tensor_keys.value]
        if self.kl_coeff is not None:
            keys += getattr(self.actor_network, "dist_params_keys", [])
        keys = map(as_key, [*keys, *self._loss_mask_keys()])
        return [key for key in dict.fromkeys(keys) if get_if_any(tensordict, key) is not None]

    def _get_cur_log_prob(self, tensordict: TensorDictBase, params: Any = None) -> Any:
        # The delayed actor runs last: what it writes is not for a value head to read.
        given = tensordict if params is None else tensordict.copy()
        return super()._get_cur_log_prob(given, params=params)

    def _maybe_normalize_advantage(
        self, advantage: Tensor, tensordict: TensorDictBase, *, update_norm: bool
    ) -> Tensor:
        if self.normalize_advantage and resolve_group(self.group) is not None:
            # Also of a single frame: the other ranks wait for its part.
            return self._standardize_advantage(advantage, tensordict)
        return super()._maybe_normalize_advantage(advantage, tensordict, update_norm=update_norm)

    def _standardize_advantage(self, advantage: Tensor, tensordict: TensorDictBase) -> Tensor:
        mask, group = mask_of(self, tensordict, advantage), resolve_group(self.group)
        if mask is None and group is None:
            return super()._standardize_advantage(advantage, tensordict)
        excluded = {dim % advantage.ndim for dim in self.normalize_advantage_exclude_dims}
        dims = tuple(dim for dim in range(advantage.ndim) if dim not in excluded)
        return standardized(advantage, mask, dims, group)
