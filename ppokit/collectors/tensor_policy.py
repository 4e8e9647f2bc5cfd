"""A policy of plain networks and a known distribution, called on tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    composite_lp_aggregate,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import SafeProbabilisticModule

from ppokit._calls import as_tuple, before_last, is_hooked_or_patched, obstacle, overridden, parts
from ppokit._keys import as_key, key_parts
from ppokit.collectors.batch import Column, Entries
from ppokit.collectors.sampling import Sampler, find_sampler
from ppokit.collectors.spaces import Actions
from ppokit.functional.distributions import sum_of_heads

_FORWARDS = (ProbabilisticTensorDictModule.forward, SafeProbabilisticModule.forward)


class Head(NamedTuple):
    """An action, or a part of one: how it is drawn, from what, and where it is written."""

    key: NestedKey
    sampler: Sampler
    parameters: Sequence[NestedKey]  #: of the distribution, in the sampler's order
    log_prob_key: NestedKey | None


class PolicyParts(NamedTuple):
    """The networks, the distributions and the keys of a policy and of the module before it."""

    calls: Sequence[tuple[Any, Any]]  #: networks, and the TensorDictModules that call them
    heads: Sequence[Head]  #: in the order in which they are drawn
    sum_key: NestedKey | None  #: of the log-probabilities of all heads together
    reads: Sequence[NestedKey]  #: entries that are not written by a module before
    transformed: Sequence[NestedKey]  #: entries of the module before the policy
    written: Sequence[NestedKey]  #: entries of the policy's networks

    def call(self, values: dict[NestedKey, Any]) -> None:
        """Add what the networks return to what they read."""
        for network, module in self.calls:
            outputs = as_tuple(network(*[values[key] for key in module.in_keys]), module)
            values.update(zip(module.out_keys, outputs, strict=True))

    def write(self, observed: Entries, ndim: int) -> tuple[Entries, Entries]:
        """Return what the module before the policy writes, and what the policy writes.

        Args:
            observed: entries ``[*B, ...]``.
            ndim: dimensions of B.
        """
        values: dict[NestedKey, Any] = {key: observed[key] for key in self.reads}
        self.call(values)
        transformed = {key: values[key] for key in self.transformed}
        written, log_probs = {key: values[key] for key in self.written}, []
        for key, sampler, keys, log_prob_key in self.heads:
            parameters = [values[key] for key in keys]
            sample = sampler.draw(*parameters)
            written[key] = sampler.encoded(sampler.action(sample), parameters[0])
            if log_prob_key is not None:
                written[log_prob_key] = sampler.log_prob(sample, *parameters)
                log_probs.append(written[log_prob_key])
        if self.sum_key is not None:
            written[self.sum_key] = sum_of_heads(log_probs, ndim)
        return transformed, written


class TensorPolicy:
    """Computes the actions and entries of the policy on tensors, from the same random numbers.

    It is made anew for each batch. Log-probabilities are computed once for the whole batch, which
    rounds them differently in the last digit.
    """

    def __init__(self, parts: PolicyParts, actions: Actions) -> None:
        self._parts, self._actions = parts, actions
        heads = {head.key: number for number, head in enumerate(parts.heads)}
        self._order = [heads[key] for key in actions.keys(heads)]  # of the parts of an action
        parameters = [key for head in parts.heads for key in head.parameters]
        keys = {*parts.transformed, *parts.written, *parameters}
        self._columns = {key: Column() for key in keys}
        self._drawn = [(Column(), Column()) for _ in parts.heads]  # samples, and actions
        self._is_checked = False

    def act(self, observed: Entries, starts: Sequence[int]) -> Sequence[Any]:
        """Return the action of each environment."""
        values: dict[NestedKey, Any] = dict(observed)
        self._parts.call(values)
        actions = []
        for head, (samples, taken) in zip(self._parts.heads, self._drawn, strict=True):
            sample = head.sampler.draw(*[values[key] for key in head.parameters])
            action = head.sampler.action(sample)
            samples.append(sample)
            taken.append(action)
            actions.append(action)
        if not self._is_checked:
            self._is_checked = True
            self._check(actions, values, len(next(iter(observed.values()))))
        for key, column in self._columns.items():
            column.append(values[key])
        ordered = zip(self._actions.parts, self._order, strict=True)
        columns = [part.split(actions[number].cpu().numpy()) for part, number in ordered]
        return self._actions.join(columns)

    def _check(self, actions: Sequence[Tensor], values: Mapping[Any, Any], num_envs: int) -> None:
        for part, number in zip(self._actions.parts, self._order, strict=True):
            key, sampler, parameters, _ = self._parts.heads[number]
            encoded = sampler.encoded(actions[number], values[parameters[0]])
            part.check(key, encoded, num_envs)

    def finish(self, starts: Sequence[int]) -> tuple[Entries, Entries]:
        """Return the entries of the transform and of the policy ``[n, T, ...]`` in this batch."""
        parts, steps = self._parts, {key: column.take() for key, column in self._columns.items()}
        transformed = {key: steps[key] for key in parts.transformed}
        written = {key: steps[key] for key in parts.written}
        log_probs = []
        for (key, sampler, keys, log_prob_key), (samples, taken) in zip(
            parts.heads, self._drawn, strict=True
        ):
            parameters = [steps[key] for key in keys]
            check_finite(keys, sampler.checked(*parameters))
            written[key] = sampler.encoded(taken.take(), parameters[0])
            sample = samples.take()
            if log_prob_key is not None:
                written[log_prob_key] = sampler.log_prob(sample, *parameters)
                log_probs.append(written[log_prob_key])
        if parts.sum_key is not None:
            written[parts.sum_key] = sum_of_heads(log_probs, 2)
        return transformed, written


def as_tensor_policy(
    policy: Any, transform: Any, observed: Sequence[NestedKey], actions: Actions
) -> TensorPolicy | str:
    """Return the policy called on tensors, or why it has to be called as a TensorDictModule."""
    parts = take_apart(policy, transform)
    if isinstance(parts, str):
        return parts
    heads = {head.key: head for head in parts.heads}
    try:
        keys = actions.keys(heads)
    except KeyError as error:
        return str(error)
    for key, part in zip(keys, actions.parts, strict=True):
        if heads[key].sampler.encoding != part.encoding:
            return f"the distribution of {key!r} has another encoding of actions"
    missing = set(parts.reads) - set(observed)
    return f"it reads {sorted(map(str, missing))}" if missing else TensorPolicy(parts, actions)


def take_apart(policy: Any, transform: Any = None) -> PolicyParts | str:
    """Return the parts of policy and transform, or why they cannot be called on tensors."""
    reason = _unknown_sequence(policy) or _unknown_distribution(policy.module[-1])
    if reason:
        return reason
    head = policy.module[-1]
    before = [] if transform is None else parts(transform)
    of_policy = [part for module in before_last(policy) for part in parts(module)]
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
    is_composite = head.distribution_class is CompositeDistribution
    heads = _composite_heads(head, written) if is_composite else _single_head(head)
    if isinstance(heads, str):
        return heads
    used = [key for one in heads for key in one.parameters]
    reads.update((key, None) for key in used if key not in written)
    made = dict.fromkeys(key for module in of_policy for key in module.out_keys)
    # These raise where the mode is another than when the policy was made, as a call of it does.
    log_prob_keys = head.log_prob_keys if is_composite and head.return_log_prob else []
    is_summed = bool(log_prob_keys) and composite_lp_aggregate()
    of_heads = [head.log_prob_key for head in heads]
    if log_prob_keys and not is_summed and [*map(as_key, log_prob_keys)] != of_heads:
        return "its log_prob_keys are not those of its distribution"
    return PolicyParts(
        [(module.module, module) for module in (*before, *of_policy)],
        heads,
        as_key(log_prob_keys[0]) if is_summed else None,
        list(reads),
        [] if transform is None else [as_key(key) for key in transform.out_keys],
        [key for key in made if not key_parts(key)[-1].startswith("_")],
    )


def _single_head(head: Any) -> list[Head] | str:
    """Return the head of a distribution of one action, or why it is not known."""
    if len(head.dist_sample_keys) != 1:
        return f"{_name(type(head))} writes {head.dist_sample_keys}, not one action"
    by_name: Mapping[str, NestedKey] = {
        key_parts(name)[-1]: as_key(key)
        for name, key in zip(head.dist_keys, head.in_keys, strict=True)
    }
    sampler = find_sampler(head.distribution_class, head.distribution_kwargs, by_name)
    if isinstance(sampler, str):
        return sampler
    log_prob_key = as_key(head.log_prob_key) if head.return_log_prob else None
    parameters = [by_name[name] for name in sampler.names]
    return [Head(as_key(head.dist_sample_keys[0]), sampler, parameters, log_prob_key)]


def _composite_heads(head: Any, written: Collection[NestedKey]) -> list[Head] | str:
    """Return the heads of a ``CompositeDistribution``, or why one of them is not known."""
    options, heads = head.distribution_kwargs, []
    names, extra = (options.get(name) or {} for name in ("name_map", "extra_kwargs"))
    names, extra = ({as_key(key): x for key, x in given.items()} for given in (names, extra))
    if len(head.in_keys) != 1:
        return "CompositeDistribution has parameters in several entries"
    for name, distribution in options["distribution_map"].items():
        path = *key_parts(head.in_keys[0]), *key_parts(name)
        by_name = {key_parts(key)[-1]: key for key in written if key_parts(key)[:-1] == path}
        sampler = find_sampler(distribution, extra.get(as_key(name), {}), by_name)
        if isinstance(sampler, str):
            return sampler
        *parents, last = key_parts(names.get(as_key(name), name))
        key = as_key((*parents, last))
        log_prob_key = as_key((*parents, f"{last}_log_prob")) if head.return_log_prob else None
        parameters = [by_name[name] for name in sampler.names]
        heads.append(Head(key, sampler, parameters, log_prob_key))
    return heads


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
    if type(module.distribution_kwargs) is not dict:
        return "distribution_kwargs is no dict"
    return ""


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def check_finite(names: Sequence[NestedKey], parameters: Sequence[Tensor]) -> None:
    """Raise where a parameter is not finite; of logits some may be minus infinity, but not all."""
    for name, parameter in zip(names, parameters, strict=False):
        bad = ~(parameter < math.inf) | (parameter.amax(-1, keepdim=True) == -math.inf)
        refuse(name, bad)


def refuse(name: NestedKey, bad: Tensor) -> None:
    """Raise a ValueError where an entry of the policy is bad."""
    if bad.any():
        raise ValueError(
            f"The policy's {name!r} is nan or inf in {int(bad.sum())} of {bad.numel()} places of "
            f"this batch, first at {bad.nonzero()[0].tolist()}. Look at the last update: a "
            "learning rate that is too high, an observation that is not finite, or an action "
            "mask that allows nothing."
        )
