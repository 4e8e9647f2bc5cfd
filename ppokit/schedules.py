"""Schedules over frames, and the block that writes their values where they belong."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import MASK_KEY, as_key, valid_mask

Name = str | tuple[str, NestedKey]


@dataclass(frozen=True)
class _Schedule:
    points: tuple[tuple[float, float], ...]

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        object.__setattr__(self, "points", tuple((x, float(y)) for x, y in points))
        if not self.points:
            raise ValueError("A schedule needs at least one point, (0, value).")
        if self.points[0][0] != 0:
            raise ValueError(
                f"The first point is {self.points[0]}; it must be at frame 0, or the value before "
                f"it is undefined. Put (0, value) first."
            )
        for index, (frames, value) in enumerate(self.points):
            if not (math.isfinite(frames) and math.isfinite(value)):
                raise ValueError(f"Point {index}, {(frames, value)}, is not finite.")
        for index in range(1, len(self.points)):
            if self.points[index][0] <= self.points[index - 1][0]:
                raise ValueError(
                    f"Point {index}, {self.points[index]}, does not come after point {index - 1}, "
                    f"{self.points[index - 1]}; frames must strictly increase."
                )

    def __call__(self, frames: float) -> float:
        """Return the value at this number of frames."""
        if not frames >= 0:
            raise ValueError(f"frames must be 0 or more, got {frames}.")
        index = bisect.bisect_right(self.points, frames, key=lambda point: point[0]) - 1
        return self._between(index, frames)

    def _between(self, index: int, frames: float) -> float:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.points)})"


class StepSchedule(_Schedule):
    r"""Holds each value until the next point.

    .. math:: v(n) = v_i \quad \text{for } n_i \le n < n_{i+1}

    The last value is held after the end.

    Args:
        points: ``(frames, value)`` pairs, the first at frame 0, frames strictly increasing. Frames
            are environment steps, not updates.

    Raises:
        ValueError: there is no point, the first is not at 0, a number is not finite, or frames do
            not strictly increase; the message names the point.

    Example:
        >>> schedule = StepSchedule([(0, 1e-3), (1_000_000, 1e-4)])
        >>> schedule(999_999), schedule(1_000_000)
        (0.001, 0.0001)
    """

    def _between(self, index: int, frames: float) -> float:
        return self.points[index][1]


class InterpSchedule(_Schedule):
    r"""Linear between points.

    .. math:: v(n) = v_i + (v_{i+1} - v_i) \frac{n - n_i}{n_{i+1} - n_i}
        \quad \text{for } n_i \le n < n_{i+1}

    The last value is held after the end.

    Args:
        points: ``(frames, value)`` pairs, the first at frame 0, frames strictly increasing. Frames
            are environment steps, not updates.

    Raises:
        ValueError: there is no point, the first is not at 0, a number is not finite, or frames do
            not strictly increase; the message names the point.

    Example:
        >>> schedule = InterpSchedule([(0, 0.01), (2_000_000, 0.0)])
        >>> schedule(500_000), schedule(5_000_000)
        (0.0075, 0.0)
    """

    def _between(self, index: int, frames: float) -> float:
        x0, y0 = self.points[index]
        if index + 1 == len(self.points):
            return y0
        x1, y1 = self.points[index + 1]
        return y0 + (y1 - y0) * (frames - x0) / (x1 - x0)


class ParameterScheduler(TensorDictModuleBase):
    """Drives learning rates, loss coefficients and other attributes along schedules over frames.

    Args:
        schedules: ``{name: (target, schedule)}``. A name is

            - ``"lr"``: the learning rate of all groups of an optimiser;
            - ``("lr", group_name)``: of the groups whose ``"name"`` entry is this one;
            - ``("entropy_coeff", head)``: of one action head, in a loss built with a mapping;
            - the name of an attribute of the target: a loss module, a block, any object.

            A schedule is a callable from frames to a value.
        mask_key: the mask of valid frames; where the batch has it, only these are counted.

    Values are written in place: a tensor is filled, so that nothing recompiles and every value is
    in its owner's ``state_dict``. Construction applies the value at frame 0.

    The scheduler is a TensorDictModule: ``batch = scheduler(batch)`` advances by the batch's valid
    frames and writes each value to ``("schedule", name)``, expanded to the batch's shape.

    Raises:
        TypeError: a schedule cannot be called, or ``"lr"`` is asked of something that is no
            optimiser.
        ValueError: two schedules drive one parameter, one name lies within another, another
            scheduler drives the learning rate, no parameter group has the name, groups share a
            learning-rate tensor and only some are scheduled, or frames go backwards.
        AttributeError: the target has no such attribute, or it is None.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.Adam([parameter], lr=1.0)
        >>> scheduler = ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 0.1), (10, 0)]))})
        >>> scheduler.step(5)
        >>> optimizer.param_groups[0]["lr"], scheduler.values
        (0.05, {'lr': 0.05})
    """

    frames: Tensor

    def __init__(
        self,
        schedules: Mapping[Name, tuple[Any, Callable[[float], float]]],
        *,
        mask_key: NestedKey = MASK_KEY,
    ) -> None:
        super().__init__()
        self._targets: dict[Name, Any] = {}
        self._schedules: dict[Name, Callable[[float], float]] = {}
        for name, (target, schedule) in schedules.items():
            if not callable(schedule):
                raise TypeError(
                    f"The schedule of {name!r} is {schedule!r}; it must be callable with a number "
                    "of frames, like StepSchedule([(0, value)])."
                )
            self._targets[name] = target
            self._schedules[name] = schedule
        self._check_one_writer_each()
        self.mask_key = mask_key
        self.in_keys: list[NestedKey] = []
        self.out_keys: list[NestedKey] = [_out_key(name) for name in schedules]
        _check_nothing_nested(schedules)
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))
        self._write()

    @property
    def values(self) -> dict[Name, float]:
        """The value of every schedule at the current number of frames."""
        frames = int(self.frames)
        return {name: float(schedule(frames)) for name, schedule in self._schedules.items()}

    def step(self, frames: int) -> None:
        """Apply the values at ``frames``, the absolute number of frames so far."""
        if frames < self.frames:
            raise ValueError(
                f"step({frames}) goes backwards: the scheduler is at {int(self.frames)} frames. "
                "Pass the absolute number of frames so far, not those of the last batch."
            )
        self.frames.fill_(frames)
        self._write()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Advance by the valid frames of the batch and write the values into it."""
        mask = valid_mask(tensordict, self.mask_key)
        count = tensordict.numel() if mask is None else int(mask.sum())
        self.step(int(self.frames) + count)
        for name, value in self.values.items():
            entry = torch.tensor(value, device=tensordict.device)
            tensordict.set(_out_key(name), entry.expand(tensordict.batch_size))
        return tensordict

    def _write(self) -> None:
        # The places are looked up each time: optimizer.load_state_dict replaces its groups.
        for name, value in self.values.items():
            for slot in _slots(name, self._targets[name]):
                slot.write(value)

    def _check_one_writer_each(self) -> None:
        writers: dict[tuple[int, object], Name] = {}
        for name, target in self._targets.items():
            for slot in _slots(name, target):
                other = writers.setdefault(slot.identity, name)
                if other != name:
                    raise ValueError(
                        f"{name!r} and {other!r} drive the same parameter of "
                        f"{type(slot.owner).__name__}; the later one would undo the earlier. "
                        "Keep one of them."
                    )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._write()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(frames={int(self.frames)}, schedules={self._schedules})"


class _Slot:
    """One place that holds one number: an attribute, or an entry of a mapping."""

    def __init__(self, owner: Any, container: Any, key: Any) -> None:
        self.owner, self.container, self.key = owner, container, key

    @property
    def identity(self) -> tuple[int, object]:
        return id(self.container), self.key

    def write(self, value: float) -> None:
        is_item = isinstance(self.container, Mapping)
        current = self.container[self.key] if is_item else getattr(self.container, self.key)
        if isinstance(current, Tensor):
            with torch.no_grad():
                current.fill_(value)
        elif is_item:
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)


class _LearningRate(_Slot):
    """The learning rate of one parameter group, guarded against a second writer."""

    def write(self, value: float) -> None:
        # torch's schedulers leave this mark; they may be made after this one.
        if "initial_lr" in self.container:
            raise ValueError(
                f"Another learning-rate scheduler drives this {type(self.owner).__name__} (its "
                "parameter groups hold 'initial_lr'); the two would overwrite each other. Keep one."
            )
        super().write(value)


class _HeadCoefficient(_Slot):
    """The entropy coefficient of one action head, wherever the loss keeps it at the moment."""

    @property
    def identity(self) -> tuple[int, object]:
        return id(self.owner), ("entropy_coeff", self.key)

    def write(self, value: float) -> None:
        _Slot(self.owner, self.owner._entropy_coeff_map, self.key).write(value)


def _slots(name: Name, target: Any) -> list[_Slot]:
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
    return [_Slot(target, target, name)]


def _learning_rates(name: Name, target: Any) -> list[_Slot]:
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


def _head_coefficient(name: tuple[str, NestedKey], target: Any) -> _Slot:
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


def _check_nothing_nested(names: Collection[Name]) -> None:
    for name in names:
        if isinstance(name, tuple) and name[0] in names:
            raise ValueError(
                f"{name[0]!r} and {name!r} cannot be in one scheduler: in a batch, one value would "
                "lie within the other. Name the groups of both optimisers, or use two schedulers."
            )


def _out_key(name: Name) -> NestedKey:
    return as_key(("schedule", name))
