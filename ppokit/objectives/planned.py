"""A loss that knows its plan, and makes it anew when somebody has changed what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from tensordict.utils import NestedKey

from ppokit._recurrent import breaks_graphs, stored_keys
from ppokit.objectives.plan import Plan, make_plan
from ppokit.objectives.watch import WatchedLoss

_OF_THESE_MODULES = (
    "_plan",
    "_plan_version",
    "_number",
    "_compiled_call_impl",
    "_compiled_outputs",
)

_planned: WeakValueDictionary[int, PlannedLoss] = WeakValueDictionary()
_numbers = count()


class PlannedLoss(WatchedLoss):
    """``WatchedLoss`` with a plan that is current."""

    fast: bool
    _plan: Plan | None = None  # None: take torchrl's path
    _plan_version = ""  # another one for each plan
    _number: int | None = None  # under which it is planned
    _stored_keys: Sequence[NestedKey] = ()  # what recurrent networks cannot do without
    _breaks_graphs = False  # whether they stay out of graphs
    _compiled_outputs: Any = None
    _as_written = True  # whether a subclass has left alone what the fast path does otherwise

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiled_outputs is not None

    def _make_plan(self) -> Plan | None:
        if self._number is None:
            self._number = next(_numbers)
            _planned[self._number] = self
        critic = self.critic_network if self._has_critic else None
        self._stored_keys = stored_keys(self.actor_network, critic)
        self._breaks_graphs = breaks_graphs(self.actor_network) or breaks_graphs(critic)
        self._plan = make_plan(self) if self.fast and self._as_written else None
        self._plan_version = f"plan {next(_numbers)}"
        return self._plan

    def _current_plan(self) -> Plan | None:
        """Return the plan, made anew if somebody has changed the networks."""
        if torch.compiler.is_compiling():
            # A graph is good for one version: it need not look at what the plan is made of.
            _renew_plan(self._number, self._plan_version)  # pyright: ignore[reportArgumentType]
        elif self._plan is not None and not self._plan.networks.watch.are_as_found():
            return self._make_plan()
        return self._plan

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        private = name.startswith("_") or name == "training"
        if self._number is not None and not private and name not in self._all_schedulable_buffers:
            self._make_plan()

    def set_keys(self, **kwargs: Any) -> None:
        """Set the names of entries, as torchrl's losses do."""
        super().set_keys(**kwargs)
        if self._number is not None:
            self._make_plan()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is good for these very modules."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_THESE_MODULES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_plan()


@torch.compiler.assume_constant_result
def _renew_plan(number: int, version: str) -> bool:
    """Do while a graph is captured, once, what is done at each call where none is."""
    loss = _planned[number]
    plan = loss._plan
    return plan is None or plan.networks.watch.are_as_found() or loss._make_plan() is not None
