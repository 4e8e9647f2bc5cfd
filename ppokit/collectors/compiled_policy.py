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

from ppokit._compiling import CHANGES, CompiledFunction, Modules, first_line, would_capture
from ppokit._keys import as_key, recurrent_states
from ppokit.collectors.batch import IS_INIT, Entries
from ppokit.collectors.tensor_policy import check_finite, refuse, take_apart


class PolicyGraph:
    """The graphs of a policy and of the module before it, captured at the first call."""

    def __init__(self, compile_policy: bool | Mapping[str, Any]) -> None:
        self._options: Any = {} if compile_policy is True else compile_policy
        if self._options and self._options.get("dynamic"):
            raise ValueError(
                "A policy cannot be compiled with dynamic=True: of a TanhNormal, Inductor returns "
                "log-probabilities of other actions. Leave it out."
            )
        self.reason: str | None = None  #: why the policy is called without a graph
        self._policy = self._transform = None
        self._modules = Modules({})
        self._obstacle: str | None = None
        self._failed: str | None = None  # why no graph can be captured
        # by the keys and batch dimensions of the observations: compiled, and not compiled
        self._functions: dict[Any, tuple[Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the captured functions: a copy captures its own."""
        return {"compile_policy": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def can_call(self, policy: Any, transform: Any) -> bool:
        """Return whether a policy can be called as a graph, and warn once of each reason if not."""
        is_same = policy is self._policy and transform is self._transform
        if not is_same or self._obstacle is not None or not self._modules.are_unchanged():
            if not is_same:
                self._functions.clear()
            self._policy, self._transform, self._failed = policy, transform, None
            self._obstacle = self._look(policy, transform)
        return self._note(self._obstacle or self._failed)

    def _look(self, policy: Any, transform: Any) -> str | None:
        """Look at the modules, and return why they cannot be called as a graph, or None."""
        if not isinstance(policy, nn.Module) or not hasattr(policy, "in_keys"):
            return f"it is a {type(policy).__name__}, no TensorDictModule"
        if recurrent_states(policy) or IS_INIT in getattr(policy, "in_keys", ()):
            return "it is recurrent"
        roots = {"policy": policy}
        if isinstance(transform, nn.Module):
            roots["transform"] = transform
        self._modules = Modules(roots)
        return "it has a hook, or a forward of its own" if self._modules.have_hooks else None

    def _note(self, reason: str | None) -> bool:
        if reason is not None and reason != self.reason:
            warnings.warn(f"The policy is not compiled: {reason}.", RuntimeWarning, stacklevel=3)
        self.reason = reason
        return reason is None

    def __call__(
        self, observed: Entries, ndim: int, *, number: int = 0
    ) -> tuple[Entries, Entries, Tensor] | None:
        """Return what transform and policy write, and its sum; None where there is no graph.

        ``number`` counts calls since other code ran: guards are checked in the first two.
        """
        layout, values = ((*observed,), ndim), (*observed.values(),)
        if layout not in self._functions:
            plain = _graph_of(self._policy, self._transform, *layout)
            is_on_cpu = all(value.is_cpu for value in values)
            compiled = CompiledFunction(
                plain, self._options, what="the policy", on_cpu=is_on_cpu, direct=True
            )
            self._functions[layout] = compiled, plain
        compiled, plain = self._functions[layout]
        if self._failed is not None:
            return plain(*values)  # the rest of a batch
        try:
            return compiled(*values, checks=(None, True, False)[min(number, 2)])
        except Exception as error:
            self._failed = CHANGES if would_capture(error) else first_line(error)
            self._note(self._failed)
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
