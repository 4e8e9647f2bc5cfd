"""The block that writes scheduled values where they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._claims import Place, check_unclaimed, claim
from ppokit._keys import MASK_KEY, as_key, valid_mask
from ppokit.schedules.slots import Name, slots


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
            scheduler drives the learning rate, an :class:`~ppokit.AdaptiveKLCoeff` drives the
            coefficient, no parameter group has the name, groups share a learning-rate tensor and
            only some are scheduled, or frames go backwards.
        AttributeError: the target has no such attribute, or it is None.

    Example:
        >>> from ppokit import InterpSchedule
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
        self.mask_key = as_key(mask_key)
        self.in_keys: list[NestedKey] = []
        self.out_keys: list[NestedKey] = [_out_key(name) for name in schedules]
        _check_nothing_nested(schedules)
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))
        places = self._places()
        check_unclaimed(self, places)
        self._write()
        claim(self, places)

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
            for slot in slots(name, self._targets[name]):
                slot.write(value)

    def _check_one_writer_each(self) -> None:
        writers: dict[tuple[int, object], Name] = {}
        for name, target in self._targets.items():
            for slot in slots(name, target):
                other = writers.setdefault(slot.identity, name)
                if other != name:
                    raise ValueError(
                        f"{name!r} and {other!r} drive the same parameter of "
                        f"{type(slot.owner).__name__}; the later one would undo the earlier. "
                        "Keep one of them."
                    )

    def _places(self) -> list[Place]:
        targets = self._targets.items()
        return [
            (slot.owner, slot.identity[1])
            for name, target in targets
            for slot in slots(name, target)
        ]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._write()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(frames={int(self.frames)}, schedules={self._schedules})"


def _check_nothing_nested(names: Collection[Name]) -> None:
    for name in names:
        if isinstance(name, tuple) and name[0] in names:
            raise ValueError(
                f"{name[0]!r} and {name!r} cannot be in one scheduler: in a batch, one value would "
                "lie within the other. Name the groups of both optimisers, or use two schedulers."
            )


def _out_key(name: Name) -> NestedKey:
    return as_key(("schedule", name))
