"""Figures of the benchmarks: lines over shapes, groups of bars, frames per second, curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

from tests.benchmarks.tables import Row, shape_name

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

OURS = ("#08306b", "#2171b5", "#6baed6", "#9ecae1", "#c6dbef")
THEIRS = ("#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf")
FRAMES = "frames (environment steps)"


@contextmanager
def panels(
    path: Path, columns: int, size: tuple[float, float], title: str = "", rows: int = 1, **more: Any
) -> Iterator[Sequence[Any]]:
    """Give so many axes with a grid, and save the figure."""
    figure, axes = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **more
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    yield list(axes.flat)
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each contender; ppokit's are blue."""
    ours, theirs = iter(OURS * 2), iter(THEIRS * 2)
    return {name: next(ours if name.startswith("ppokit") else theirs) for name in names}


def draw_shapes(
    path: Path, groups: Mapping[str, Sequence[Row]], bounds: Sequence[str], title: str
) -> None:
    """Draw nanoseconds per element over shapes, a panel for each group of rows."""
    with panels(path, len(groups), (1.5 + 6.5 * len(groups), 6.5), title) as axes:
        for axis, (group, rows) in zip(axes, groups.items(), strict=True):
            shapes = list(dict.fromkeys(row.shape for row in rows))
            names = list(dict.fromkeys(row.contender for row in rows))
            colors = colors_of([name for name in names if name not in bounds])
            for name in names:
                own = [row for row in rows if row.contender == name]
                at = [shapes.index(row.shape) for row in own]
                times = [1e3 * row.median_us / (row.batch * row.steps) for row in own]
                style: dict[str, Any] = {"color": "black", "ls": "--", "marker": "_"}
                if name not in bounds:
                    width = 2.2 if name.startswith("ppokit") else 1.2
                    style = {"color": colors[name], "marker": "o", "lw": width, "ms": 4}
                axis.plot(at, times, label=name, **style)
            axis.set(title=group, xlabel="[rows, steps]", yscale="log")
            axis.set_xticks(range(len(shapes)), map(shape_name, shapes), rotation=40)
            axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3)
        axes[0].set_ylabel("time per element, ns (median)")


def draw_bars(
    path: Path,
    groups: Mapping[str, Mapping[str, float]],
    *,
    ours: tuple[str, ...] = ("ppokit",),
    label: str = "frames a second",
    style: str = ",.0f",
    log: bool = False,
) -> None:
    """Draw a value of each contender as horizontal bars, a panel for each group."""
    height = -(-len(groups) // 2)
    with panels(path, 2, (11, 3.2 * height), rows=height) as axes:
        for axis, (title, values) in zip(axes, groups.items(), strict=False):
            colors = ["C0" if name.startswith(ours) else "C7" for name in values]
            bars = axis.barh([*values], [*values.values()], color=colors)
            axis.bar_label(bars, [f" {value:{style}}" for value in values.values()], fontsize=8)
            axis.set(title=title, xlabel=label, xscale="log" if log else "linear")
            axis.invert_yaxis()
            axis.margins(x=0.2)


def draw_bands(
    path: Path,
    groups: Mapping[str, Mapping[str, tuple[Any, Any]]],
    summary: Callable[[Any], Sequence[Any]],
    title: str,
    ylabels: Sequence[str],
) -> None:
    """Draw each arm as a line and a band, a panel for each group.

    An arm is its frames ``[points]`` and its returns ``[seeds, points]``. ``summary`` makes the
    line, and the lower and the upper edge of the band, of the returns.
    """
    columns = len(groups) if len(groups) < 5 else 3
    rows = -(-len(groups) // columns)
    with panels(path, columns, (4.7 * columns, 4.4 * rows), title, rows=rows) as axes:
        for axis, (name, arms) in zip(axes, groups.items(), strict=False):
            for arm, (frames, returns) in arms.items():
                middle, *band = summary(returns)
                (line,) = axis.plot(frames, middle, label=arm)
                axis.fill_between(frames, *band, color=line.get_color(), alpha=0.18, lw=0)
            axis.set(title=name, xlabel=FRAMES)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.legend(loc="best", fontsize="small")
        for axis, label in zip(axes, ylabels, strict=False):
            axis.set_ylabel(label)


def draw_runs(
    path: Path,
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    name: str,
    target: float,
    title: str,
    label: str,
) -> None:
    """Draw an entry of the rows of every run, over frames and over seconds."""
    colors = colors_of(list(runs))
    with panels(path, 2, (12, 4.5), title, sharey=True) as axes:
        axes[1].set_xscale("log")  # first, as it raises after lines without a point
        for axis, unit in zip(axes, ("frames", "seconds"), strict=True):
            for arm, seeds in runs.items():
                for number, rows in enumerate(seeds):
                    points = [(row[unit], row[name]) for row in rows if row.get(name) is not None]
                    x, y = zip(*points, strict=True) if points else ((), ())
                    axis.plot(x, y, color=colors[arm], lw=1.2, label=None if number else arm)
            axis.axhline(target, color="black", ls=":", lw=1)
            axis.set_xlabel(FRAMES if unit == "frames" else unit)
        axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[0].set_ylabel(label)
        axes[0].legend()
