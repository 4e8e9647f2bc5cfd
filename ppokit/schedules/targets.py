"""Where a scheduled value is written: a parameter group, a head's coefficient, or an attribute."""

from __future__ import annotations

import math
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._state import WholeState

Name = str | tuple[str, NestedKey]


@dataclass(frozen=True)
class Location:
    """An attribute, or an entry of a mapping, that holds a number."""

    owner: Any  #: the target that it belongs to
    container: Any
    key: Any
    claim: Hashable  #: its name within the owner, whichever object holds it at the moment
    name_in_state: str  #: its name in the owner's ``state_dict``

    @property
    def identity(self) -> Hashable:
        """What two locations share when they are one number."""
        current = self.read()
        # A property may make a new tensor for each caller, whose id is used again.
        if isinstance(current, Tensor) and current is self.read():
            return id(current)
        return id(self.container), self.key

    def read(self) -> Any:
        """Return the number, or the tensor that holds it."""
        if isinstance(self.container, MutableMapping):
            return self.container[self.key]
        return getattr(self.container, self.key)

    def write(self, value: float) -> None:
        """Write the number, into the tensor if there is one."""
        current = self.read()
        if isinstance(current, Tensor):
            with torch.no_grad():
                current.fill_(value)
        elif isinstance(self.container, MutableMapping):
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)

    def check(self, name: Name, value: float) -> None:
        """Raise a ValueError where the value is not finite, or the owner would refuse it."""
        if not math.isfinite(value) or (self.key == "lr" and value < 0):
            raise ValueError(
                f"The schedule of {name!r} gives {value}; {type(self.owner).__name__} needs a "
                "finite number there, and a learning rate is 0 or more."
            )
        if isinstance(self.owner, WholeState):
            self.owner.check_state({self.name_in_state: torch.tensor(value)})


def locations(name: Name, target: Any) -> list[Location]:
    """Return the locations that ``name`` means on ``target``, or raise if there is none."""
    if name == "lr" or (isinstance(name, tuple) and name[0] == "lr"):
        result = _learning_rates(name, target)
    elif isinstance(name, tuple):
        result = [_head_coefficient(name, target)]
    else:
        _check_has_effect(name, target)
        result = [Location(target, target, name, name, name)]
    for location in result:
        _check_holds_any_number(name, location)
    return result


def _learning_rates(name: Name, target: Any) -> list[Location]:
    if not isinstance(target, torch.optim.Optimizer):
        raise TypeError(f"{name!r} needs an optimiser, got {type(target).__name__}.")
    groups = list(enumerate(target.param_groups))
    if isinstance(name, tuple):
        groups = [(index, group) for index, group in groups if group.get("name") == name[1]]
        if not groups:
            names = [group.get("name") for group in target.param_groups]
            raise ValueError(
                f"No parameter group is named {name[1]!r}; the groups are named {names}. Name "
                "them in the optimiser: [{'params': ..., 'name': ...}]."
            )
        _check_own_tensors(name, target, [group for _, group in groups])
    # torch's schedulers leave this mark; they may be made after ours.
    if any("initial_lr" in group for _, group in groups):
        raise ValueError(
            f"Another learning-rate scheduler drives this {type(target).__name__} (its parameter "
            "groups hold 'initial_lr'); the two would overwrite each other. Keep one."
        )
    return [Location(target, group, "lr", ("lr", index), "lr") for index, group in groups]


def _check_own_tensors(name: Name, optimizer: torch.optim.Optimizer, groups: list[Any]) -> None:
    # An optimiser built with lr=tensor hands one and the same tensor to every group.
    driven = {id(group["lr"]) for group in groups if isinstance(group["lr"], Tensor)}
    others = [group for group in optimizer.param_groups if all(group is not g for g in groups)]
    sharing = [group.get("name") for group in others if id(group["lr"]) in driven]
    if sharing:
        raise ValueError(
            f"{name!r} and the groups {sharing} share one learning-rate tensor, so one schedule "
            "would drive them all. Give each group its own: "
            "[{'params': ..., 'name': ..., 'lr': torch.tensor(...)}]."
        )


def _head_coefficient(name: tuple[str, NestedKey], target: Any) -> Location:
    attribute, head = name
    heads = getattr(target, "_entropy_coeff_map", None)
    if attribute != "entropy_coeff" or heads is None:
        raise AttributeError(
            f"{type(target).__name__} has no coefficient {name!r}. Names of two parts are "
            '("lr", group_name), and ("entropy_coeff", head) in a loss built with '
            "entropy_coeff={head: value}."
        )
    if head not in heads:
        raise AttributeError(f"{name!r}: the heads of this loss are {list(heads)}.")
    return Location(target, heads, head, ("entropy_coeff", head), "head_entropy_coeff")


def _check_has_effect(name: str, target: Any) -> None:
    kind = type(target).__name__
    absent = "is missing"
    if hasattr(target, name):
        absent = "is None: the loss was built without it" if getattr(target, name) is None else ""
    # Built without the term, torchrl's losses keep a coefficient that nothing reads.
    for term, coefficient in (("_has_critic", "critic_coeff"), ("entropy_bonus", "entropy_coeff")):
        if name == coefficient and getattr(target, term, True) is False:
            absent = "is of no use: the loss was built without the term"
    if absent:
        # What of a loss can be scheduled.
        others = sorted({*getattr(target, "_all_schedulable_buffers", ())} - {name})
        others = [other for other in others if getattr(target, other, None) is not None]
        has = f" It has {', '.join(others)}." if others else ""
        raise AttributeError(
            f"{kind}.{name} {absent}, so a schedule of {name!r} would have no effect. Give it a "
            f"value at construction, or schedule another name.{has}"
        )
    heads = getattr(target, "_entropy_coeff_map", None)
    if heads is not None and name in ("entropy_coeff", "head_entropy_coeff"):
        raise ValueError(
            f"{kind} has one entropy coefficient for each head, {list(heads)}; schedule "
            '("entropy_coeff", head) instead.'
        )


def _check_holds_any_number(name: Name, location: Location) -> None:
    value, kind = location.read(), type(location.owner).__name__
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(
                f"{name!r} of this {kind} is a tensor of {value.dtype}, which would cut each value "
                "to a whole number. Build it with a float, such as 1.0 for 1."
            )
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name!r} of this {kind} is a {type(value).__name__}, and a schedule writes numbers."
        )
