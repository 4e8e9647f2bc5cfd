"""The clipped PPO loss with dual clip, and its diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    composite_lp_aggregate,
    dispatch,
)
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.objectives import ClipPPOLoss

from ppokit._batch import (
    BURN_IN_KEY,
    TRAJ_KEY,
    State,
    as_key,
    breaks_graphs,
    check_critic,
    check_own_states,
    check_stored,
    check_trajectories,
    get_if_any,
    get_tensor,
    in_keys_of,
    is_of_transformer,
    is_recurrent,
    key_list,
    key_parts,
    missing_entry,
    per_frame,
    state_keys,
    stored_keys,
    takes_tensordict,
    time_dim,
)
from ppokit._calls import call, explain, hooks_in, outside_of_graphs, shapes_of
from ppokit._checks import choice, whole
from ppokit._state import WholeState
from ppokit.distributed import resolve_group, standardized
from ppokit.functional import clipped_critic_loss, kl_estimate
from ppokit.functional._checks import check_bool, check_float, check_same_shape
from ppokit.objectives import terms
from ppokit.objectives.coefficients import (
    FLOATS,
    check_arguments,
    check_can_be_set,
    check_coefficient,
    check_names,
)
from ppokit.policies.distributions import Categorical, Normal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OF_POLICY = "The policy writes it at collection (return_log_prob=True); see loss.set_keys()."


class DualClipPPOLoss(WholeState, ClipPPOLoss):
    r"""Clipped PPO loss with dual clip, a subclass of torchrl's ``ClipPPOLoss``.

    .. math::
        s &= \min(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A) \\
        loss\_objective &= -\overline{s'}, \qquad
        s' = \max(s, c A) \text{ where } A < 0, \; s \text{ elsewhere}

    (Schulman et al., 2017, arXiv:1707.06347, equation 7; Ye et al., 2020, arXiv:1912.09729,
    equation 5.) Without dual clip the loss of a sample with A < 0 grows with its ratio without
    bound. With ``dual_clip=None`` and no mask in the batch, losses, gradients and diagnostics equal
    those of ``ClipPPOLoss`` to 1e-6 (float64: 1e-12).

    At the end of ``out_keys`` come ``"kl"`` (the k3 estimate of KL(old || new), in nats, mean over
    the frames), ``"dual_clip_fraction"`` (the share of frames whose loss the dual clip bounds) and,
    with ``kl_coeff``, ``"loss_kl"``. As with torchrl's losses, coefficients are already applied:
    sum every ``loss_*``. Ratios, ``"kl"``, ``"ESS"`` and ``"clip_fraction"`` are those of the
    unclamped ratio. If the batch holds a mask of valid frames (``loss_mask_key``), the diagnostics
    and the advantage normalization use valid frames only. A recurrent network goes through masked
    frames that come before a valid one in their row, as they are stored.

    Several action heads (``CompositeDistribution``) are clipped by their joint ratio. If their
    log-probabilities are stored one by one (``set_composite_lp_aggregate(False)``), the loss also
    returns the mean KL of each head as ``("composite_kl", *head)``, for ``"gear"`` named
    ``"gear_kl"``, beside torchrl's ``"composite_entropy"`` of each frame and head.

    Args:
        actor_network: the policy.
        critic_network: the value network; None if there is no critic loss. If actor and critic
            share an encoder, pass the value head alone: it reads the actor's outputs, and the
            encoder runs once. The losses must then be run backward together, unless they are
            separate (``separate_losses``). GAE takes the whole value network. If the loss gets it,
            too, the encoder runs twice.
        dual_clip: bound c > 1 on the ratio where the advantage, after normalization, is negative.
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
        group: process group over whose ranks the advantage is normalized, with
            ``normalize_advantage=True``; all ranks must then see as many minibatches. None is the
            default group if ``torch.distributed`` is initialized, and no communication otherwise.
        **kwargs: arguments of ``ClipPPOLoss``.

    The advantage is normalized per minibatch with ``normalize_advantage=True``; for once per batch,
    there is ``GAE(average_gae=True)``.

    Coefficients are buffers, also the entropy coefficients of several heads: they are in
    ``state_dict``, and ``loss.entropy_coeff = 0.001`` changes them in place. A term built with
    ``critic_coeff=0``, or with ``kl_coeff`` 0 or None, is absent, and setting its coefficient later
    raises. A coefficient that is set to 0 later masks its term, so that 0 * inf is not NaN.

    Raises:
        TypeError: there is no such argument.
        ValueError: ``dual_clip <= 1``, a coefficient is negative, ``clip_epsilon`` is out of range,
            at construction or later; a tensor of the batch has the wrong shape, such as a
            log-probability ``[B, 1]``; or two recurrent modules share a state.
        KeyError: the batch lacks a key that the loss needs, such as a recurrent network's state.
        AttributeError: a coefficient is set that the loss was built without.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ppokit import DualClipPPOLoss
        >>> from ppokit.networks import actor_critic
        >>> loss = DualClipPPOLoss(*actor_critic("CartPole-v1"), dual_clip=5.0)
        >>> losses = loss(TensorDict({
        ...     "observation": torch.randn(4, 4), "action": torch.zeros(4, dtype=torch.long),
        ...     "action_log_prob": torch.zeros(4), "advantage": torch.randn(4, 1),
        ...     "value_target": torch.randn(4, 1)}, [4]))
        >>> sorted(losses.keys())[:4]
        ['ESS', 'clip_fraction', 'dual_clip_fraction', 'entropy']
    """

    reduction = choice("mean", "sum", "none")
    loss_critic_type = choice("smooth_l1", "l1", "l2")
    samples_mc_entropy = whole()
    dual_clip: Tensor | None
    critic_loss_clip: Tensor | None
    kl_coeff: Tensor | None
    clip_epsilon: Tensor
    clip_value: Tensor | None
    max_importance_ratio: Tensor | None
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
        functional: bool | None = None,
        group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        resolve_group(group)
        check_names(kwargs, DualClipPPOLoss)
        actor_network = kwargs.pop("actor", actor_network)  # torchrl's other names
        critic_network = kwargs.pop("critic", critic_network)
        if functional is None:
            functional = bool(kwargs.get("delay_actor"))
        own = {"dual_clip": dual_clip, "critic_loss_clip": critic_loss_clip, "kl_coeff": kl_coeff}
        check_arguments(own | kwargs)
        check_own_states(actor_network, critic_network)
        if isinstance(actor_network, nn.Module) and not hasattr(actor_network, "get_dist"):
            raise TypeError(
                "actor_network must be a policy with get_dist(), such as torchrl's "
                f"ProbabilisticActor; got {type(actor_network).__name__}. The order is "
                "DualClipPPOLoss(actor, critic)."
            )
        check_critic(critic_network)
        if critic_network is None:
            kwargs["critic_coeff"] = None  # 0 would be a coefficient that could be raised
        # An integer would make a buffer that holds integers only.
        kwargs |= {
            name: float(x) for name, x in kwargs.items() if name in FLOATS and type(x) is int
        }
        super().__init__(actor_network, critic_network, functional=functional, **kwargs)
        head = terms.last_module(self.actor_network)
        if head is not None and head.distribution_class is CompositeDistribution:
            keys: dict[str, Any] = {
                "action": head.dist_sample_keys
            }  # torchrl reads the first head, or none
            if not composite_lp_aggregate():
                keys["sample_log_prob"] = head.log_prob_keys
            self.set_keys(**keys)
        if not self.delay_actor:  # torchrl's only hook warns of target networks, and costs guards
            for hooks in hooks_in(vars(self)):
                hooks.clear()
        self.group = group
        device = self._clip_bounds[0].device
        for name, value in own.items():
            self.register_coeff_buffer(name, float(value) if value else None, device=device)

    def entries(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries of a batch that the loss reads."""
        names = self.tensor_keys
        keys = [*self.actor_network.in_keys, names.advantage, names.value_target, names.value]
        keys += [*key_list(names.action), *key_list(names.sample_log_prob)]
        if self.critic_network is not None:  # a value head reads the actor's outputs
            written = self.actor_network.out_keys
            keys += [key for key in self.critic_network.in_keys if key not in written]
        if self.kl_coeff is not None and hasattr(self.actor_network, "dist_params_keys"):
            keys += self.actor_network.dist_params_keys
        keys = dict.fromkeys(map(as_key, [*keys, *self._loss_mask_keys()]))
        return [key for key in keys if get_if_any(tensordict, key) is not None]

    @property
    def out_keys(self) -> list[str]:
        """The parent's keys, then ``kl``, ``dual_clip_fraction`` and, if any, ``loss_kl``."""
        if self._out_keys is None:
            own = ["kl", "dual_clip_fraction", *["loss_kl"] * (self.kl_coeff is not None)]
            self._out_keys = [*super().out_keys, *own]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[str]) -> None:
        self._out_keys = values

    @takes_tensordict
    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # pyright: ignore
        """Return the losses and the diagnostics of a minibatch.

        Args:
            tensordict: ``[*B]`` with the actor's and the critic's inputs, the action, its
                log-probability at collection ``[*B]``, the advantage and the value target
                ``[*B, 1]``; of several agents ``[*B, A]`` and ``[*B, A, 1]``. Or, without an
                advantage, the entries of the value estimator, in time order: ``[B, T]``, or with a
                dimension named "time".
        """
        networks = self.actor_network, self.critic_network
        # Asked first for states: a graph would have guards on every module.
        if torch.compiler.is_compiling() and stored_keys(*networks) and breaks_graphs(*networks):
            return outside_of_graphs(self._losses, tensordict)
        if torch.compiler.is_compiling():
            return self._losses(tensordict)
        try:
            return self._losses(tensordict)
        except (KeyError, RuntimeError, ValueError) as error:
            read = self.entries(tensordict)
            explain(error, type(self).__name__, shapes_of(tensordict), *networks, also=read)
            raise

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        minibatch, advantage, mask = self._read(tensordict)
        head = None if self.kl_coeff is None else terms.last_module(self.actor_network)
        old = None if head is None else terms.stored_parameters(head, minibatch)
        names = self.tensor_keys
        log_ratio, dist, correction, of_heads = self._log_ratios(minibatch, advantage.ndim - 1)
        advantage = terms.expanded_advantage(
            advantage, log_ratio, key=names.advantage, of_ratio=names.sample_log_prob
        )
        mask = None if mask is None else self._mask(minibatch, log_ratio)
        bounds, clip = self._clip_bounds, self.dual_clip  # of log-ratios, of a ratio
        clip = None if clip is None else clip.to(log_ratio.dtype).log()
        objective = terms.clipped_loss(log_ratio, correction, advantage, *bounds, clip)
        losses: dict[str, Any] = {"loss_objective": objective}
        found: dict[NestedKey, Tensor | None] = {}
        if self.entropy_bonus:
            entropy = self._get_entropy(dist, adv_shape=advantage.shape[:-1])
            if is_tensor_collection(entropy):
                found["composite_entropy"] = entropy.detach()
            found["entropy"] = terms.mean(terms.total_entropy(entropy).detach(), mask)
            coefficients = self.entropy_coeff, self._entropy_coeff_map
            losses["loss_entropy"] = terms.entropy_loss(entropy, *coefficients)
        if self.kl_coeff is not None:
            kl = terms.kl_penalty(head, old, minibatch, self.kl_coeff, log_ratio)
            losses["loss_kl"] = self.kl_coeff * kl
        if self.critic_coeff is not None:  # last: it writes to the minibatch
            losses["loss_critic"], clipped, explained = self.loss_critic(minibatch)
            found |= {"value_clip_fraction": clipped, "explained_variance": explained}
        with torch.no_grad():
            # of the policy at collection, where the clipping is relative to another
            of_old = log_ratio if correction is None else log_ratio + correction
            found |= terms.policy_diagnostics(log_ratio, advantage, bounds, clip, mask, of_old)
        for name, term in losses.items():
            of_team = mask is not None and mask.shape != term.shape
            own = self._mask(minibatch, term) if of_team else mask
            losses[name] = terms.reduce(term, own, self.reduction)
        out = TensorDict(losses | {key: x for key, x in found.items() if x is not None})
        for key, x in of_heads.items():
            *parents, name = key_parts(key)
            kl = terms.mean(kl_estimate(x.detach().view_as(log_ratio)), mask)
            out.set(("composite_kl", *parents, name.removesuffix("_log_prob") + "_kl"), kl)
        return out

    # -- the minibatch ---------------------------------------------------------

    def _read(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Tensor, Tensor | None]:
        """Return a copy that networks may write to, its padding harmless; advantage; mask."""
        if 0 in tensordict.batch_size:
            raise ValueError(f"The minibatch is empty: {list(tensordict.batch_size)}.")
        check_stored(tensordict, stored_keys(self.actor_network, self.critic_network))
        if isinstance(tensordict, LazyStackedTensorDict):  # torchrl would transpose its entries
            tensordict = tensordict.contiguous()
        minibatch, names = tensordict.clone(False), self.tensor_keys
        for key in (*key_list(names.action), *key_list(names.sample_log_prob)):
            if (entry := minibatch.get(key, None)) is None:
                raise missing_entry(minibatch, key, _OF_POLICY)
            if key == names.sample_log_prob and isinstance(entry, Tensor):
                check_float(repr(key), entry)
            if entry.requires_grad:
                raise ValueError(f"{key!r} of the batch requires a gradient; detach() it.")
        advantage = self._advantage(minibatch)
        mask = self._mask(minibatch, advantage)
        if mask is not None:
            minibatch.set(names.advantage, advantage)
            # Episode starts in the padding of a sequence would slow a recurrent network down.
            kept = {"is_init", *map(as_key, self._loss_mask_keys())}
            keys, valid = self.entries(minibatch), per_frame(mask, minibatch.ndim)
            networks = self.actor_network, self.critic_network
            recurrent = [x for x in networks if is_recurrent(x) or state_keys(x)]
            # A recurrent network goes through frames that are masked before a valid one.
            read = {as_key(key) for network in recurrent for key in in_keys_of(network)} - kept
            kept |= {key for key in keys if is_of_transformer(key)}  # the same at each frame
            read -= kept
            _fill_padding(minibatch, valid, valid, [key for key in keys if key not in read | kept])
            if read:
                followed = valid.flip(-1).int().cumsum(-1).flip(-1) > 0
                _fill_padding(minibatch, valid, followed, [key for key in keys if key in read])
            advantage = minibatch.get(names.advantage)
        return minibatch, advantage, mask

    def _advantage(self, minibatch: TensorDictBase) -> Tensor:
        key = self.tensor_keys.advantage
        advantage = minibatch.get(key, None, as_padded_tensor=True)  # pyright: ignore
        is_estimated_here = advantage is None
        if is_estimated_here:
            self._estimate_advantage(minibatch)
            advantage = minibatch.get(key)
        shape = list(advantage.shape)
        if advantage.shape == minibatch.batch_size:
            raise ValueError(
                f"The advantage {key!r} has shape {shape}, the shape of the batch, without the "
                "trailing dimension. Use advantage.unsqueeze(-1)."
            )
        check_float(repr(key), advantage)
        if not advantage.numel():
            raise ValueError(f"{key!r} has shape {shape}: it has no number of a frame.")
        if not self.normalize_advantage and self.advantage_norm is None:
            return advantage
        return self._maybe_normalize_advantage(advantage, minibatch, update_norm=is_estimated_here)

    def _estimate_advantage(self, minibatch: TensorDictBase) -> None:
        """Write the advantage of torchrl's value estimator into a batch in time order."""
        names = self.tensor_keys
        if self.critic_network is None or minibatch.get(("next", names.reward), None) is None:
            raise KeyError(
                f"{names.advantage!r} is not in the batch, and without a critic and a reward it "
                "cannot be computed. Call GAE on the batch first, or loss.set_keys(advantage=...)."
            )
        advice = "Call GAE on the collected batch, before it is shuffled."
        kind = type(self).__name__
        who = f"{names.advantage!r} is not in the batch. {advice} To estimate it, {kind}"
        dim, done = time_dim(minibatch, who=who), minibatch.get(("next", names.done))
        check_trajectories(minibatch, done, dim, mask=None, key=TRAJ_KEY)
        parameters = self.critic_network_params.detach() if self.functional else None
        targets = self.target_critic_network_params
        try:
            self.value_estimator(minibatch, params=parameters, target_params=targets)
        except RuntimeError as error:
            if stored_keys(self.critic_network):
                raise ValueError(
                    f"{names.advantage!r} is not in the batch, and torchrl's value estimator "
                    f"cannot run this recurrent critic. {advice}"
                ) from error
            following = minibatch.get("next")
            missing = [x for x in self.critic_network.in_keys if following.get(x, None) is None]
            if missing:
                raise KeyError(
                    f"{names.advantage!r} is not in the batch, and to estimate it the critic reads "
                    f"{missing}, which are not under 'next'. {advice}"
                ) from error
            raise

    def _mask(self, minibatch: TensorDictBase, like: Tensor) -> Tensor | None:
        """Return the mask of valid frames in the shape of a tensor, or None if there is none."""
        if get_if_any(minibatch, BURN_IN_KEY) is not None:
            raise ValueError(
                f"The minibatch holds {BURN_IN_KEY!r}: frames of burn-in, whose gradient the loss "
                "would compute. Give it batcher.refresh(minibatch, actor, critic)."
            )
        found: Tensor | None = None
        for key in map(as_key, self._loss_mask_keys()):
            if (mask := get_if_any(minibatch, key)) is not None:
                check_bool(key, mask)
                while mask.ndim > like.ndim and mask.shape[-1] == 1:
                    mask = mask.squeeze(-1)
                mask = expand_as_right(mask, like)
                found = mask if found is None else found & mask
        return found

    # -- policy and critic -----------------------------------------------------

    def _parameters_of(self, name: str, parameters: Any = None) -> AbstractContextManager[Any]:
        """Return a context in which a network has the parameters of the loss.

        If the critic's loss is separate, parameters that it shares with the actor are constants.
        """
        network = getattr(self, name)
        if self.functional:
            if parameters is None:
                parameters = getattr(self, f"{name}_params")
            return parameters.to_module(network, preserve_module_state=False)
        if name == "critic_network" and self.separate_losses:
            of_actor = {id(parameter) for parameter in self.actor_network.parameters()}
            if any(id(parameter) in of_actor for parameter in network.parameters()):
                shared: Any = TensorDict.from_module(network)
                # Without buffers: a value that a module assigns to one would be lost.
                shared = shared.apply(lambda p: p.detach() if id(p) in of_actor else None)
                return shared.to_module(network)
        return nullcontext()

    def _distribution(self, minibatch: TensorDictBase, parameters: object = None) -> Any:
        """Return the distribution of the policy, by formula if it is known.

        The networks write to the minibatch. A functional loss may call the actor with
        ``parameters``.
        """
        actor: Any = self.actor_network
        head = terms.last_module(actor)
        with self._parameters_of("actor_network", parameters):
            if head is None:
                return actor.get_dist(minibatch)
            entries = call(list(actor.module)[:-1], minibatch)
            known, key = terms.known_distribution(head, entries), self.tensor_keys.action
            if known is not None and not isinstance(key, list):
                action: Any = minibatch.get(key)
                if isinstance(action, Tensor) and known.has_log_prob_of(action):
                    return known
            return head.get_dist(entries)

    def _log_ratios(
        self, minibatch: TensorDictBase, ndim: int
    ) -> tuple[Tensor, Any, Tensor | None, dict[NestedKey, Tensor]]:
        r"""Return the log-ratio on which the clipping acts, and the distribution that it is of.

        .. math:: d = \log \pi_{new}(a|s) - \log \pi_{prox}(a|s), \qquad
            correction = \log \pi_{prox}(a|s) - \log \pi_{old}(a|s)

        The proximal policy is the delayed actor if there is one (Hilton et al., 2022,
        arXiv:2110.00641), and otherwise the policy that collected the data. With
        ``max_importance_ratio`` the correction is lowered until d + correction is in range. B has
        ``ndim`` dimensions; the actor's networks write to the minibatch.

        Returns:
            d ``[*B, 1]``, the distribution of the policy, the correction ``[*B, 1]`` or None, and
            the log-ratio of each head ``[*B]``, if log-probabilities of heads are stored.
        """
        keys = self.tensor_keys.sample_log_prob
        names = {"log_prob_key": keys, "action_key": self.tensor_keys.action}
        old = minibatch.select(*keys) if isinstance(keys, list) else minibatch.get(keys)
        new, distribution, _ = self._get_cur_log_prob(minibatch)
        proximal, correction = old, None
        if self.delay_actor:
            with torch.no_grad():
                parameters = self.target_actor_network_params
                proximal, *_ = self._get_cur_log_prob(minibatch, params=parameters)
                of_heads = terms.log_ratios(proximal, old, ndim, **names)
                correction = reduce(torch.add, of_heads.values()).unsqueeze(-1)
        of_heads = terms.log_ratios(new, proximal, ndim, **names)
        log_ratio = reduce(torch.add, of_heads.values()).unsqueeze(-1)
        if self.max_importance_ratio is not None:
            largest = self.max_importance_ratio.log() - log_ratio.detach()
            correction = largest.clamp(max=0) if correction is None else correction.minimum(largest)
        known = {} if self.delay_actor else of_heads
        heads = {key: x for key, x in known.items() if key is not None}
        return log_ratio, distribution, correction, heads

    def loss_critic(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return each frame's critic loss (coefficient applied), clip fraction, explained variance.

        Args:
            tensordict: with the critic's inputs and the value target. The critic writes to it.
        """
        names = self.tensor_keys
        minibatch = tensordict.detach() if self.separate_losses else tensordict
        fix = "GAE and the other value estimators write it; see loss.set_keys()."
        target, old_value = get_tensor(minibatch, names.value_target, fix=fix), None
        check_float(repr(names.value_target), target)
        if self.clip_value is not None:
            fix = "clip_value needs the value at collection, which GAE stores; see loss.set_keys()."
            old_value = get_tensor(minibatch, names.value, fix=fix)
        with self._parameters_of("critic_network"):
            predicted = call([self.critic_network], minibatch)
        value = get_tensor(predicted, names.value, fix="The critic does not write it; set_keys().")
        target, value, old_value = self._critic_loss_inputs(target, value, old_value)
        if value.shape != target.shape:
            of_value, of_target = f"the value {names.value!r}", f"the target {names.value_target!r}"
            check_same_shape({of_value: value, of_target: target})
        losses = clipped_critic_loss(
            value,
            target,
            old_value=old_value,
            clip_value=self.clip_value,
            loss_clip=self.critic_loss_clip,
            kind=self.loss_critic_type,
        )
        mask, clipped, explained = self._mask(minibatch, value), None, None
        with torch.no_grad():
            if old_value is not None and self.clip_value is not None:
                moved = value - old_value
                is_clipped = moved != moved.clamp(-self.clip_value, self.clip_value)
                clipped = terms.mean(is_clipped, mask, value.dtype)
            if self.log_explained_variance:
                explained = terms.explained_variance(value, target, mask)
        if self.critic_coeff is not None:
            losses = terms.scaled(self.critic_coeff, losses)
        return losses, clipped, explained

    # -- hooks of torchrl ------------------------------------------------------

    def _get_cur_log_prob(self, tensordict: TensorDictBase, params: object = None) -> Any:
        # The delayed actor runs last: a value head must not read its outputs.
        given = tensordict if params is None else tensordict.copy()
        dist = self._distribution(given, params)
        key: Any = self.tensor_keys.action
        is_composite = isinstance(dist, CompositeDistribution)
        of_heads = is_composite or isinstance(key, list)
        action = given.select(*key_list(key)) if of_heads else given.get(key)
        heads: Any = dist.dists.items() if is_composite else [] if of_heads else [(key, dist)]
        for name, head in heads:
            if isinstance(head, Distribution):
                terms.check_action(name, given.get(name), head)
        return dist.log_prob(action), dist, is_composite

    def _get_entropy(self, dist: Any, adv_shape: torch.Size) -> Any:
        if isinstance(dist, (Normal, Categorical)):
            return dist.entropy(self.samples_mc_entropy).unsqueeze(-1)
        return super()._get_entropy(dist, adv_shape)

    def _maybe_normalize_advantage(
        self, advantage: Tensor, tensordict: TensorDictBase, *, update_norm: bool
    ) -> Tensor:
        mask, group = self._mask(tensordict, advantage), resolve_group(self.group)
        # Also with a single frame, if other ranks wait for its part.
        is_own = group is not None or (mask is not None and advantage.numel() > 1)
        if not (self.normalize_advantage and is_own):
            normalize = super()._maybe_normalize_advantage
            return normalize(advantage, tensordict, update_norm=update_norm)
        excluded = {dim % advantage.ndim for dim in self.normalize_advantage_exclude_dims}
        dims = tuple(dim for dim in range(advantage.ndim) if dim not in excluded)
        return standardized(advantage, mask, dims, group)

    # -- coefficients ----------------------------------------------------------

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

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name in self._all_schedulable_buffers:
            check_can_be_set(name, value, vars(self))
            value = cast("Tensor", value.item()) if isinstance(value, np.generic) else value
        super().__setattr__(name, value)

    def check_state(self, state: State) -> None:
        """Raise a ValueError if a state holds a coefficient that the constructor rejects."""
        for name in (*self._all_schedulable_buffers, "head_entropy_coeff"):
            check_coefficient(name, state.get(name))

    def loaded_name(self, name: str) -> str:
        """Return the name in this loss of an entry that a functional loss, or another, wrote."""
        for network in ("actor_network.", "critic_network."):
            others = network[:-1] + "_params."
            here, there = (others, network) if self.functional else (network, others)
            if name.startswith(there):
                return here + name.removeprefix(there)
        return name


def _fill_padding(
    minibatch: TensorDictBase, mask: Tensor, keep: Tensor, keys: list[NestedKey]
) -> None:
    """Replace entries, except at the frames to keep, by a copy of the first valid frame, in place.

    The gradient of padding is 0, but 0 * NaN is NaN, and a matrix product spreads it to every
    parameter. Without a valid frame, numbers that are not finite become finite.
    """
    valid_frame, any_valid = mask.flatten().int().argmax().reshape(1), mask.any()

    def fill(x: Tensor) -> Tensor:
        frame = x.flatten(0, mask.ndim - 1).index_select(0, valid_frame)
        if x.dtype is not torch.bool:
            harmless = frame.nan_to_num() if x.is_floating_point() else torch.zeros_like(frame)
            frame = torch.where(any_valid, frame, harmless)
        kept = keep.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return torch.where(kept, x, frame.reshape((1,) * mask.ndim + frame.shape[1:]))

    for key in keys:
        entry = minibatch.get(key)
        filled = fill(entry) if isinstance(entry, Tensor) else entry.contiguous().apply(fill)
        minibatch.set(key, filled)
