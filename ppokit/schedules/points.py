"""Schedules: a value for every number of frames."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Schedule(ABC):
    points: tuple[tuple[float, float], ...]

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        object.__setattr__(self, "points", tuple((_plain(x), float(y)) for x, y in points))
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
            if index and frames <= self.points[index - 1][0]:
                raise ValueError(
                    f"Point {index}, {(frames, value)}, does not come after point {index - 1}, "
                    f"{self.points[index - 1]}; frames must strictly increase."
                )

    def __call__(self, frames: float) -> float:
        """Return the value at this number of frames."""
        if not frames >= 0:
            raise ValueError(f"frames must be 0 or more, got {frames}.")
        index = bisect.bisect_right(self.points, frames, key=lambda point: point[0]) - 1
        return self._between(index, frames)

    @abstractmethod
    def _between(self, index: int, frames: float) -> float:
        """Return the value at ``frames``, which lies between two points or after the last."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.points)})"


class StepSchedule(_Schedule):
    r"""Holds each value until the next point; :meth:`constant` never has another.

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

    @classmethod
    def constant(cls, value: float) -> StepSchedule:
        """Return the schedule that stays at one value.

        Args:
            value: the value, from frame 0 on.

        Raises:
            ValueError: the value is not finite.

        Example:
            >>> StepSchedule.constant(3e-4)
            StepSchedule([(0, 0.0003)])
        """
        return cls([(0, value)])

    def _between(self, index: int, frames: float) -> float:
        return self.points[index][1]


class InterpSchedule(_Schedule):
    r"""Linear between points; :meth:`linear`, :meth:`cosine` and :meth:`warmup_linear` place them.

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

    @classmethod
    def linear(cls, start: float, end: float, *, frames: float) -> InterpSchedule:
        r"""Return the straight line from one value to another.

        .. math:: v(n) = start + (end - start) \frac{n}{frames} \quad \text{for } n \le frames

        Args:
            start: value at frame 0.
            end: value at ``frames``, held after it.
            frames: length of the line, in environment steps.

        Raises:
            ValueError: a value is not finite, or ``frames`` is no whole number of 1 or more.

        Example:
            >>> InterpSchedule.linear(3e-4, 0.0, frames=1_000_000)
            InterpSchedule([(0, 0.0003), (1000000, 0.0)])
        """
        return cls([(0, start), (_whole("frames", frames), end)])

    @classmethod
    def cosine(cls, start: float, end: float, *, frames: float, pieces: int = 64) -> InterpSchedule:
        r"""Return half a period of a cosine, from one value to another, in straight pieces.

        .. math:: v(n) = end + \frac{start - end}{2}
            \left(1 + \cos\frac{\pi n}{frames}\right) \quad \text{for } n \le frames

        (Loshchilov and Hutter, 2017, arXiv:1608.03983, equation 5, without restarts and in frames
        instead of epochs.) It is exact at the ends of each piece, which fall on whole frames, and
        between them off by at most :math:`\pi^2 / (16 \, pieces^2)` of ``start - end``: by
        0.00015 of it with 64 pieces. With fewer frames than pieces it is exact at each frame.

        Args:
            start: value at frame 0.
            end: value at ``frames``, held after it.
            frames: length of the curve, in environment steps.
            pieces: number of straight pieces, so that ``repr`` shows one point more.

        Raises:
            ValueError: a value is not finite, ``frames`` is no whole number of 1 or more, or
                ``pieces`` none of 2 or more.

        Example:
            >>> InterpSchedule.cosine(1.0, 0.0, frames=1_000_000, pieces=4)  # doctest: +ELLIPSIS
            InterpSchedule([(0, 1.0), (250000, 0.853...), (500000, 0.5), (750000, 0.146...), ...])
            >>> schedule = InterpSchedule.cosine(3e-4, 0.0, frames=1_000_000)
            >>> schedule(0), round(schedule(333_333), 6), schedule(1_000_000)
            (0.0003, 0.000225, 0.0)
        """
        frames, pieces = _whole("frames", frames), _whole("pieces", pieces, least=2)
        places = sorted({round(frames * piece / pieces) for piece in range(pieces + 1)})
        between = [
            (place, end + (start - end) * 0.5 * (1 + math.cos(math.pi * place / frames)))
            for place in places[1:-1]
        ]
        # Not by the formula, which rounds: what is said to be the first and last value is that.
        return cls([(0, start), *between, (frames, end)])

    @classmethod
    def warmup_linear(
        cls, start: float, peak: float, end: float, *, warmup: float, frames: float
    ) -> InterpSchedule:
        """Return a straight line up to a peak, and another one from there to the end.

        (A gradual warm-up: Goyal et al., 2017, arXiv:1706.02677, section 2.2.)

        Args:
            start: value at frame 0. The whole first batch is updated with it, so a learning rate
                that starts at 0 wastes that batch.
            peak: value at ``warmup``.
            end: value at ``frames``, held after it.
            warmup: length of the first line, in environment steps.
            frames: length of both lines together, in environment steps.

        Raises:
            ValueError: a value is not finite, ``warmup`` or ``frames`` is no whole number of 1 or
                more, or the warm-up leaves nothing for the second line.

        Example:
            >>> InterpSchedule.warmup_linear(1e-5, 3e-4, 0.0, warmup=20_000, frames=1_000_000)
            InterpSchedule([(0, 1e-05), (20000, 0.0003), (1000000, 0.0)])
        """
        warmup, frames = _whole("warmup", warmup), _whole("frames", frames)
        if warmup >= frames:
            raise ValueError(
                f"warmup is {warmup} and frames is {frames}: frames is the length of the warm-up "
                "and of what follows it together, so it must be more than warmup."
            )
        return cls([(0, start), (warmup, peak), (frames, end)])

    def _between(self, index: int, frames: float) -> float:
        x0, y0 = self.points[index]
        if index + 1 == len(self.points):
            return y0
        x1, y1 = self.points[index + 1]
        return y0 + (y1 - y0) * (frames - x0) / (x1 - x0)


def _plain(frames: float) -> float:
    """Return a Python number, an int where it is whole: what ``repr`` shows can be read back."""
    return int(frames) if float(frames).is_integer() else float(frames)


def _whole(name: str, number: float, *, least: int = 1) -> int:
    if not (float(number).is_integer() and number >= least):
        raise ValueError(f"{name} must be a whole number of {least} or more, got {number}.")
    return int(number)
