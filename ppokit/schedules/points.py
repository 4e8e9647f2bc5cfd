"""Schedules: a value for every number of frames."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Schedule:
    points: tuple[tuple[float, float], ...]

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        object.__setattr__(self, "points", tuple((x, float(y)) for x, y in points))
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
