"""Figures of a run, from statistics or from torchrl's logs, and pictures of a trained policy.

Needs matplotlib: ``pip install ppokit[plot]``.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RenderCollection
from torchrl.envs import ExplorationType

from ppokit._checks import SEED, whole
from ppokit._runs import FRAMES, Rows, Run, read_run
from ppokit._state import evaluation_mode
from ppokit.collectors import GymCollector

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PANELS", "plot_frames", "plot_run", "read_run", "record_episode"]

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

# By Okabe and Ito: readers with any colour vision can tell them apart. Yellow is left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")  # of several statistics in one panel
COLUMNS = 3
GRID = 100  # points at which runs are averaged
FEW = 10  # points that are marked, because a line would not show them


def plot_run(
    runs: Runs,
    *,
    panels: Mapping[str, Sequence[str]] = PANELS,
    kl_limit: float | None = None,
    title: str | None = None,
) -> Figure:
    r"""Draw return, KL, clipping, critic, entropy, learning rate and speed over the frames.

    A panel is left out if no run has its statistics. Several runs under one label are drawn as
    their mean, with the 95% interval of that mean (percentiles of 1,000 resamples of the runs;
    Efron, 1979) as a band, over the frames that all of them have.

    Args:
        runs: a run as for :func:`read_run` (what :class:`~ppokit.PPOUpdate` returned, or the folder
            of a log), several (as seeds of one label), or a mapping from labels to either.
        panels: titles, and the statistics under each.
        kl_limit: the KL above which an update is stopped, in nats; None reads the ``"kl_limit"`` of
            the statistics. For a single run, updates that were stopped are marked.
        title: of the figure.

    Returns:
        A matplotlib figure, made with pyplot: save it with ``figure.savefig(path)``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw; the message names the statistics of the runs.
        TypeError: a run is neither rows nor a path.
        FileNotFoundError: a path holds no log.

    Example:
        >>> import matplotlib
        >>> from ppokit.plotting import plot_run
        >>> matplotlib.use("Agg")  # no window
        >>> statistics = [{"frames": 2048.0, "kl": 0.01, "lr": 3e-4} for _ in range(20)]
        >>> figure = plot_run(statistics)
        >>> [axis.get_title() for axis in figure.axes]
        ['KL(old || new) (nats)', 'learning rate']
    """
    plt = _pyplot()
    groups = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    groups = {label: [*map(read_run, _as_group(group))] for label, group in groups.items()}
    rows = [row for group in groups.values() for run in group for row in run]
    if not rows:
        raise ValueError("There is nothing to draw: the runs have no rows of statistics.")
    there = {name for row in rows for name, value in row.items() if math.isfinite(value)}
    drawn = {title: [name for name in names if name in there] for title, names in panels.items()}
    drawn = {title: names for title, names in drawn.items() if names}
    if not drawn:
        raise ValueError(
            f"The runs have none of the statistics to draw. They have: {', '.join(sorted(there))}. "
            "Choose from these: panels={'title': ['name', ...]}."
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
            _draw_stops(axis, [*groups.values()], kl_limit)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small", framealpha=0.6)
        if number + columns >= len(drawn):  # nothing is below
            axis.set_xlabel("frames (environment steps)")
    figure.suptitle(title or "")
    return figure


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install ppokit[plot]") from error
    return pyplot


def _as_group(runs: Any) -> Sequence[Any]:
    """Return a sequence of runs, of one where a run is given."""
    several = isinstance(runs, Sequence) and not isinstance(runs, str)
    return runs if several and not (runs and isinstance(runs[0], Mapping)) else [runs]


def _draw_panel(
    axis: Axes, title: str, names: Sequence[str], groups: Mapping[str, Sequence[Rows]]
) -> None:
    from matplotlib.ticker import EngFormatter

    for at, (label, group) in enumerate(groups.items()):
        for place, name in enumerate(names):
            curves = [curve for rows in group if len((curve := _curve(rows, name))[0])]
            if not curves:
                continue
            # Colours tell labels apart, or the statistics of one label.
            color = COLORS[(at if len(groups) > 1 else place) % len(COLORS)]
            look = {"color": color, "ls": STYLES[place % len(STYLES)], "lw": 1.4}
            name = name.replace("_", " ") if len(names) > 1 else ""
            text = ", ".join(filter(None, (label, name)))
            lines, band = _lines(curves)
            for number, (frames, values) in enumerate(lines):
                look["marker"] = "." if len(frames) <= FEW else None
                axis.plot(frames, values, label=text if text and not number else None, **look)
            if band is not None:
                axis.fill_between(lines[0][0], *band, color=color, alpha=0.2, lw=0)
    axis.set_title(title, fontsize="medium")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.3)


def _draw_stops(axis: Axes, groups: Sequence[Sequence[Rows]], limit: float | None) -> None:
    """Draw the limit of the KL, and a mark at each update of a single run that was stopped."""
    rows = [row for group in groups for run in group for row in run]
    limits = {limit} if limit is not None else {row.get("kl_limit", math.nan) for row in rows}
    limits = {value for value in limits if math.isfinite(value)}
    if len(limits) == 1:
        axis.axhline(limits.pop(), color="0.4", ls="--", lw=1, label="stops above")
    points = _curve([row for row in rows if row.get("stopped") == 1], "kl")
    if len(points[0]) and sum(map(len, groups)) == 1:
        axis.plot(*points, "x", color=COLORS[1], ms=4, label="stopped")


def _curve(rows: Rows, name: str) -> Curve:
    """Return frames and values of a statistic, where it is there and finite."""
    if name == "frames_per_second":  # of a first update PPOUpdate knows no seconds of collection
        rows = [row for row in rows if row.get("seconds_collecting") != 0.0]
    rows = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    return np.array([row[FRAMES] for row in rows]), np.array([row[name] for row in rows])


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


def record_episode(
    make_env: str | Callable[[], gym.Env],
    policy: Any,
    *,
    steps: int = 200,
    every: int = 1,
    seed: int = 0,
    **collector_options: Any,
) -> list[np.ndarray]:
    """Return pictures of one episode, in which the policy takes the most probable actions.

    The policy is in evaluation mode and the statistics of a transform are frozen meanwhile, as in
    :func:`~ppokit.evaluate`. A :class:`~ppokit.GymCollector` steps the environment. On Linux
    ``MUJOCO_GL`` is set to ``"egl"`` unless it is set, so that MuJoCo draws without a screen;
    without a screen ``SDL_VIDEODRIVER`` is set to ``"dummy"``, for pygame.

    Args:
        make_env: id of an environment, or a function that makes one with
            ``render_mode="rgb_array"``.
        policy: the policy, as for a collector.
        steps: the largest number of steps; the episode may be shorter.
        every: steps from one picture to the next.
        seed: of the environment, as a collector's: of the episode after the reset with it.
        **collector_options: of GymCollector, such as ``observation_transform``,
            ``categorical_action_encoding`` or ``device``.

    Returns:
        Pictures ``[H, W, 3]`` (uint8), the first one before the first step. The list is empty, with
        a warning that gives the reason, if the environment cannot be drawn: MuJoCo needs OpenGL,
        the environments of classic control and Box2D need pygame.

    Raises:
        TypeError: ``make_env`` cannot be called, or GymCollector does not have an option.
        ValueError: ``steps`` or ``every`` is less than 1.
        gymnasium.error.UnregisteredEnv: there is no environment of that id.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from ppokit.plotting import record_episode
        >>> lean = lambda observation: (observation[..., 2] > 0).long()
        >>> policy = TensorDictModule(lean, ["observation"], ["action"])
        >>> frames = record_episode("CartPole-v1", policy, steps=20, every=5,
        ...                         categorical_action_encoding=True)
        >>> len(frames), frames[0].shape
        (5, (400, 600, 3))
    """
    steps, every = whole().check(steps, "steps"), whole().check(every, "every")
    recorder = _make_recorder(make_env, SEED.check(seed, "seed"))
    if recorder is None:
        return []
    options: Any = {"exploration_type": ExplorationType.DETERMINISTIC} | collector_options
    with (
        evaluation_mode(policy, options.get("observation_transform")),
        GymCollector(lambda: recorder, policy, frames_per_batch=steps, **options) as collector,
    ):
        collector.updates_transform = False
        collector.set_seed(seed)
        start = len(recorder.frame_list) - 1
        done = collector.rollout()["next", "done"].flatten()
    length = int(done.nonzero()[0]) + 1 if done.any() else len(done)
    pictures: list[Any] = recorder.frame_list[start : start + length + 1 : every]
    return [_as_bytes(np.asarray(picture)) for picture in pictures]


def _as_bytes(picture: np.ndarray) -> np.ndarray:
    """Return a picture of bytes; flags, and numbers that are all from 0 to 1, are multiplied."""
    if picture.dtype.kind == "b" or (picture.dtype.kind == "f" and picture.max(initial=0) <= 1):
        picture = 255.0 * picture
    return picture.round().astype(np.uint8)


def _make_recorder(make_env: Any, seed: int) -> RenderCollection | None:
    """Return an environment that keeps its pictures, or None with a warning."""
    is_set = "MUJOCO_GL" in os.environ
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        if not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    is_id = isinstance(make_env, str)
    # not of drawing; the environment of an id may lack the argument render_mode
    others = gym.error.UnregisteredEnv, NameError, LookupError, *(() if is_id else (TypeError,))
    try:
        env = gym.make(make_env, render_mode="rgb_array") if is_id else make_env()
        recorder = RenderCollection(env, pop_frames=False, reset_clean=False)
        recorder.reset(seed=seed)
        if recorder.frame_list[0] is None:
            raise RuntimeError("render() returned None")
    except others:
        raise
    except Exception as error:  # MuJoCo raises an AttributeError without OpenGL
        reason = f"There are no pictures, because the environment cannot be drawn here: {error!r}"
        warnings.warn(reason, stacklevel=3)  # at the call of record_episode
        if not is_set:  # without OpenGL, MuJoCo could no longer be imported by other processes
            os.environ.pop("MUJOCO_GL", None)
        return None
    return recorder


def plot_frames(
    frames: Sequence[np.ndarray], *, count: int = 8, title: str | None = None
) -> Figure:
    """Draw pictures of an episode in a row, at even distances from the first to the last.

    Args:
        frames: pictures ``[H, W, 3]`` (uint8), as :func:`record_episode` returns them.
        count: how many to draw; all, if there are fewer.
        title: of the figure.

    Returns:
        A matplotlib figure, made with pyplot: save it with ``figure.savefig(path)``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no pictures.

    Example:
        >>> import numpy as np
        >>> import matplotlib
        >>> from ppokit.plotting import plot_frames
        >>> matplotlib.use("Agg")  # no window
        >>> figure = plot_frames([np.zeros((40, 60, 3), np.uint8)] * 20, count=4)
        >>> len(figure.axes)
        4
    """
    plt, count = _pyplot(), min(count, len(frames))
    if not count:
        raise ValueError("There are no pictures to draw.")
    height, width = frames[0].shape[:2]
    size = 1.5 * count, 1.5 * height / width + (0.3 if title else 0.1)
    figure, axes = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    for axis, at in zip(axes.flat, np.linspace(0, len(frames) - 1, count).round(), strict=True):
        axis.imshow(frames[int(at)])
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("0.8")
    figure.suptitle(title or "")
    return figure
