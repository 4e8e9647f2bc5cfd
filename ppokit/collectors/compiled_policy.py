"""A policy as one graph of ``torch.compile``: networks, draw and log-probability."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from ppokit._compiling import (
    Budget,
    CompiledFunction,
    NoGraphError,
    are_same,
    attributes_of,
    check_options,
    have_hooks,
    modules_of,
)
from ppokit._keys import as_key, recurrent_states
from ppokit.collectors.batch import IS_INIT, Entries
from ppokit.collectors.tensor_policy import check_finite, refuse, take_apart

WORTH = 300  # calls of a graph within batches, after which it is captured without guards


class PolicyGraph:
    """The graphs of a policy and of the module before it, captured at the first call."""

    def __init__(self, compile_policy: bool | Mapping[str, Any]) -> None:
        self._options: Any = {} if compile_policy is True else compile_policy
        if self._options and self._options.get("dynamic"):
            raise ValueError(
                "A policy cannot be compiled with dynamic=True: of a TanhNormal, Inductor returns "
                "log-probabilities of other actions. Leave it out."
            )
        check_options(self._options or {}, "compile_policy")
        self.reason: str | None = None  #: why the policy is called without a graph
        self._policy = self._transform = None
        self._modules: dict[str, nn.Module] = {}
        self._failed: str | None = None  # why no graph can be captured
        # by the keys and batch dimensions of the observations: compiled, and not compiled
        self._functions: dict[Any, tuple[CompiledFunction, Any]] = {}
        self._number: int | None = None  # of the graph of this batch, if it may be left unguarded
        self._budget = Budget()
        self._is_plain = False  # until the next batch
        self._is_refused = False  # the last capture, by the budget

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the captured functions: a copy captures its own."""
        return {"compile_policy": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def can_call(self, policy: Any, transform: Any) -> bool:
        """Return whether a policy can be called as a graph, and warn once of each reason if not."""
        if policy is not self._policy or transform is not self._transform:
            self._functions.clear()
            self._policy, self._transform, self._failed = policy, transform, None
        reason = self._obstacle(policy, transform) or self._failed
        return (reason is None and self._is_refused) or self._note(reason)

    def _obstacle(self, policy: Any, transform: Any) -> str | None:
        """Return why a policy cannot be called as a graph, or None."""
        if not isinstance(policy, nn.Module) or not hasattr(policy, "in_keys"):
            return f"it is a {type(policy).__name__}, no TensorDictModule"
        if recurrent_states(policy) or IS_INIT in getattr(policy, "in_keys", ()):
            return "it is recurrent"
        roots = {"policy": policy}
        if isinstance(transform, nn.Module):
            roots["transform"] = transform
        self._modules = modules_of(roots)
        return "it has a hook, or a forward of its own" if have_hooks(self._modules) else None

    def _note(self, reason: str | None) -> bool:
        if reason is not None and reason != self.reason:
            warnings.warn(f"The policy is not compiled: {reason}.", RuntimeWarning, stacklevel=3)
        self.reason = reason
        return reason is None

    def __call__(
        self, observed: Entries, ndim: int, *, number: int = 0
    ) -> tuple[Entries, Entries, Tensor] | None:
        """Return what transform and policy write, and its sum; None where there is no graph.

        ``number`` counts calls since other code ran: guards are checked in the first.
        """
        layout, values = ((*observed,), ndim), (*observed.values(),)
        if layout not in self._functions:
            plain = _graph_of(self._policy, self._transform, *layout)
            is_on_cpu = all(value.is_cpu for value in values)
            options: Any = {"what": "the policy", "on_cpu": is_on_cpu, "budget": self._budget}
            compiled = CompiledFunction(plain, self._options, **options)
            self._functions[layout] = compiled, plain
        self._budget.calls += 1
        compiled, plain = self._functions[layout]
        if number and self._is_plain:
            return plain(*values)  # the rest of a batch
        self._is_plain = False
        try:
            if number and self._number is not None:
                shapes = tuple((x.shape, x.stride(), x.dtype) for x in values)
                form = compiled.form(
                    self._number, shapes, values, *self._modules.values(), after=WORTH
                )
                found = form(*values) if form else compiled(*values, may_capture=True)
                return found[1]
            before = attributes_of(self._modules)
            graph, outputs = compiled(*values, may_capture=True)
            is_pure = are_same(before, attributes_of(self._modules))
            self._number, self._is_refused, self.reason = graph if is_pure else None, False, None
            return outputs
        except NoGraphError as error:
            self._is_plain, self._is_refused = True, error.is_refused
            self._failed = None if error.is_refused else str(error)
            self._note(str(error))
            return None if number == 0 else plain(*values)


def _graph_of(
    policy: Any, transform: Any, keys: Sequence[NestedKey], ndim: int
) -> Callable[..., tuple[Entries, Entries, Tensor]]:
    """Return the function to capture."""
    of_transform = [] if transform is None else [as_key(key) for key in transform.out_keys]

    def policy_step(*values: Tensor) -> tuple[Entries, Entries, Tensor]:
        entries: Any = dict(zip(keys, values, strict=True))
        # torchrl's modes are not seen in a graph while it is captured.
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            parts = take_apart(policy, transform)
            if not isinstance(parts, str) and all(key in entries for key in parts.reads):
                transformed, written = parts.write(entries)
                written = parts.score(written, checks=False)
            else:
                batch_size, device = values[0].shape[:ndim], values[0].device
                tensordict: Any = TensorDict(entries, batch_size, device=device)
                if transform is not None:
                    tensordict = transform(tensordict)
                transformed = {key: tensordict.get(key) for key in of_transform}
                found = policy(tensordict).items(True, True)
                known = entries | transformed
                written = {key: value for key, value in found if key not in known}
        numbers = [x.sum() for x in written.values() if x.is_floating_point()]
        return transformed, written, sum(numbers, torch.zeros(()))

    return policy_step


def check_written(policy: Any, written: Entries) -> None:
    """Raise a ValueError where parameters of the distribution are not finite, or others NaN."""
    head = policy[-1] if isinstance(policy, ProbabilisticTensorDictSequential) else None
    numbers = {key: value for key, value in written.items() if value.is_floating_point()}
    parameters = [key for key in map(as_key, getattr(head, "in_keys", ())) if key in numbers]
    check_finite(parameters, [numbers[key] for key in parameters])
    for key, value in numbers.items():
        refuse(key, value.isnan())
