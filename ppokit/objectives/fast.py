"""The loss at the cost of its networks: no TensorDict on the way, derivatives in closed form."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributions import Distribution

from ppokit.objectives import native_terms, terms
from ppokit.objectives.networks import Values
from ppokit.objectives.penalty import exact_kl, stored_parameters
from ppokit.objectives.policies import Evaluated, Policy, known_policy
from ppokit.objectives.slopes import attach
from ppokit.objectives.terms import Minibatch, Options
from ppokit.objectives.watch import WatchedLoss

# What torchrl's own subclasses override, and users may.
_REPLACED = (
    *("_critic_loss_inputs", "_get_cur_log_prob", "_get_entropy", "_log_weight"),
    *("_reduce_loss", "_weighted_loss_entropy", "loss_critic"),
)


class FastPath(WatchedLoss):
    """A loss whose forward can be had without TensorDicts, where no option forbids it."""

    fast: bool
    _as_written = True  # whether a subclass has left alone what the fast path does otherwise

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._as_written = all(getattr(cls, name) is getattr(FastPath, name) for name in _REPLACED)

    def _fast_forward(self, tensordict: TensorDictBase) -> TensorDict | None:
        """Return what ``forward`` returns, or None where it takes torchrl's path to tell."""
        actor = self.actor_network
        if not self._may_be_fast(actor):
            return None
        key = self.tensor_keys.advantage
        advantage = tensordict.get(key, None)
        if not isinstance(advantage, Tensor) or advantage.shape != (*tensordict.batch_size, 1):
            return None
        mask = self._mask(tensordict, advantage)
        advantage = self._maybe_normalize_advantage(advantage, tensordict, update_norm=False)
        if mask is not None:
            tensordict = tensordict.clone(False).set(key, advantage)
            self._fill_padding(tensordict)
            advantage = tensordict.get(key)
        values = Values(tensordict)
        old_log_prob, policy = self._policy(actor, values, tensordict)
        if policy is None or old_log_prob is None or old_log_prob.shape != advantage.shape[:-1]:
            return None
        critic = self._critic(values, tensordict) if self._has_critic else (None, None, None)
        if critic is None:
            return None
        batch, options = Minibatch(old_log_prob, advantage, *critic, mask), self._options()
        penalty = None if options.kl_coeff is None else self._penalty(actor, values, tensordict)
        if penalty is not None:
            options = options._replace(kl_coeff=None)
        with torch.no_grad():
            found = native_terms.loss_terms(policy, batch, options)
            if found is None:
                evaluated = policy.evaluate()
                if evaluated.log_prob.shape != advantage.shape:
                    return None
                found = terms.loss_terms(evaluated, batch, options)
        losses, diagnostics, groups, slopes = found
        if not (self._meets_ranks() or _is_finite(losses["loss_objective"])):
            return None  # the distribution says what is wrong with its parameters or the action
        attached = attach(list(losses.values()), groups, slopes)
        outputs = dict(zip(losses, attached, strict=True)) | diagnostics
        if penalty is not None:
            outputs["loss_kl"] = penalty
        self._look_at(outputs)
        return TensorDict._new_unsafe(outputs, batch_size=torch.Size([]))

    def _may_be_fast(self, actor: nn.Module) -> bool:
        buffers = self._buffers
        return (
            self.fast
            and self._as_written
            and not self.delay_actor
            and buffers.get("max_importance_ratio") is None
            and buffers.get("head_entropy_coeff") is None
            and self.reduction in ("mean", "sum")
            and isinstance(actor, ProbabilisticTensorDictSequential)
            and not actor.return_composite
            and not _is_transformed()
        )

    def _options(self) -> Options:
        # Past nn.Module's look-up of attributes: ten of them take as long as the losses.
        coefficient: Any = self._buffers.get
        if self._asymmetric_clip:
            epsilon = coefficient("clip_epsilon_low"), coefficient("clip_epsilon_high")
        else:
            epsilon = (coefficient("clip_epsilon"),) * 2
        return Options(
            epsilon,
            coefficient("dual_clip"),
            coefficient("clip_value"),
            coefficient("critic_loss_clip"),
            coefficient("entropy_coeff") if self.entropy_bonus else None,
            coefficient("critic_coeff") if self._has_critic else None,
            coefficient("kl_coeff"),
            self.loss_critic_type,
            self.reduction,
            self.log_explained_variance,
        )

    # -- the networks ----------------------------------------------------------

    def _within(self, name: str) -> AbstractContextManager[Any]:
        if not self.functional:
            return nullcontext()
        network, parameters = getattr(self, name), getattr(self, name + "_params")
        return parameters.to_module(network, preserve_module_state=False)

    def _policy(
        self, actor: Any, values: Values, tensordict: TensorDictBase
    ) -> tuple[Tensor | None, Policy | None]:
        """Return the log-probability at collection ``[*B]``, and the policy as it is now."""
        keys = self.tensor_keys
        if isinstance(keys.action, list) or isinstance(keys.sample_log_prob, list):
            return None, None
        old_log_prob = tensordict.get(keys.sample_log_prob, None)
        action = tensordict.get(keys.action, None)
        for given in (old_log_prob, action):
            if not isinstance(given, Tensor) or given.requires_grad:
                return None, None
        with self._within("actor_network"):
            *networks, head = actor.module
            for network in networks:
                values.run(network)
        parameters = {
            key if isinstance(key, str) else key[-1]: values.get(entry)
            for key, entry in zip(head.dist_keys, head.in_keys, strict=True)
        }
        samples = self.samples_mc_entropy if self.entropy_bonus else 0
        options = head.distribution_kwargs
        policy = known_policy(head.distribution_class, parameters, options, action, samples)
        if policy is None:
            dist = head.get_dist(values.tensordict())
            policy = None if isinstance(dist, CompositeDistribution) else self._ask(dist, action)
        return old_log_prob, policy

    def _ask(self, dist: Distribution, action: Tensor) -> Evaluated | None:
        log_prob = dist.log_prob(action)
        entropy = torch.zeros_like(log_prob).unsqueeze(-1)
        if self.entropy_bonus:
            entropy = self._get_entropy(dist, adv_shape=log_prob.shape)
        if not isinstance(log_prob, Tensor) or not isinstance(entropy, Tensor):
            return None
        return Evaluated(log_prob.unsqueeze(-1), entropy, [], None)

    def _penalty(self, actor: Any, values: Values, tensordict: TensorDictBase) -> Tensor | None:
        """Return the penalty on the exact KL, or None where the batch does not tell it."""
        head, coefficient = actor.module[-1], self.kl_coeff
        old = stored_parameters(head, tensordict)
        if old is None or coefficient is None:
            return None
        kl = exact_kl(head, old, {key: values.get(key) for key in old}, coefficient)
        return None if kl is None else coefficient * self._reduce_loss(kl, tensordict).squeeze(-1)

    def _critic(
        self, values: Values, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return value, target and, for ``clip_value``, the old value."""
        keys = self.tensor_keys
        target = tensordict.get(keys.value_target, None)
        clips = self._buffers.get("clip_value") is not None
        old_value = tensordict.get(keys.value, None) if clips else None
        if target is None or (old_value is None and clips):
            return None
        if self.separate_losses:
            values = values.detached()
        with self._within("critic_network"):
            values.run(self.critic_network)
        value = values.made(keys.value)
        if value is None or value.shape != target.shape:
            return None
        if old_value is not None and old_value.shape != value.shape:
            return None
        return value, target, old_value


def _is_transformed() -> bool:
    """Return whether torch.func or forward-mode derivatives ask for more than one gradient."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_finite(x: Tensor) -> bool:
    """Return whether a number is finite, where that can be told without waiting for a device."""
    return not x.is_cpu or torch.compiler.is_compiling() or math.isfinite(x.item())
