"""A policy of plain networks and a known distribution, called past its TensorDicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import SafeProbabilisticModule

from ppokit._keys import as_key, key_parts
from ppokit._networks import Networks
from ppokit._old_calls import Call, make
from ppokit.collectors.heads import Head, OneHot, known_head
from ppokit.collectors.policies import Entries
from ppokit.collectors.record import Column, End
from ppokit.collectors.spaces import Actions

_FORWARDS = (ProbabilisticTensorDictModule.forward, SafeProbabilisticModule.forward)
_WATCHED = ("distribution_class", "return_log_prob", "num_samples", "_generator", "_generator_key")


class Found(NamedTuple):
    """What a policy and the module before it are made of."""

    networks: Networks
    calls: Sequence[Call]
    kind: type[Head]
    module: Any  #: the one that draws the action
    parameters: Sequence[int]  #: places of the distribution's
    transformed: dict[NestedKey, int]  #: places of what the module before the policy writes
    written: dict[NestedKey, int]  #: and of what the policy's networks do

    def head(self) -> Head:
        """Return how actions are drawn, by the distribution as it is now."""
        module = self.module
        return self.kind(partial(module.distribution_class, **module.distribution_kwargs))


class LeanPolicy:
    """The same actions and entries as the policy would give, from the same random numbers.

    Log-probabilities are computed once for the whole batch, which rounds them differently in the
    last digit.
    """

    def __init__(self, found: Found, actions: Actions) -> None:
        self._networks, self._calls, self._module = found.networks, found.calls, found.module
        self._parameters, self._actions, self._head = found.parameters, actions, found.head()
        self._transformed, self._written = found.transformed, found.written
        places = {*found.transformed.values(), *found.written.values(), *found.parameters}
        self._columns = {place: Column() for place in places}
        self._is_checked = False

    def act(self, observed: Entries, ends: Sequence[End]) -> Sequence[Any]:
        """Return what each environment is to be given."""
        values: Any = self._networks.read(observed)  # pyright: ignore[reportArgumentType]
        if not make(self._calls, values, None):  # pyright: ignore[reportArgumentType]
            raise ValueError("A network returns more or fewer tensors than its out_keys name.")
        action = self._head.draw(*[values[place] for place in self._parameters])
        if not self._is_checked:
            self._is_checked = True
            num_envs = len(next(iter(observed.values())))
            self._actions.check(self._head.encoded(action, values[self._parameters[0]]), num_envs)
        for place, column in self._columns.items():
            column.append(values[place])
        return action.tolist() if self._head.is_choice else self._actions.read(action)

    def finish(self, ends: Sequence[End]) -> tuple[Entries, Entries]:
        """Return what the transform and what the policy wrote ``[n, T, ...]`` in this batch."""
        made = {place: column.take() for place, column in self._columns.items()}
        for name, place in zip(self._head.names, self._parameters, strict=True):
            check_finite(name, made[place])
        transformed = {key: made[place] for key, place in self._transformed.items()}
        written = {key: made[place] for key, place in self._written.items()}
        action, score = self._head.finish([made[place] for place in self._parameters])
        written["action"] = action
        if self._module.return_log_prob:
            written[as_key(self._module.log_prob_key)] = score()
        return transformed, written

    def is_current(self) -> bool:
        """Return whether the modules are as they were when this was made."""
        return self._networks.watch.are_as_found()


def lean_policy(
    policy: Any, transform: Any, observed: Sequence[NestedKey], actions: Actions
) -> LeanPolicy | None:
    """Return the policy in its lean form, or None where it has to be called as it is."""
    found = take_apart(policy, transform)
    if found is None or found.kind.is_choice != actions.is_choice:
        return None
    if found.kind.is_choice and issubclass(found.kind, OneHot) != actions.is_one_hot:
        return None
    read = {as_key(key) for _, key in found.networks.entries}
    return None if read - set(observed) else LeanPolicy(found, actions)


def take_apart(policy: Any, transform: Any = None) -> Found | None:
    """Return what policy and transform are made of, or None where they may do something else."""
    module = _last_module(policy)
    if module is None or any("forward" in vars(part) for part in (policy, module)):
        return None
    *parts, _ = policy.module
    names = [key if isinstance(key, str) else key[-1] for key in module.dist_keys]
    kind = known_head(module.distribution_class, module.distribution_kwargs, names)
    if kind is None:
        return None
    networks = Networks()
    networks.watch.parts(policy._modules)
    networks.watch.parts(policy.module._modules)
    networks.watch.parts(module.distribution_kwargs)
    networks.watch.attributes(module, *_WATCHED)
    if networks.watch.is_hooked(policy) or networks.watch.is_hooked(module):
        return None
    calls: list[Call] = []
    transformed: dict[NestedKey, int] = {}
    if transform is not None:
        calls += networks.add(transform)
        transformed = {as_key(key): networks.place_of(key) for key in transform.out_keys}
    for part in parts:
        calls += networks.add(part)
    if any(call.wants_tensordict for call in calls):
        return None
    made = {as_key(key): networks.made(key) for part in parts for key in part.out_keys}
    written = {k: place for k, place in made.items() if place is not None and _is_public(k)}
    parameters = {n: networks.place_of(k) for n, k in zip(names, module.in_keys, strict=True)}
    places = [parameters[name] for name in kind.names]
    return Found(networks, calls, kind, module, places, transformed, written)


def _last_module(policy: Any) -> Any:
    """Return the module that draws the action, if it and the policy do just that."""
    if (
        not isinstance(policy, ProbabilisticTensorDictSequential)
        or type(policy).forward is not ProbabilisticTensorDictSequential.forward
        or not isinstance(policy.module, nn.ModuleList)
        or policy.return_composite
        or policy._select_before_return
        or policy.inplace not in (None, True)
    ):
        return None
    module: Any = policy.module[-1]
    plain = (
        type(module).forward in _FORWARDS
        and (module.num_samples, module._generator, module._generator_key) == (None, None, None)
        and [as_key(key) for key in module.dist_sample_keys] == ["action"]
        and type(module.distribution_kwargs) is dict
    )
    return module if plain else None


def _is_public(key: NestedKey) -> bool:
    return not key_parts(key)[-1].startswith("_")


def check_finite(name: str, parameter: Tensor) -> None:
    """Raise where there was nothing to draw from; logits of minus infinity are fine."""
    bad = ~(parameter < math.inf)
    if bad.any():
        raise ValueError(
            f"The policy's {name!r} is nan or inf in {int(bad.sum())} of {bad.numel()} places of "
            "this batch. Look at the last update: a learning rate that is too high, or an "
            "observation that is not finite."
        )
