"""Plots of schedules over frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ppokit.schedules.points import InterpSchedule, StepSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
