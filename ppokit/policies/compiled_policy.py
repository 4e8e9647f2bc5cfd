"""A policy as one graph of ``torch.compile``: networks and draw."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from ppokit._batch import (
    IS_INIT,
    Entries,
    Options,
    Policy,
    State,
    StateDict,
    in_keys_of,
    recurrent_states,
)
from ppokit._calls import are_same, attributes_of, have_hooks, modules_of
from ppokit._compiling import Budget, Compiled, CompiledFunction, NoGraphError, check_options
from ppokit.policies.tensor_policy import call_on_tensordict, find_tensor_policy

WORTH = 300  # calls of a graph within batches, after which it is captured without guards


class CompiledPolicy:
    """A policy and the module before it as a function of tensors, in graphs.

    The first two calls after :meth:`begin` check all guards. Between the calls that follow, no code
    of the user may run: they use the same graph, without guards once it was called so often that
    another capture pays. If a graph changes what graphs depend on, every call checks them.
    """

    def __init__(self, compile_policy: bool | Options) -> None:
        options = {} if isinstance(compile_policy, bool) else compile_policy
        self._options: Options = options or {}
        check_options(options or {}, "compile_policy")
        if self._options.get("dynamic"):
            raise ValueError(
                "A policy cannot be compiled with dynamic=True: of a TanhNormal, Inductor returns "
                "log-probabilities of other actions. Leave it out."
            )
        self.reason: str | None = None  #: why the policy is called without a graph
        self._policy: Any = None
        self._transform: TensorDictModuleBase | None = None
        self._kept: Collection[NestedKey] = ()
        self._modules: dict[str, nn.Module] = {}
        self._failed: str | None = None  # why no graph can be captured
        # by the keys and batch dimensions of the observations: compiled, and not compiled
        self._functions: dict[Hashable, tuple[CompiledFunction, Compiled]] = {}
        self._budget = Budget()

    def __getstate__(self) -> StateDict:
        """Leave out the captured functions: a copy captures its own."""
        return {"compile_policy": self._options}

    def __setstate__(self, state: State) -> None:
        self.__init__(**state)

    def begin(
        self,
        policy: Policy,
        transform: TensorDictModuleBase | None,
        kept: Collection[NestedKey] = (),
    ) -> bool:
        """Return whether a policy can be called as a graph, and warn once of each reason if not.

        ``kept`` is as in :func:`find_tensor_policy`.
        """
        is_same = policy is self._policy and transform is self._transform and kept == self._kept
        if not is_same:
            self._functions.clear()
            self._policy, self._transform, self._failed = policy, transform, None
            self._kept = kept
        self._is_first, self._rest = True, None  # what makes the rest of the batch
        self._graph: tuple[int, Hashable] | None = (
            None  # the number of its graph, and the layout of the observations
        )
        self._last, self._is_pure = None, True  # no graph has changed what graphs depend on
        reason = self._obstacle() or self._failed
        if reason is not None:
            self._warn(reason)
        return reason is None

    def _obstacle(self) -> str | None:
        """Return why the policy cannot be called as a graph, or None."""
        policy = self._policy
        if not isinstance(policy, nn.Module) or not hasattr(policy, "in_keys"):
            return f"it is a {type(policy).__name__}, no TensorDictModule"
        if recurrent_states(policy) or IS_INIT in in_keys_of(policy):
            return "it is recurrent"
        roots = {"policy": policy, "transform": self._transform}
        self._modules = modules_of({k: x for k, x in roots.items() if isinstance(x, nn.Module)})
        return "it has a hook, or a forward of its own" if have_hooks(self._modules) else None

    def _warn(self, reason: str) -> None:
        if reason != self.reason:
            warnings.warn(f"The policy is not compiled: {reason}.", RuntimeWarning, stacklevel=3)
        self.reason = reason

    def _functions_for(
        self, observed: Entries, ndim: int, *, total: bool
    ) -> tuple[CompiledFunction, Compiled]:
        """Return a compiled function for observations of these keys, and the function."""
        self._budget.calls += 1
        kind = (*observed,), ndim, total
        if kind not in self._functions:
            function = _function_of(self._policy, self._transform, *kind, self._kept)
            is_on_cpu = all(value.is_cpu for value in observed.values())
            options = {"what": "the policy", "on_cpu": is_on_cpu, "budget": self._budget}
            options["static"] = not total  # TensorActor has no form without guards
            roots = self._policy, self._transform
            options["modules"] = [x for x in roots if isinstance(x, nn.Module)]
            self._functions[kind] = CompiledFunction(function, self._options, **options), function
        return self._functions[kind]

    def _note(self, error: NoGraphError) -> None:
        self._failed = None if error.is_refused else str(error)
        self._warn(str(error))

    def __call__(self, observed: Entries) -> tuple[Entries, Entries, Tensor | None] | None:
        """Return what transform and policy write; None where a batch begins without a graph."""
        values, is_first = (*observed.values(),), self._is_first
        if self._rest is not None:
            return self._rest(*values)
        self._is_first = False
        compiled, function = self._functions_for(observed, 1, total=False)
        try:
            if self._graph is not None:
                form, outputs = compiled.form(*self._graph, values, after=WORTH)
                if form is not None:
                    self._rest = lambda *values: form(*values)[1]
                    return self._rest(*values)
                if outputs is not None:
                    return outputs
            before = attributes_of(self._modules)
            number, outputs = compiled(*values, may_capture=True)
        except NoGraphError as error:
            self._rest = function
            self._note(error)
            return None if is_first else function(*values)
        self.reason = None
        last, self._last = self._last, number
        if last not in (None, number) or not are_same(before, attributes_of(self._modules)):
            self._is_pure = False
        layout = tuple((x.shape, x.stride(), x.dtype) for x in values)
        compiled.confirm(number, layout)
        fits = last == number and self._is_pure and compiled.is_static
        self._graph = (number, layout) if fits else None
        return outputs

    def call_with_guards(self, observed: Entries, ndim: int) -> tuple[Entries, Tensor] | None:
        """Return what the policy writes, and the sum of its numbers; None if there is no graph."""
        compiled, _ = self._functions_for(observed, ndim, total=True)
        try:
            _, (_, written, total) = compiled(*observed.values(), may_capture=True)
        except NoGraphError as error:
            self._note(error)
            return None
        self.reason = None
        return written, total


def _function_of(
    policy: Policy,
    transform: TensorDictModuleBase | None,
    keys: Sequence[NestedKey],
    ndim: int,
    total: bool,
    kept: Collection[NestedKey],
) -> Callable[..., tuple[Entries, Entries, Tensor | None]]:
    """Return the function to capture."""

    def policy_step(*values: Tensor) -> tuple[Entries, Entries, Tensor | None]:
        entries = dict(zip(keys, values, strict=True))
        # torchrl's modes are not seen in a graph while it is captured.
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            function = find_tensor_policy(policy, transform, keys, kept)
            if not isinstance(function, str):
                transformed, written = function(entries)
                if total:  # else the whole batch is scored at once
                    written = function.with_log_prob(written, checks=False)
            else:
                step = TensorDict(entries, values[0].shape[:ndim], device=values[0].device)
                transformed, written = call_on_tensordict(policy, transform, step, {})
        if not total:
            return transformed, written, None
        numbers = [x.sum() for x in written.values() if x.is_floating_point()]
        return transformed, written, sum(numbers, torch.zeros(()))

    return policy_step
