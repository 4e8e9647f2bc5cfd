"""Where a scheduled value is written: a parameter group, a head's coefficient, or an attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

Name = str | tuple[str, NestedKey]


class Slot:
    """One place that holds one number: an attribute, or an entry of a mapping."""

    def __init__(self, owner: Any, container: Any, key: Any) -> None:
        self.owner, self.container, self.key = owner, container, key

    @property
    def identity(self) -> tuple[int, object]:
        """What two slots share when they are one place."""
        return id(self.container), self.key

    def write(self, value: float) -> None:
        """Put the value there: in place where a tensor is."""
        is_item = isinstance(self.container, Mapping)
        current = self.container[self.key] if is_item else getattr(self.container, self.key)
        if isinstance(current, Tensor):
            with torch.no_grad():
                current.fill_(value)
        elif is_item:
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)


class _LearningRate(Slot):
    """The learning rate of one parameter group, guarded against a second writer."""

    def write(self, value: float) -> None:
        # torch's schedulers leave this mark; they may be made after this one.
        if "initial_lr" in self.container:
            raise ValueError(
                f"Another learning-rate scheduler drives this {type(self.owner).__name__} (its "
                "parameter groups hold 'initial_lr'); the two would overwrite each other. Keep one."
            )
        super().write(value)


class _HeadCoefficient(Slot):
    """The entropy coefficient of one action head, wherever the loss keeps it at the moment."""

    @property
    def identity(self) -> tuple[int, object]:
        return id(self.owner), ("entropy_coeff", self.key)

    def write(self, value: float) -> None:
        Slot(self.owner, self.owner._entropy_coeff_map, self.key).write(value)


def slots(name: Name, target: Any) -> list[Slot]:
    """Return the places that ``name`` means on ``target``, or raise if it means none."""
    if name == "lr" or (isinstance(name, tuple) and name[0] == "lr"):
        return _learning_rates(name, target)
    if isinstance(name, tuple):
        return [_head_coefficient(name, target)]
    if getattr(target, name, None) is None:
        state = "is None: the loss was built without it" if hasattr(target, name) else "is missing"
        raise AttributeError(
            f"{type(target).__name__}.{name} {state}, so a schedule of {name!r} would have no "
            "effect. Give it a value at construction, or schedule another name."
        )
    if name == "entropy_coeff" and getattr(target, "_entropy_coeff_map", None) is not None:
        raise ValueError(
            f"{type(target).__name__} has one entropy coefficient for each head, "
            f'{list(target._entropy_coeff_map)}; schedule ("entropy_coeff", head) instead.'
        )
    return [Slot(target, target, name)]


def _learning_rates(name: Name, target: Any) -> list[Slot]:
    if not isinstance(target, torch.optim.Optimizer):
        raise TypeError(f"{name!r} needs an optimiser, got {type(target).__name__}.")
    groups = target.param_groups
    if isinstance(name, tuple):
        groups = [group for group in groups if group.get("name") == name[1]]
        if not groups:
            names = [group.get("name") for group in target.param_groups]
            raise ValueError(
                f"No parameter group is named {name[1]!r}; the groups are named {names}. Name "
                "them in the optimiser: [{'params': ..., 'name': ...}]."
            )
        _check_own_tensors(name, target, groups)
    return [_LearningRate(target, group, "lr") for group in groups]


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


def _head_coefficient(name: tuple[str, NestedKey], target: Any) -> Slot:
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
    return _HeadCoefficient(target, target, head)
