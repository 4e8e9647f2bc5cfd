"""Time per element against shape, for any number of contenders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from tests.benchmarks.tables import Row, shape_name

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS = ("#08306b", "#2171b5", "#6baed6", "#9ecae1", "#c6dbef")
THEIRS = ("#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")


def draw(
    path: Path, panels: Mapping[str, Sequence[Row]], bounds: Sequence[str], title: str
) -> None:
    """Draw one panel for each group of rows; ppokit's lines are blue, bounds black and dashed."""
    width = 1.5 + 6.5 * len(panels)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(width, 6.5), squeeze=False, layout="constrained"
    )
    for axis, (name, rows) in zip(axes[0], panels.items(), strict=True):
        _panel(axis, rows, bounds)
        axis.set_title(name)
    axes[0][0].set_ylabel("time per element, ns (median; bars: quartiles)")
    figure.suptitle(title)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Axes, rows: Sequence[Row], bounds: Sequence[str]) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    ours, theirs = iter(OURS * 2), iter(THEIRS * 2)
    for name in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == name]
        if name in bounds:
            style = {"color": "black", "ls": "--", "marker": "_", "lw": 1.5}
        elif name.startswith("ppokit"):
            style = {"color": next(ours), "marker": "o", "lw": 2.2, "ms": 5}
        else:
            style = {"color": next(theirs), "marker": "s", "lw": 1.2, "ms": 4}
        scale = [1e3 / (row.batch * row.steps) for row in own]
        middle = [row.median_us * s for row, s in zip(own, scale, strict=True)]
        low = [(row.lower_quartile_us or 0) * s for row, s in zip(own, scale, strict=True)]
        high = [(row.upper_quartile_us or 0) * s for row, s in zip(own, scale, strict=True)]
        spread = [
            [m - x for m, x in zip(middle, low, strict=True)],
            [x - m for m, x in zip(middle, high, strict=True)],
        ]
        at = [shapes.index(row.shape) for row in own]
        axis.errorbar(at, middle, spread, label=name, capsize=2, **style)
    axis.set_yscale("log")
    axis.set_xticks(range(len(shapes)), [shape_name(shape) for shape in shapes], rotation=40)
    axis.set_xlabel("[rows, steps]")
    axis.grid(alpha=0.3, which="major")
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3)
