"""A policy of plain networks and a known distribution, called on tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import SafeProbabilisticModule

from ppokit._calls import as_tuple, is_hooked_or_patched, obstacle, overridden, parts
from ppokit._keys import as_key, key_parts
from ppokit.collectors.batch import Column, Entries
from ppokit.collectors.sampling import OneHotSampler, Sampler, find_sampler
from ppokit.collectors.spaces import Actions

_FORWARDS = (ProbabilisticTensorDictModule.forward, SafeProbabilisticModule.forward)


class PolicyParts(NamedTuple):
    """The networks, the distribution and the keys of a policy and of the module before it."""

    calls: Sequence[tuple[Any, Any]]  #: networks, and the TensorDictModules that call them
    sampler: Sampler
    head: Any  #: the module that samples the action
    parameters: Sequence[NestedKey]  #: of the distribution, in the sampler's order
    reads: Sequence[NestedKey]  #: entries that are not written by a module before
    transformed: Sequence[NestedKey]  #: entries of the module before the policy
    written: Sequence[NestedKey]  #: entries of the policy's networks

    def call(self, values: dict[NestedKey, Any]) -> list[Tensor]:
        """Add what the networks return to what they read; return the distribution's parameters."""
        for network, module in self.calls:
            outputs = as_tuple(network(*[values[key] for key in module.in_keys]), module)
            values.update(zip(module.out_keys, outputs, strict=True))
        return [values[key] for key in self.parameters]

    def log_prob_key(self) -> NestedKey | None:
        """Return the key of the log-probability, or None where it is not written."""
        return as_key(self.head.log_prob_key) if self.head.return_log_prob else None


class TensorPolicy:
    """Computes the actions and entries of the policy on tensors, from the same random numbers.

    It is made anew for each batch. Log-probabilities are computed once for the whole batch, which
    rounds them differently in the last digit.
    """

    def __init__(self, parts: PolicyParts, actions: Actions) -> None:
        self._parts, self._actions, self._sampler = parts, actions, parts.sampler
        keys = {*parts.transformed, *parts.written, *parts.parameters}
        self._columns = {key: Column() for key in keys}
        self._samples, self._actions_taken = Column(), Column()
        self._is_checked = False

    def act(self, observed: Entries, starts: Sequence[int]) -> Sequence[Any]:
        """Return the action of each environment."""
        values: dict[NestedKey, Any] = dict(observed)
        parameters = self._parts.call(values)
        sample = self._sampler.draw(*parameters)
        action = self._sampler.action(sample)
        if not self._is_checked:
            self._is_checked = True
            num_envs = len(next(iter(observed.values())))
            self._actions.check(self._sampler.encoded(action, parameters[0]), num_envs)
        for key, column in self._columns.items():
            column.append(values[key])
        self._samples.append(sample)
        self._actions_taken.append(action)
        decode = self._actions.decode_choices if self._sampler.is_discrete else self._actions.decode
        return decode(action)

    def finish(self, starts: Sequence[int]) -> tuple[Entries, Entries]:
        """Return the entries of the transform and of the policy ``[n, T, ...]`` in this batch."""
        parts, steps = self._parts, {key: column.take() for key, column in self._columns.items()}
        for name, key in zip(self._sampler.names, parts.parameters, strict=True):
            check_finite(name, steps[key])
        transformed = {key: steps[key] for key in parts.transformed}
        written = {key: steps[key] for key in parts.written}
        parameters = [steps[key] for key in parts.parameters]
        written["action"] = self._sampler.encoded(self._actions_taken.take(), parameters[0])
        if (key := parts.log_prob_key()) is not None:
            written[key] = self._sampler.log_prob(self._samples.take(), *parameters)
        return transformed, written


def as_tensor_policy(
    policy: Any, transform: Any, observed: Sequence[NestedKey], actions: Actions
) -> TensorPolicy | str:
    """Return the policy called on tensors, or why it has to be called as a TensorDictModule."""
    parts = take_apart(policy, transform)
    if isinstance(parts, str):
        return parts
    is_one_hot = isinstance(parts.sampler, OneHotSampler)
    if (parts.sampler.is_discrete, is_one_hot) != (actions.is_discrete, actions.is_one_hot):
        return f"{_name(parts.head.distribution_class)} has another encoding of actions"
    missing = set(parts.reads) - set(observed)
    return f"it reads {sorted(map(str, missing))}" if missing else TensorPolicy(parts, actions)


def take_apart(policy: Any, transform: Any = None) -> PolicyParts | str:
    """Return the parts of policy and transform, or why they cannot be called on tensors."""
    reason = _unknown_sequence(policy) or _unknown_distribution(policy.module[-1])
    if reason:
        return reason
    head = policy.module[-1]
    by_name: Mapping[str, NestedKey] = {
        key_parts(name)[-1]: as_key(key)
        for name, key in zip(head.dist_keys, head.in_keys, strict=True)
    }
    sampler = find_sampler(head.distribution_class, head.distribution_kwargs, list(by_name))
    if isinstance(sampler, str):
        return sampler
    before, of_policy = [] if transform is None else parts(transform), parts(policy.det_part)
    reads: dict[NestedKey, None] = {}
    written: set[NestedKey] = set()
    for module in (*before, *of_policy):
        if reason := obstacle(module):
            return reason
        for key in module.in_keys:
            if any(_is_nested(key, other) for other in written):
                return f"it reads {key!r}, of which another module writes a part or the whole"
            if key not in written:
                reads[key] = None
        written.update(module.out_keys)
    reads.update((key, None) for key in by_name.values() if key not in written)
    made = dict.fromkeys(key for module in of_policy for key in module.out_keys)
    return PolicyParts(
        [(module.module, module) for module in (*before, *of_policy)],
        sampler(head.distribution_class, head.distribution_kwargs),
        head,
        [by_name[name] for name in sampler.names],
        list(reads),
        [] if transform is None else [as_key(key) for key in transform.out_keys],
        [key for key in made if not key_parts(key)[-1].startswith("_")],
    )


def _is_nested(first: NestedKey, second: NestedKey) -> bool:
    """Return whether one of two keys is that of an entry within the other's."""
    a, b = key_parts(first), key_parts(second)
    shorter = min(len(a), len(b))
    return len(a) != len(b) and a[:shorter] == b[:shorter]


def _unknown_sequence(policy: Any) -> str:
    """Return why a policy is no plain sequence of modules that ends in a distribution, or ""."""
    name = _name(type(policy))
    if not isinstance(policy, ProbabilisticTensorDictSequential):
        return f"{name} is no ProbabilisticActor"
    if type(policy).forward is not ProbabilisticTensorDictSequential.forward:
        return f"{name} has a forward method of its own"
    if is_hooked_or_patched(policy):
        return f"a hook on {name}"
    if reason := overridden(policy, ProbabilisticTensorDictSequential, ("get_dist_params",)):
        return reason
    if (
        not isinstance(policy.module, nn.ModuleList)
        or policy.return_composite
        or policy._select_before_return  # no public name; set by select_out_keys
        or policy.inplace not in (None, True)
    ):
        return f"{name} selects its entries, or has named modules or inplace=False"
    return ""


def _unknown_distribution(module: Any) -> str:
    """Return why the last module does not just draw one action, or ""."""
    name = _name(type(module))
    if type(module).forward not in _FORWARDS:
        return f"{name} has a forward method of its own"
    if is_hooked_or_patched(module):
        return f"a hook on {name}"
    if reason := overridden(module, ProbabilisticTensorDictModule, ("get_dist",)):
        return reason
    # _generator and _generator_key have no public names
    if (module.num_samples, module._generator, module._generator_key) != (None, None, None):
        return f"{name} has num_samples or a generator"
    if [as_key(key) for key in module.dist_sample_keys] != ["action"]:
        return f"{name} does not write 'action' alone"
    if type(module.distribution_kwargs) is not dict:
        return "distribution_kwargs is no dict"
    return ""


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def check_finite(name: str, parameter: Tensor) -> None:
    """Raise where a parameter is not finite; of logits some may be minus infinity, but not all."""
    bad = ~(parameter < math.inf) | (parameter.amax(-1, keepdim=True) == -math.inf)
    if bad.any():
        raise ValueError(
            f"The policy's {name!r} is nan or inf in {int(bad.sum())} of {bad.numel()} places of "
            "this batch. Look at the last update: a learning rate that is too high, or an "
            "observation that is not finite."
        )
