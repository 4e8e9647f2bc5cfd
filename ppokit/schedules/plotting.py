"""Plots of schedules over frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ppokit.schedules.points import InterpSchedule, StepSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3
SAMPLES = 1_000  # of a callable without points


def draw(
    schedules: Mapping[str, Callable[[float], float]], *, total_frames: float, now: int
) -> Figure:
    """Return a figure with a panel for each schedule, from 0 to the end, with a mark at ``now``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``total_frames`` is not positive.
    """
    if not 0 < total_frames < math.inf:
        raise ValueError(f"total_frames must be positive and finite, got {total_frames}.")
    try:
        from matplotlib import pyplot as plt
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ImportError(
            "ParameterScheduler.plot needs matplotlib: pip install ppokit[tutorials]"
        ) from error
    end = max(round(total_frames), now)
    columns = min(COLUMNS, max(len(schedules), 1))
    rows = max(math.ceil(len(schedules) / columns), 1)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4 * columns, 2.5 * rows), squeeze=False, layout="constrained"
    )
    panels = list(grid.flat)
    for panel, (title, schedule) in zip(panels, schedules.items(), strict=False):
        _draw_one(panel, schedule, end, now)
        panel.set_title(title)
        panel.set_xlabel("frames (environment steps)")
        panel.xaxis.set_major_formatter(EngFormatter())
    for panel in panels[len(schedules) :]:
        panel.remove()
    return figure


def _draw_one(panel: Any, schedule: Callable[[float], float], end: int, now: int) -> None:
    xs, ys = _curve(schedule, end)
    style = "steps-post" if isinstance(schedule, StepSchedule) else "default"
    panel.plot(xs, ys, drawstyle=style)
    value = float(schedule(now))
    panel.axvline(now, color="0.6", linestyle=":", linewidth=1)
    panel.plot([now], [value], "o", color="C1", clip_on=False, label=f"now: {value:.4g}")
    panel.set_xlim(0, end)
    panel.legend(frameon=False, fontsize="small")


def _curve(schedule: Callable[[float], float], end: int) -> tuple[list[float], list[float]]:
    """Return frames and values from 0 to ``end``: the points of a schedule that has points."""
    if isinstance(schedule, (StepSchedule, InterpSchedule)):
        xs: list[float] = [frames for frames, _ in schedule.points if frames < end]
    else:
        xs = [*sorted({end * sample // SAMPLES for sample in range(SAMPLES)})]
    xs.append(end)
    return xs, [float(schedule(frames)) for frames in xs]
