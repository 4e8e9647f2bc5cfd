"""Writes the values of schedules into optimizers, losses and other objects, and plots them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import MASK_KEY, as_key, key_parts, refuse_locked, valid_mask
from ppokit._state import WholeState, claim
from ppokit.schedules.points import InterpSchedule, StepSchedule
from ppokit.schedules.targets import Location, Name, locations

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torchrl.trainers import Trainer


class ParameterScheduler(WholeState, TensorDictModuleBase):
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
    frames and writes each value to ``("schedule", name)``, expanded to the batch's shape. In
    torchrl's trainers, :meth:`register` does it all. :meth:`plot` shows what is going to happen.

    Raises:
        TypeError: a schedule has no target or cannot be called, the target of ``"lr"`` is no
            optimiser, or what is driven is no number, or an integer tensor.
        ValueError: two schedules drive one parameter, one name lies within another, another
            scheduler or an :class:`~ppokit.AdaptiveKLCoeff` drives the value, no parameter group
            has the name, groups share a learning-rate tensor and only some are scheduled, or a
            schedule leads to a value that is not finite, a negative learning rate, or one that a
            block's constructor would refuse. From :meth:`step`: frames go backwards.
        AttributeError: the target has no such attribute, or it is None, or belongs to a term that
            the loss was built without.

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
        for name, pair in schedules.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                fix = 'Write {"lr": (optimizer, schedule)}: the object that is driven comes first.'
                raise TypeError(f"{name!r} has a {type(pair).__name__} and no target. {fix}")
        self._targets = {name: target for name, (target, _) in schedules.items()}
        self._schedules = {name: schedule for name, (_, schedule) in schedules.items()}
        self._check_schedules()
        self.mask_key = as_key(mask_key)
        self.in_keys: list[NestedKey] = []
        self.out_keys: list[NestedKey] = [_out_key(name) for name in schedules]
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))
        claim(self, [(location.owner, location.claim) for _, location in self._locations()])
        self._write(0)

    @property
    def values(self) -> dict[Name, float]:
        """The value of every schedule at the current number of frames."""
        return self._values_at(int(self.frames))

    def step(self, frames: int) -> None:
        """Apply the values at ``frames``, the absolute number of frames so far."""
        if not float(frames).is_integer():
            raise ValueError(f"step({frames}): frames are environment steps, a whole number.")
        if frames < self.frames:
            raise ValueError(
                f"step({frames}) goes backwards: the scheduler is at {int(self.frames)} frames. "
                "Pass the absolute number of frames so far, not those of the last batch."
            )
        self._write(int(frames))
        self.frames.fill_(int(frames))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Advance by the valid frames of the batch and write the values into it."""
        refuse_locked(tensordict, who="ParameterScheduler")
        mask = valid_mask(tensordict, self.mask_key)
        count = tensordict.batch_size.numel() if mask is None else int(mask.sum())
        self.step(int(self.frames) + count)
        for name, value in self.values.items():
            entry = torch.tensor(value, device=tensordict.device)
            tensordict.set(_out_key(name), entry.expand(tensordict.batch_size))
        return tensordict

    def register(self, trainer: Trainer, name: str = "parameter_scheduler") -> None:
        """Follow the frames of a torchrl ``Trainer``, such as ``PPOTrainer``, and save with it.

        After the update of each batch the values are those at ``trainer.collected_frames``, so the
        first batch is updated with the values at 0. These are the frames that the trainer's
        ``total_frames`` counts: ``frame_skip`` steps of the environment itself for each valid frame
        of a batch (torchrl leaves ``frame_skip`` out where it collects asynchronously). When
        training starts, or is taken up again, the scheduler goes to where the trainer is.

        Args:
            trainer: the trainer whose frames count.
            name: name of the scheduler among the trainer's modules.

        Raises:
            RuntimeError: the trainer updates in another process (``learner_backend="ray"``), or
                ``name`` is taken.
            ValueError: when training starts, the scheduler is at more frames than the trainer.

        Example:
            >>> from torch import nn, optim
            >>> from torchrl.envs import GymEnv
            >>> from torchrl.collectors import Collector
            >>> from torchrl.trainers import Trainer
            >>> from ppokit import InterpSchedule
            >>> optimizer = optim.Adam([nn.Parameter(torch.zeros(1))], lr=1.0)
            >>> env = GymEnv("CartPole-v1")
            >>> trainer = Trainer(
            ...     collector=Collector(env, None, frames_per_batch=50, total_frames=200),
            ...     total_frames=200, frame_skip=1, optim_steps_per_batch=0, progress_bar=False,
            ...     loss_module=nn.Identity())
            >>> schedule = InterpSchedule.linear(1.0, 0.0, frames=200)
            >>> ParameterScheduler({"lr": (optimizer, schedule)}).register(trainer)
            >>> rate = lambda: print(trainer.collected_frames, optimizer.param_groups[0]["lr"])
            >>> trainer.register_op("pre_optim_steps", rate)
            >>> trainer.train()
            50 1.0
            100 0.75
            150 0.5
            200 0.25
        """
        if getattr(trainer, "learner_backend", "local") == "ray":
            raise RuntimeError(
                "The trainer updates in another process (learner_backend='ray'): values that are "
                "scheduled here would not reach the optimiser and the loss over there."
            )
        trainer.register_module(name, self)
        followed = ref(trainer)  # the trainer holds the hook

        def parameter_scheduler() -> None:
            trainer = followed()
            assert trainer is not None
            self.step(trainer.collected_frames)

        for stage in ("setup", "post_steps"):
            trainer.register_op(stage, parameter_scheduler)

    def plot(self, total_frames: int) -> Figure:
        """Draw what every schedule does in a run, one panel each, and where the scheduler is now.

        Args:
            total_frames: length of the run, in environment steps. It is drawn further if the
                scheduler is further.

        Returns:
            A matplotlib figure, made with pyplot.

        Raises:
            ImportError: matplotlib is not installed; it comes with ``ppokit[plot]``.
            ValueError: ``total_frames`` is not positive.

        Example:
            >>> import matplotlib
            >>> matplotlib.use("Agg")  # no window
            >>> from ppokit import InterpSchedule
            >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
            >>> schedule = InterpSchedule.cosine(3e-4, 0.0, frames=1_000_000)
            >>> figure = ParameterScheduler({"lr": (optimizer, schedule)}).plot(1_000_000)
            >>> figure.axes[0].get_title()
            'lr (Adam)'
        """
        titles = {
            f"{', '.join(key_parts(name))} ({type(self._targets[name]).__name__})": schedule
            for name, schedule in self._schedules.items()
        }
        return draw(titles, total_frames=total_frames, now=int(self.frames))

    def _values_at(self, frames: int) -> dict[Name, float]:
        return {name: float(schedule(frames)) for name, schedule in self._schedules.items()}

    def _locations(self) -> list[tuple[Name, Location]]:
        # Looked up each time: optimizer.load_state_dict replaces its groups.
        targets = self._targets.items()
        return [(name, where) for name, target in targets for where in locations(name, target)]

    def _write(self, frames: int) -> None:
        values, all_locations = self._values_at(frames), self._locations()
        for name, location in all_locations:
            location.check(name, values[name])
        for name, location in all_locations:
            location.write(values[name])

    def _check_schedules(self) -> None:
        for name, schedule in self._schedules.items():
            if not callable(schedule):
                raise TypeError(
                    f"The schedule of {name!r} is {schedule!r}; it must be callable with a number "
                    "of frames, like StepSchedule([(0, value)])."
                )
        writers: dict[Hashable, Name] = {}
        for name, location in self._locations():
            other = writers.setdefault(location.identity, name)
            if other != name:
                raise ValueError(
                    f"{name!r} and {other!r} drive the same parameter of "
                    f"{type(location.owner).__name__}; the later one would undo the earlier. "
                    "Keep one of them."
                )
            for _, value in getattr(self._schedules[name], "points", ()):
                location.check(name, value)
            if isinstance(name, tuple) and name[0] in self._schedules:
                raise ValueError(
                    f"{name[0]!r} and {name!r} cannot be in one scheduler: in a batch, one value "
                    "would lie within the other. Name the groups of both optimisers, or use two "
                    "schedulers."
                )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError where the number of frames is none."""
        frames = state.get("frames")
        if frames is not None and frames.numel() == 1 and not (frames >= 0 and frames % 1 == 0):
            raise ValueError(f"'frames' is {frames.item()}; frames are a whole number from 0 on.")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not any(args[-3:]):  # missing or unexpected entries, errors: the state is refused
            self._write(int(self.frames))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(frames={int(self.frames)}, schedules={self._schedules})"


def _out_key(name: Name) -> NestedKey:
    return as_key(("schedule", name))


COLUMNS = 3
SAMPLES = 1_000  # of a callable without points


def draw(
    schedules: Mapping[str, Callable[[float], float]], *, total_frames: float, now: int
) -> Figure:
    """Return a figure with a panel for each schedule, from 0 to the end, with a mark at ``now``."""
    if not 0 < total_frames < math.inf:
        raise ValueError(f"total_frames must be positive and finite, got {total_frames}.")
    try:
        from matplotlib import pyplot as plt
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ImportError(
            "ParameterScheduler.plot needs matplotlib: pip install ppokit[plot]"
        ) from error
    end = max(round(total_frames), now)
    columns = min(COLUMNS, max(len(schedules), 1))
    rows = max(math.ceil(len(schedules) / columns), 1)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4 * columns, 2.5 * rows), squeeze=False, layout="constrained"
    )
    for panel in grid.flat[len(schedules) :]:
        panel.remove()
    for panel, (title, schedule) in zip(grid.flat, schedules.items(), strict=False):
        # Of a schedule that has points, these are enough.
        xs = [end * sample // SAMPLES for sample in range(SAMPLES)]
        if isinstance(schedule, StepSchedule | InterpSchedule):
            xs = [frames for frames, _ in schedule.points if frames < end]
        xs = [*sorted({*xs}), end]
        style = "steps-post" if isinstance(schedule, StepSchedule) else "default"
        panel.plot(xs, [float(schedule(frames)) for frames in xs], drawstyle=style)
        value = float(schedule(now))
        panel.axvline(now, color="0.6", linestyle=":", linewidth=1)
        panel.plot([now], [value], "o", color="C1", clip_on=False, label=f"now: {value:.4g}")
        panel.set(xlim=(0, end), title=title, xlabel="frames (environment steps)")
        panel.xaxis.set_major_formatter(EngFormatter())
        panel.legend(frameon=False, fontsize="small")
    return figure
