"""Schedules over frames, and what writes their values into optimizers, losses and other objects."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import MASK_KEY, as_key, check_writable, network_of, valid_mask
from ppokit._checks import Checked
from ppokit._state import WholeState, refuse_torch_schedulers

if TYPE_CHECKING:
    from torchrl.trainers import Trainer

Name = str | tuple[str, NestedKey]


@dataclass(frozen=True)
class _Schedule:
    points: tuple[tuple[float, float], ...]

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        try:
            pairs = tuple((x, float(y)) for x, y in points)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The points are {points!r}. They must be pairs: [(frames, value), ...]."
            ) from error
        object.__setattr__(self, "points", pairs)
        if not self.points or self.points[0][0] != 0:
            raise ValueError(
                f"The points are {list(self.points)}. The first point must be at frame 0: put "
                "(0, value) first."
            )
        for index, (frames, value) in enumerate(self.points):
            if index and not frames > self.points[index - 1][0]:
                raise ValueError(
                    f"Point {index}, {(frames, value)}, does not come after point {index - 1}, "
                    f"{self.points[index - 1]}; frames must strictly increase."
                )

    def _index(self, frames: float) -> int:
        """Return the index of the last point at or before ``frames``."""
        if not frames >= 0:
            raise ValueError(f"frames must be 0 or more, got {frames}.")
        return bisect.bisect_right(self.points, frames, key=lambda point: point[0]) - 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.points)})"


class StepSchedule(_Schedule):
    r"""Hold each value until the next point.

    .. math:: v(n) = v_i \quad \text{for } n_i \le n < n_{i+1}

    The last value is held after the end. A single point gives a constant.

    Args:
        points: ``(frames, value)`` pairs, the first at frame 0, frames strictly increasing. Frames
            are environment steps, not updates.

    Raises:
        ValueError: there is no point at frame 0, or frames do not strictly increase; the message
            names the point.

    Example:
        >>> from ppokit import StepSchedule
        >>> schedule = StepSchedule([(0, 1e-3), (1_000_000, 1e-4)])
        >>> schedule(999_999), schedule(1_000_000)
        (0.001, 0.0001)
    """

    def __call__(self, frames: float) -> float:
        """Return the value at this number of frames."""
        return self.points[self._index(frames)][1]


class InterpSchedule(_Schedule):
    r"""Interpolate linearly between points.

    .. math:: v(n) = v_i + (v_{i+1} - v_i) \frac{n - n_i}{n_{i+1} - n_i}
        \quad \text{for } n_i \le n < n_{i+1}

    The last value is held after the end. A linear warm-up has three points.

    Args:
        points: ``(frames, value)`` pairs, the first at frame 0, frames strictly increasing. Frames
            are environment steps, not updates.

    Raises:
        ValueError: there is no point at frame 0, or frames do not strictly increase; the message
            names the point.

    Example:
        >>> from ppokit import InterpSchedule
        >>> schedule = InterpSchedule([(0, 0.01), (2_000_000, 0.0)])
        >>> schedule(500_000), schedule(5_000_000)
        (0.0075, 0.0)
    """

    def __call__(self, frames: float) -> float:
        """Return the value at this number of frames."""
        index = self._index(frames)
        x0, y0 = self.points[index]
        if index + 1 == len(self.points):
            return y0
        x1, y1 = self.points[index + 1]
        return y0 + (y1 - y0) * (frames - x0) / (x1 - x0)


class ParameterScheduler(WholeState, TensorDictModuleBase):
    """Drive learning rates, loss coefficients and other attributes along schedules over frames.

    Args:
        schedules: ``{name: (target, schedule)}``. A name is

            - ``"lr"``: the learning rate of all groups of an optimizer;
            - ``("lr", group_name)``: of the groups whose ``"name"`` entry is this one;
            - ``("entropy_coeff", head)``: of one action head, in a loss built with a mapping;
            - the name of an attribute of the target: a loss module, a block, any object.

            A schedule is a callable from frames to a value.
        mask_key: the mask of valid frames; if the batch has it, only these are counted.

    Values are written in place: a tensor is filled, so that nothing recompiles and every value is
    in its owner's ``state_dict``. Construction applies the value at frame 0.

    The scheduler is a TensorDictModule: ``batch = scheduler(batch)`` advances by the batch's valid
    frames and writes each value to ``("schedule", name)``, expanded to the batch's shape. In
    torchrl's trainers, :meth:`register` calls it.

    Raises:
        TypeError: a schedule has no target or cannot be called, the target of ``"lr"`` is no
            optimizer, or the scheduled value is an integer tensor or no number.
        ValueError: a scheduler of torch drives the learning rates, one name is a part of another,
            no parameter group has the name, or a schedule gives a value that is not finite, a
            negative learning rate, or one that the target's constructor rejects. From :meth:`step`:
            frames go backwards.
        AttributeError: the target has no such attribute, or it is None, or belongs to a term that
            the loss was built without.

    Example:
        >>> import torch
        >>> from ppokit import InterpSchedule, ParameterScheduler
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
        for name, pair in schedules.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
                raise TypeError(
                    f"{name!r} has {pair!r}; it must have a target and a callable schedule. Write "
                    '{"lr": (optimizer, schedule)}.'
                )
            if isinstance(name, tuple) and name[0] in schedules:
                raise ValueError(
                    f"{name[0]!r} and {name!r} cannot be in one scheduler: in a batch, one value "
                    "would lie within the other. Name the parameter groups, or use two schedulers."
                )
        self._targets = {name: target for name, (target, _) in schedules.items()}
        self._schedules = {name: schedule for name, (_, schedule) in schedules.items()}
        self.mask_key = as_key(mask_key)
        self.in_keys: list[NestedKey] = []
        self.out_keys: list[NestedKey] = [as_key(("schedule", name)) for name in schedules]
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))
        for name, location in self._locations():
            schedule = self._schedules[name]
            for _, value in schedule.points if isinstance(schedule, _Schedule) else ():
                location.check(name, value)
        self._write(0)

    def drives(self, target: object, name: str) -> bool:
        """Return whether a schedule writes this attribute of an object, or an optimizer's "lr"."""
        return any(x.owner is target and x.key == name for _, x in self._locations())

    @property
    def values(self) -> dict[Name, float]:
        """The value of every schedule at the current number of frames."""
        return self._values_at(int(self.frames))

    def step(self, frames: int) -> None:
        """Apply the values at ``frames``, the absolute number of frames so far."""
        if not math.isfinite(frames):
            raise ValueError(f"The frames so far are a whole number, got {frames}.")
        if frames < self.frames:
            raise ValueError(
                f"step({frames}) goes backwards: the scheduler is at {int(self.frames)} frames. "
                "Pass the absolute number of frames so far, not those of the last batch."
            )
        self._write(int(frames))
        self.frames.fill_(int(frames))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Advance by the valid frames of the batch and write the values into it."""
        check_writable(tensordict, self.out_keys, who="ParameterScheduler")
        mask = valid_mask(tensordict, self.mask_key)
        count = tensordict.batch_size.numel() if mask is None else int(mask.sum())
        self.step(int(self.frames) + count)
        for key, value in zip(self.out_keys, self.values.values(), strict=True):
            entry = torch.tensor(value, device=tensordict.device)
            tensordict.set(key, entry.expand(tensordict.batch_size))
        return tensordict

    def register(self, trainer: Trainer, name: str = "parameter_scheduler") -> None:
        """Follow the frames of a torchrl ``Trainer``, such as ``PPOTrainer``, and save with it.

        After the update of each batch the values are those at ``trainer.collected_frames``, so the
        first batch is updated with the values at 0. These are the frames that the trainer's
        ``total_frames`` counts: ``frame_skip`` steps of the environment itself for each valid frame
        of a batch (torchrl leaves ``frame_skip`` out if it collects asynchronously). When training
        starts or is resumed, the scheduler steps to the frames of the trainer.

        Raises:
            RuntimeError: the trainer updates in another process (``learner_backend="ray"``), or
                ``name`` is taken.
            ValueError: when training starts, the scheduler is at more frames than the trainer.
        """
        if getattr(trainer, "learner_backend", "local") == "ray":
            raise RuntimeError(
                "The trainer updates in another process (learner_backend='ray'): scheduled values "
                "would not reach its optimizer and loss."
            )
        trainer.register_module(name, self)
        for stage in ("setup", "post_steps"):
            trainer.register_op(stage, lambda: self.step(trainer.collected_frames))

    def _values_at(self, frames: int) -> dict[Name, float]:
        return {name: float(schedule(frames)) for name, schedule in self._schedules.items()}

    def _locations(self) -> list[tuple[Name, _Location]]:
        # Looked up each time: optimizer.load_state_dict replaces its groups.
        targets = self._targets.items()
        return [(name, where) for name, target in targets for where in _find(name, target)]

    def _write(self, frames: int) -> None:
        values, locations = self._values_at(frames), self._locations()
        for name, location in locations:
            location.check(name, values[name])
        before = [location.read() for _, location in locations]
        try:
            for name, location in locations:
                location.write(values[name])
        except Exception:  # of a setter of the user's
            for (_, location), value in zip(locations, before, strict=True):
                with suppress(Exception):
                    location.write(value)
            raise

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not any(args[-3:]):  # no missing or unexpected entries, and no errors
            self._write(int(self.frames))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(frames={int(self.frames)}, schedules={self._schedules})"


class _Location(NamedTuple):
    """An attribute, or an entry of a mapping, that holds a number."""

    owner: object  #: the target that it belongs to
    container: Any
    key: Any
    name_in_state: str  #: its name in the owner's ``state_dict``

    def _current(self) -> Any:
        is_entry = isinstance(self.container, MutableMapping)
        return self.container[self.key] if is_entry else getattr(self.container, self.key)

    def read(self) -> Any:
        """Return the number, or a copy of the tensor that holds it."""
        current = self._current()
        return current.detach().clone() if isinstance(current, Tensor) else current

    def write(self, value: float) -> None:
        """Write the number, into the tensor if there is one."""
        if isinstance(current := self._current(), Tensor):
            with torch.no_grad():
                current.fill_(value)
        elif isinstance(self.container, MutableMapping):
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)

    def check(self, name: Name, value: float) -> None:
        """Raise a ValueError if the value is not finite, or the owner rejects it."""
        if not math.isfinite(value) or (self.key == "lr" and value < 0):
            raise ValueError(
                f"The schedule of {name!r} gives {value}; {type(self.owner).__name__} needs a "
                "finite number there, and a learning rate is 0 or more."
            )
        # also of a module whose attributes the owner passes on
        kinds = type(self.owner), type(network_of(self.owner, "module"))
        declared = [getattr(x, self.key, None) for x in kinds if type(self.key) is str]
        checks = [x for x in declared if isinstance(x, Checked)]
        if checks:
            checks[0].check(value, self.key)
        elif isinstance(self.owner, WholeState):
            self.owner.check_state({self.name_in_state: torch.tensor(value)})


def _find(name: Name, target: Any) -> list[_Location]:
    """Return the locations that ``name`` means on ``target``, or raise if there is none."""
    if name == "lr" or (isinstance(name, tuple) and name[0] == "lr"):
        if not isinstance(target, torch.optim.Optimizer):
            raise TypeError(f"{name!r} needs an optimizer, got {type(target).__name__}.")
        groups = target.param_groups
        if isinstance(name, tuple):
            groups = [group for group in groups if group.get("name") == name[1]]
            if not groups:
                names = [group.get("name") for group in target.param_groups]
                raise ValueError(
                    f"No parameter group is named {name[1]!r}; the groups are named {names}. Name "
                    "them in the optimizer: [{'params': ..., 'name': ...}]."
                )
        refuse_torch_schedulers(target)
        return [_Location(target, group, "lr", "lr") for group in groups]
    heads = getattr(target, "_entropy_coeff_map", None)
    if isinstance(name, tuple) and name[0] == "entropy_coeff" and name[1] in (heads or ()):
        return [_Location(target, heads, name[1], "head_entropy_coeff")]
    if isinstance(name, tuple) or (name == "entropy_coeff" and heads is not None):
        raise AttributeError(
            f"{type(target).__name__} has no coefficient {name!r}; it has one entropy coefficient "
            f"for each of the heads {list(heads or ())}. Names of two parts are "
            '("lr", group_name), and ("entropy_coeff", head) in a loss built with '
            "entropy_coeff={head: value}."
        )
    kind, value = type(target).__name__, getattr(target, name, None)
    # torchrl's losses keep the coefficient of a term that they were built without.
    flag = {"critic_coeff": "_has_critic", "entropy_coeff": "entropy_bonus"}.get(name)
    if value is None or (flag is not None and getattr(target, flag, True) is False):
        raise AttributeError(
            f"{kind}.{name} is missing or None, or the loss was built without the term, so a "
            f"schedule of {name!r} would have no effect. Set it at construction."
        )
    if isinstance(value, Tensor) and not value.is_floating_point():
        raise TypeError(
            f"{name!r} of this {kind} is a tensor of {value.dtype}, which would round each value. "
            "Build it with a float, such as 1.0 for 1."
        )
    if not isinstance(value, Tensor | Real):
        raise TypeError(f"{kind}.{name} is {value!r}; a schedule can only drive a number.")
    while name not in dir(target) and (inner := network_of(target, "module")) is not None:
        target = inner  # whose attributes a TensorDictModule passes on
    return [_Location(target, target, name, name)]
