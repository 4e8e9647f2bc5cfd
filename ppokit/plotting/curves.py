"""Figures of a run: what a PPO user looks at, from statistics or from torchrl's logs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ppokit._runs import FRAMES, Rows, Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve: TypeAlias = tuple[np.ndarray, np.ndarray]  # frames and values
Runs: TypeAlias = "Run | Sequence[Run] | Mapping[str, Run | Sequence[Run]]"

#: titles, with units, and the statistics that are drawn under each
PANELS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "return of an episode": ["episode_return", "eval_return"],
        "length of an episode (steps)": ["episode_length", "eval_length"],
        "KL(old || new) (nats)": ["kl"],
        "clipped share of the frames": ["clip_fraction", "dual_clip_fraction"],
        "explained variance of the critic": ["explained_variance"],
        "entropy (nats)": ["entropy"],
        "learning rate": ["lr"],
        "norm of the gradients": ["grad_norm"],
        "frames a second": ["frames_per_second"],
    }
)

# Of Okabe and Ito, which readers with any colour vision can tell apart; yellow is left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")  # of several statistics in one panel
COLUMNS = 3
GRID = 100  # points at which runs are averaged
FEW = 10  # points that are marked, for a line would not show them


def plot_run(
    runs: Runs,
    *,
    panels: Mapping[str, Sequence[str]] | None = None,
    kl_limit: float | None = None,
    title: str | None = None,
) -> Figure:
    r"""Draw return, KL, clipping, critic, entropy, learning rate and speed over the frames.

    A panel is left out where no run has its statistics. Several runs under one label are drawn as
    their mean, with the 95% interval of that mean (percentiles of 1,000 resamples of the runs;
    Efron, 1979) as a band, from the first frame that all of them have to the last; each by itself
    where they have no two frames in common.

    Args:
        runs: a run, several (as seeds of one label), or a mapping from labels to either. A run is
            the sequence of what :class:`~ppokit.PPOUpdate` returned, whose ``"frames"`` are added
            up unless a row says ``"total_frames"``; or the folder of a log of torchrl's
            ``CSVLogger`` or ``TensorboardLogger``, whose steps are taken for frames.
        panels: titles and the statistics under each; :data:`PANELS` by default.
        kl_limit: the KL above which an update is stopped, in nats; where it is not given, the
            ``"kl_limit"`` of the statistics. Updates that were stopped are marked, for a single
            run.
        title: of the figure.

    Returns:
        A matplotlib figure, made with pyplot: save it with ``figure.savefig(path)``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw; the message says which statistics there are.
        TypeError: a run is neither rows nor a path, or ``panels`` no mapping.
        FileNotFoundError: a path holds no log.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")  # no window
        >>> statistics = [{"frames": 2048.0, "kl": 0.01, "lr": 3e-4} for _ in range(20)]
        >>> figure = plot_run(statistics)
        >>> [axis.get_title() for axis in figure.axes]
        ['KL(old || new) (nats)', 'learning rate']
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("plot_run needs matplotlib: pip install ppokit[plot]") from error
    groups = {label: [read_run(run) for run in group] for label, group in _labelled(runs).items()}
    if panels is None:
        panels = PANELS
    if not isinstance(panels, Mapping):
        raise TypeError(f"panels are {{'title': ['name', ...]}}, got {panels!r}.")
    rows = [row for group in groups.values() for run in group for row in run]
    there = {name for row in rows for name, value in row.items() if math.isfinite(value)}
    chosen = {title: [n] if isinstance(n, str) else n for title, n in panels.items()}
    drawn = {title: [name for name in names if name in there] for title, names in chosen.items()}
    drawn = {title: names for title, names in drawn.items() if names}
    if not drawn:
        raise ValueError(
            f"None of the statistics to draw is there: {', '.join(sorted(there))}. Say which to "
            "draw: panels={'title': ['name', ...]}."
        )
    columns = min(COLUMNS, len(drawn))
    lines = math.ceil(len(drawn) / columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 2.9 * lines), squeeze=False, layout="constrained"
    )
    for axis in grid.flat[len(drawn) :]:
        axis.remove()
    for number, (axis, (panel, names)) in enumerate(zip(grid.flat, drawn.items(), strict=False)):
        _draw_panel(axis, panel, names, groups)
        if "kl" in names:
            _draw_stops(axis, groups, kl_limit)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small", framealpha=0.6)
        if number + columns >= len(drawn):  # nothing is below
            axis.set_xlabel("frames (environment steps)")
    figure.suptitle(title or "")
    return figure


def _labelled(runs: Any) -> dict[str, Sequence[Run]]:
    """Return the runs of each label; a single run or group has the label ``""``."""
    groups = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    if not groups:
        raise ValueError("There are no runs to draw.")
    if len(set(map(str, groups))) < len(groups):
        raise ValueError(f"Two labels are written alike: {[*groups]}.")
    return {str(label): _as_group(group) for label, group in groups.items()}


def _as_group(runs: Any) -> Sequence[Run]:
    """Return a sequence of runs, of one where a run is given."""
    if isinstance(runs, str | os.PathLike):
        return [runs]
    if not isinstance(runs, Sequence):
        raise TypeError(f"A run is a sequence of statistics, or the folder of a log, got {runs!r}.")
    if not runs:
        raise ValueError("There are no runs to draw: the sequence is empty.")
    return [runs] if isinstance(runs[0], Mapping) else runs


def _draw_panel(
    axis: Axes, title: str, names: Sequence[str], groups: Mapping[str, Sequence[Rows]]
) -> None:
    from matplotlib.ticker import EngFormatter

    one_label, one_name = len(groups) == 1, len(names) == 1
    for at, (label, group) in enumerate(groups.items()):
        for place, name in enumerate(names):
            curves = [curve for rows in group if len((curve := _curve(rows, name))[0])]
            if not curves:
                continue
            color = COLORS[(place if one_label else at) % len(COLORS)]
            style = STYLES[(place + at // len(COLORS)) % len(STYLES)]
            words = [label, "" if one_name else name.replace("_", " ")]
            said = ", ".join(word for word in words if word)
            said = f" {said}" if said.startswith("_") else said  # matplotlib shows no such label
            lines, band = _lines(curves)
            for frames, values in lines:
                axis.plot(
                    frames,
                    values,
                    label=said or None,
                    color=color,
                    ls=style,
                    lw=1.4,
                    marker="." if len(frames) <= FEW else None,
                )
                said = ""
            if band is not None:
                axis.fill_between(lines[0][0], *band, color=color, alpha=0.2, lw=0)
    axis.set_title(title, fontsize="medium")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.3)


def _draw_stops(axis: Axes, groups: Mapping[str, Sequence[Rows]], limit: float | None) -> None:
    """Draw the limit of the KL, and a mark at each update of a single run that was stopped."""
    rows = [row for group in groups.values() for run in group for row in run]
    limits = {x for row in rows if math.isfinite(x := row.get("kl_limit", math.nan))}
    for value in [limit] if limit is not None else sorted(limits)[:1] * (len(limits) == 1):
        axis.axhline(value, color="0.4", ls="--", lw=1, label="stops above")
    points = _curve([row for row in rows if row.get("stopped") == 1], "kl")
    if len(points[0]) and sum(map(len, groups.values())) == 1:
        axis.plot(*points, "x", color=COLORS[1], ms=4, label="stopped")


def _curve(rows: Rows, name: str) -> Curve:
    """Return frames and values of a statistic, where it is there and finite."""
    if name == "frames_per_second":  # of a first update PPOUpdate knows no seconds of collection
        rows = [row for row in rows if row.get("seconds_collecting") != 0.0]
    points = [(row[FRAMES], float(row[name])) for row in rows if name in row]
    points = [point for point in points if math.isfinite(point[1])]
    frames, values = zip(*points, strict=True) if points else ((), ())
    return np.array(frames, dtype=float), np.array(values, dtype=float)


def _lines(curves: Sequence[Curve]) -> tuple[Sequence[Curve], np.ndarray | None]:
    """Return the mean of runs as one line, and its 95% interval ``[2, N]``; or the runs alone."""
    start = max(frames[0] for frames, _ in curves)
    end = min(frames[-1] for frames, _ in curves)
    if len(curves) == 1 or end <= start:
        return curves, None
    frames = np.linspace(start, end, GRID)
    values = np.stack([np.interp(frames, *curve) for curve in curves])
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(1_000, len(values)))].mean(1)
    return [(frames, values.mean(0))], np.percentile(means, [2.5, 97.5], axis=0)
