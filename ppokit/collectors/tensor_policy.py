"""A policy of plain networks and a known distribution, called on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import SafeProbabilisticModule

from ppokit._calls import Call, make
from ppokit._keys import as_key, key_parts
from ppokit._networks import Networks
from ppokit.collectors.batch import Column, End, Entries
from ppokit.collectors.sampling import OneHotSampler, Sampler, find_sampler
from ppokit.collectors.spaces import Actions

_FORWARDS = (ProbabilisticTensorDictModule.forward, SafeProbabilisticModule.forward)
_WATCHED = ("distribution_class", "return_log_prob", "num_samples", "_generator", "_generator_key")


class PolicyParts(NamedTuple):
    """The networks, the distribution and the keys of a policy and of the module before it."""

    networks: Networks
    calls: Sequence[Call]
    sampler_type: type[Sampler]
    module: Any  #: the module that samples the action
    parameters: Sequence[int]  #: positions of the distribution's parameters among the values
    transformed: dict[NestedKey, int]  #: positions of the entries of the module before the policy
    written: dict[NestedKey, int]  #: positions of the entries of the policy's networks

    def sampler(self) -> Sampler:
        """Return a sampler of the distribution as it is now."""
        module = self.module
        return self.sampler_type(partial(module.distribution_class, **module.distribution_kwargs))


class TensorPolicy:
    """Computes the actions and entries of the policy on tensors, from the same random numbers.

    Log-probabilities are computed once for the whole batch, which rounds them differently in the
    last digit.
    """

    def __init__(self, parts: PolicyParts, actions: Actions) -> None:
        self._networks, self._calls, self._module = parts.networks, parts.calls, parts.module
        self._parameters, self._actions, self._sampler = parts.parameters, actions, parts.sampler()
        self._transformed, self._written = parts.transformed, parts.written
        positions = {*parts.transformed.values(), *parts.written.values(), *parts.parameters}
        self._columns = {position: Column() for position in positions}
        self._is_checked = False

    def act(self, observed: Entries, ends: Sequence[End]) -> Sequence[Any]:
        """Return the action of each environment."""
        values: Any = self._networks.read(observed)  # pyright: ignore[reportArgumentType]
        if not make(self._calls, values, None):  # pyright: ignore[reportArgumentType]
            raise ValueError("A network returns more or fewer tensors than its out_keys name.")
        action = self._sampler.draw(*[values[position] for position in self._parameters])
        if not self._is_checked:
            self._is_checked = True
            num_envs = len(next(iter(observed.values())))
            self._actions.check(
                self._sampler.encoded(action, values[self._parameters[0]]), num_envs
            )
        for position, column in self._columns.items():
            column.append(values[position])
        return action.tolist() if self._sampler.is_discrete else self._actions.decode(action)

    def finish(self, ends: Sequence[End]) -> tuple[Entries, Entries]:
        """Return the entries of the transform and of the policy ``[n, T, ...]`` in this batch."""
        steps = {position: column.take() for position, column in self._columns.items()}
        for name, position in zip(self._sampler.names, self._parameters, strict=True):
            check_finite(name, steps[position])
        transformed = {key: steps[position] for key, position in self._transformed.items()}
        written = {key: steps[position] for key, position in self._written.items()}
        action, score = self._sampler.finish([steps[position] for position in self._parameters])
        written["action"] = action
        if self._module.return_log_prob:
            written[as_key(self._module.log_prob_key)] = score()
        return transformed, written


def as_tensor_policy(
    policy: Any, transform: Any, observed: Sequence[NestedKey], actions: Actions
) -> TensorPolicy | str:
    """Return the policy called on tensors, or why it has to be called as a TensorDictModule."""
    parts = take_apart(policy, transform)
    if isinstance(parts, str):
        return parts
    is_one_hot = issubclass(parts.sampler_type, OneHotSampler)
    if (parts.sampler_type.is_discrete, is_one_hot) != (actions.is_discrete, actions.is_one_hot):
        return f"{_name(parts.module.distribution_class)} has another encoding of actions"
    missing = {as_key(key) for _, key in parts.networks.entries} - set(observed)
    return f"it reads {sorted(map(str, missing))}" if missing else TensorPolicy(parts, actions)


def take_apart(policy: Any, transform: Any = None) -> PolicyParts | str:
    """Return the parts of policy and transform, or why they cannot be called on tensors."""
    reason = _unknown_sequence(policy) or _unknown_distribution(policy.module[-1])
    if reason:
        return reason
    *networks_of_policy, module = policy.module
    names = [key if isinstance(key, str) else key[-1] for key in module.dist_keys]
    sampler = find_sampler(module.distribution_class, module.distribution_kwargs, names)
    if isinstance(sampler, str):
        return sampler
    networks = Networks()
    networks.watch.parts(policy._modules)
    networks.watch.parts(policy.module._modules)
    networks.watch.parts(module.distribution_kwargs)
    networks.watch.attributes(module, *_WATCHED)
    for hooked in (policy, module):
        if networks.watch.is_hooked(hooked):
            return f"a hook on {type(hooked).__name__}"
    calls: list[Call] = []
    transformed: dict[NestedKey, int] = {}
    if transform is not None:
        calls += networks.add(transform)
        transformed = {as_key(key): networks.place_of(key) for key in transform.out_keys}
    for part in networks_of_policy:
        calls += networks.add(part)
    for call in calls:
        if call.wants_tensordict:
            return f"{_name(type(call.network))} is called on a TensorDict, or has a hook"
    outputs = {as_key(k): networks.made(k) for part in networks_of_policy for k in part.out_keys}
    written = {
        k: position for k, position in outputs.items() if position is not None and _is_public(k)
    }
    parameters = {n: networks.place_of(k) for n, k in zip(names, module.in_keys, strict=True)}
    positions = [parameters[name] for name in sampler.names]
    return PolicyParts(networks, calls, sampler, module, positions, transformed, written)


def _unknown_sequence(policy: Any) -> str:
    """Return why a policy is no plain sequence of modules that ends in a distribution, or ""."""
    name = _name(type(policy))
    if not isinstance(policy, ProbabilisticTensorDictSequential):
        return f"{name} is no ProbabilisticActor"
    if type(policy).forward is not ProbabilisticTensorDictSequential.forward or (
        "forward" in vars(policy)
    ):
        return f"{name} has a forward method of its own"
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
    if type(module).forward not in _FORWARDS or "forward" in vars(module):
        return f"{name} has a forward method of its own"
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


def _is_public(key: NestedKey) -> bool:
    return not key_parts(key)[-1].startswith("_")


def check_finite(name: str, parameter: Tensor) -> None:
    """Raise where a parameter of the distribution is not finite; logits may be minus infinity."""
    bad = ~(parameter < math.inf)
    if bad.any():
        raise ValueError(
            f"The policy's {name!r} is nan or inf in {int(bad.sum())} of {bad.numel()} places of "
            "this batch. Look at the last update: a learning rate that is too high, or an "
            "observation that is not finite."
        )
