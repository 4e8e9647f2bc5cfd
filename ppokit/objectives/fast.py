"""The loss at the cost of its networks: no TensorDict on the way, derivatives in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, dispatch
from torch import Tensor
from torch.autograd import forward_ad
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import set_recurrent_mode

from ppokit._calls import make, with_entries
from ppokit._recurrent import check_stored
from ppokit.objectives import native_terms, terms
from ppokit.objectives.captured import Captured
from ppokit.objectives.penalty import exact_kl, stored_parameters
from ppokit.objectives.plan import Plan
from ppokit.objectives.planned import PlannedLoss
from ppokit.objectives.policies import Evaluated, Policy
from ppokit.objectives.slopes import attach
from ppokit.objectives.terms import Coefficients, Minibatch, Settings, Summary, Terms

# What torchrl's own subclasses override, and users may.
_REPLACED = (
    *("_critic_loss_inputs", "_get_cur_log_prob", "_get_entropy", "_log_weight"),
    *("_reduce_loss", "_weighted_loss_entropy", "loss_critic"),
)
_NO_DIMENSIONS = torch.Size([])


class FastPath(PlannedLoss):
    """A loss whose forward can be had without TensorDicts, where no option forbids it."""

    _is_called_bare = True  # whether a subclass has left forward itself alone

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._as_written = all(getattr(cls, name) is getattr(FastPath, name) for name in _REPLACED)
        cls._is_called_bare = unwrap(cls.forward) is unwrap(FastPath.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``forward`` returns, past torch's and torchrl's wrappers if they are idle."""
        plan = self._current_plan()
        if (
            plan is None
            or not (plan.is_bare and self._is_called_bare)
            or len(args) != 1
            or kwargs
            or not isinstance(args[0], TensorDictBase)
            or "forward" in self.__dict__
        ):
            return super().__call__(*args, **kwargs)
        compiled = self._compiled_outputs
        if compiled is None or torch.compiler.is_compiling():
            outputs = self._planned_outputs(args[0], plan)
        else:
            outputs = compiled(args[0])
        if outputs is not None:
            return _as_tensordict(outputs)
        if compiled is not None:
            return super().__call__(*args, **kwargs)
        return self._in_modes(self._watched_forward, args[0])

    def compile(self, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compile the loss in place, as ``torch.nn.Module.compile`` does.

        Arguments are those of ``torch.compile``. It is faster than ``torch.compile(loss)`` at small
        minibatches. What wraps the computation, and its TensorDict, stay out of the graph; on the
        CPU the graph is called without asking torch._dynamo where all that it depends on is known
        to be as it was, and on Linux Inductor's C++ wrapper is on, which
        ``options={"cpp_wrapper": False}`` turns off. Layers, parameters and hooks may be changed
        afterwards: the graph is captured anew.
        """
        captured = Captured(self, kwargs)  # before torch takes a filter out of the options
        super().compile(**kwargs)
        self._compiled_outputs = captured
        self._make_plan()

    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the losses and the diagnostics of a minibatch.

        Args:
            tensordict: ``[*B]`` with the actor's and the critic's inputs, the action, its
                log-probability at collection ``[*B]``, the advantage and the value target
                ``[*B, 1]``; or, without an advantage, what the value estimator needs.
        """
        outputs = self._outputs(tensordict)
        return self._watched_forward(tensordict) if outputs is None else _as_tensordict(outputs)

    def _watched_forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if torch.compiler.is_compiling() and self._breaks_graphs:
            return self._outside_of_graphs(self._watched_forward, tensordict)
        out = self._full_forward(tensordict)
        self._look_at(out)  # pyright: ignore[reportArgumentType]
        return out

    def _full_forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().forward(tensordict)

    def _outputs(self, tensordict: TensorDictBase) -> dict[str, Tensor] | None:
        """Return what ``forward`` returns, or None where it takes torchrl's path to tell."""
        plan = self._current_plan()
        return None if plan is None else self._planned_outputs(tensordict, plan)

    def _planned_outputs(self, tensordict: TensorDictBase, plan: Plan) -> dict[str, Tensor] | None:
        if self._stored_keys:
            check_stored(tensordict, self._stored_keys)
        given = None if _is_transformed() else self._given(tensordict, plan)
        if given is None:
            return None
        tensordict, action, batch = given
        coefficients = Coefficients(*map(self._buffers.get, plan.coefficients))  # pyright: ignore
        values = plan.networks.read(tensordict)
        if values is None or not self._call("actor", plan, values, tensordict):
            return None
        policy = self._policy(plan, values, tensordict, action)
        if policy is None:
            return None
        if plan.value is not None:
            if not self._call("critic", plan, values, tensordict):
                return None
            batch = batch._replace(value=values[plan.value])
        penalty = None
        if coefficients.kl_coeff is not None:
            penalty = self._penalty(plan, values, tensordict)
            if penalty is not None:
                coefficients = coefficients._replace(kl_coeff=None)
        found = _loss_terms(policy, batch, coefficients, plan.settings)
        if found is None:
            return None
        losses, diagnostics, groups, summary = found
        meets = plan.normalizes and self._meets_ranks()
        if not (meets or _is_finite(losses["loss_objective"], summary)):
            return None  # the distribution says what is wrong with its parameters or the action
        # Where there is but one backward pass: a captured graph has no other, and what the networks
        # have in common is gone after the first.
        at_once = plan.shares or torch.compiler.is_compiling()
        attached = attach(tuple(losses.values()), groups, at_once=at_once)
        outputs = dict(zip(losses, attached, strict=True)) | diagnostics
        if penalty is not None:
            outputs["loss_kl"] = penalty
        if not torch.compiler.is_compiling():
            self._look_at(outputs, summary)
        return outputs

    def _given(
        self, tensordict: TensorDictBase, plan: Plan
    ) -> tuple[TensorDictBase, Tensor, Minibatch] | None:
        """Return the batch with its padding made harmless, the action, and what else is there."""
        keys = plan.keys
        advantage = tensordict.get(keys.advantage, None)
        if not isinstance(advantage, Tensor) or advantage.shape != (*tensordict.batch_size, 1):
            return None
        mask, names = None, tensordict.keys()
        for root in plan.mask_roots:
            if root in names:
                mask = self._mask(tensordict, advantage)
        if plan.normalizes:
            advantage = self._maybe_normalize_advantage(advantage, tensordict, update_norm=False)
        if mask is not None:
            tensordict = tensordict.clone(False).set(keys.advantage, advantage)
            self._fill_padding(tensordict)
            advantage = tensordict.get(keys.advantage)
        old_log_prob = tensordict.get(keys.sample_log_prob, None)
        action = tensordict.get(keys.action, None)
        constants, target, old_value = [advantage, old_log_prob, action], None, None
        if plan.value is not None:
            target = tensordict.get(keys.value_target, None)
            constants.append(target)
            if self._buffers.get("clip_value") is not None:
                old_value = tensordict.get(keys.value, None)
                constants.append(old_value)
        for constant in constants:
            if not isinstance(constant, Tensor) or constant.requires_grad:
                return None
        return tensordict, action, Minibatch(old_log_prob, advantage, None, target, old_value, mask)

    def _call(self, name: str, plan: Plan, values: list[Any], tensordict: TensorDictBase) -> bool:
        if torch.compiler.is_compiling() and self._breaks_graphs:
            return self._outside_of_graphs(self._call_here, name, plan, values, tensordict)
        return self._call_here(name, plan, values, tensordict)

    def _in_modes(self, method: Callable[..., Any], *args: Any) -> Any:
        with set_exploration_type(self.deterministic_sampling_mode), set_recurrent_mode(True):
            return method(*args)

    # Traced, a recurrent network would fall into a dozen small graphs for each new shape. And while
    # a graph is captured torchrl keeps its modes where nobody looks who is outside of it.
    _outside_of_graphs: Any = torch.compiler.disable(_in_modes)

    def _call_here(
        self, name: str, plan: Plan, values: list[Any], tensordict: TensorDictBase
    ) -> bool:
        calls = plan.actor if name == "actor" else plan.critic
        if not plan.functional:
            return make(calls, values, tensordict)
        network = getattr(self, name + "_network")
        parameters = getattr(self, name + "_network_params")
        with parameters.to_module(network, preserve_module_state=False):
            return make(calls, values, tensordict)

    def _policy(
        self, plan: Plan, values: list[Any], tensordict: TensorDictBase, action: Tensor
    ) -> Policy | None:
        """Return the policy as it is now."""
        head = plan.head
        if plan.form is not None:
            parameters = [values[place] for place in plan.parameters]
            known = plan.form.make(plan.samples, action, *parameters)
            if known is not None:
                return known
        parameters = [values[place] for place in plan.read_by_head]
        dist = head.get_dist(with_entries(tensordict, head.in_keys, parameters))
        if isinstance(dist, CompositeDistribution):
            return None
        log_prob = dist.log_prob(action)
        entropy = torch.zeros_like(log_prob).unsqueeze(-1)
        if self.entropy_bonus:
            entropy = self._get_entropy(dist, adv_shape=log_prob.shape)
        if not isinstance(log_prob, Tensor) or not isinstance(entropy, Tensor):
            return None
        return Evaluated(log_prob.unsqueeze(-1), entropy, [], None)

    def _penalty(self, plan: Plan, values: list[Any], tensordict: TensorDictBase) -> Tensor | None:
        """Return the penalty on the exact KL, or None where the batch does not tell it."""
        coefficient, old = self.kl_coeff, stored_parameters(plan.head, tensordict)
        if old is None or coefficient is None:
            return None
        new = dict(zip(old, (values[place] for place in plan.read_by_head), strict=True))
        kl = exact_kl(plan.head, old, new, coefficient)
        return None if kl is None else coefficient * self._reduce_loss(kl, tensordict).squeeze(-1)


def _loss_terms(
    policy: Policy, batch: Minibatch, coefficients: Coefficients, settings: Settings
) -> Terms | None:
    found = native_terms.loss_terms(policy, batch, coefficients, settings)
    if found is not None:
        return found
    shape, value, target, old_value = batch.advantage.shape, *batch[2:5]
    if batch.old_log_prob.shape != shape[:-1]:
        return None
    if value is not None and (target is None or value.shape != target.shape):
        return None
    if value is not None and old_value is not None and old_value.shape != value.shape:
        return None
    with torch.no_grad():
        evaluated = policy.evaluate()
        if evaluated.log_prob.shape != shape:
            return None
        return terms.loss_terms(evaluated, batch, coefficients, settings)


def _as_tensordict(outputs: dict[str, Tensor]) -> TensorDict:
    return TensorDict._new_unsafe(outputs, batch_size=_NO_DIMENSIONS, nested=False)


def _is_transformed() -> bool:
    """Return whether torch.func or forward-mode derivatives ask for more than one gradient."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_finite(x: Tensor, summary: Summary | None) -> bool:
    """Return whether a loss is finite, where that can be told without waiting for a device."""
    if summary is not None:
        return math.isfinite(summary.loss_objective)
    return not x.is_cpu or torch.compiler.is_compiling() or math.isfinite(x.item())
