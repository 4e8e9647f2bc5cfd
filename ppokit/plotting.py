"""Figures of a run, from statistics or from torchrl's logs, and pictures of a trained policy.

Needs matplotlib: ``pip install ppokit[plot]``.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ppokit._runs import FRAMES, Rows, Run, read_run

if TYPE_CHECKING:
    import gymnasium as gym
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs: TypeAlias = "Run | Sequence[Run] | Mapping[str, Run | Sequence[Run]]"

__all__ = ["PANELS", "plot_frames", "plot_run", "record_episode"]

#: titles, with units, and the statistics that are drawn under each
PANELS: dict[str, Sequence[str]] = {
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
    Efron, 1979) as a band, from the first frame that all of them have to the last.

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
        TypeError: a run is neither rows nor a path.
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
    there = {name for group in groups.values() for rows in group for row in rows for name in row}
    drawn = {title: [name for name in names if name in there] for title, names in panels.items()}
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

    A :class:`~ppokit.GymCollector` steps the environment. On Linux ``MUJOCO_GL`` is set to
    ``"egl"`` unless it is set, so that MuJoCo draws without a screen; and where there is no screen
    ``SDL_VIDEODRIVER`` to ``"dummy"``, for pygame.

    Args:
        make_env: id of an environment, or a function that makes one with
            ``render_mode="rgb_array"``.
        policy: what acts, as for a collector.
        steps: the most to take; the episode may be shorter.
        every: steps from one picture to the next.
        seed: of the environment.
        **collector_options: of GymCollector, such as ``observation_transform`` (one that counts
            observations counts these, too, unless it is frozen), ``categorical_action_encoding`` or
            ``device``.

    Returns:
        Pictures ``[H, W, 3]`` (uint8), the first of them before the first step. None of them, with
        a warning that says why, where the environment cannot be drawn: MuJoCo needs OpenGL, the
        environments of classic control and Box2D need pygame.

    Raises:
        ValueError: ``every`` is less than 1; the environment has another ``render_mode``; or
            GymCollector refuses an option.
        gymnasium.error.UnregisteredEnv: there is no environment of that id.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> lean = lambda observation: (observation[..., 2] > 0).long()
        >>> policy = TensorDictModule(lean, ["observation"], ["action"])
        >>> frames = record_episode("CartPole-v1", policy, steps=20, every=5,
        ...                         categorical_action_encoding=True)
        >>> len(frames), frames[0].shape
        (5, (400, 600, 3))
    """
    import gymnasium as gym
    from torchrl.envs import ExplorationType

    from ppokit.collectors import GymCollector

    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}.")
    episodes: list[list[Any]] = []

    class Recorder(gym.Wrapper):
        now = 0  # step of the episode

        def reset(self, **options: Any) -> Any:
            found, self.now = super().reset(**options), 0
            episodes.append([self.env.render()])
            return found

        def step(self, action: Any) -> Any:
            found, self.now = super().step(action), self.now + 1
            if self.now % every == 0:
                episodes[-1].append(self.env.render())
            return found

    is_set = "MUJOCO_GL" in os.environ
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        if not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    mode = "rgb_array"
    try:
        env = gym.make(make_env, render_mode=mode) if isinstance(make_env, str) else make_env()
        recorder = Recorder(env)
        if env.render_mode == mode:
            recorder.reset(seed=seed)
    except gym.error.UnregisteredEnv:
        raise
    except Exception as error:  # of any kind: MuJoCo raises an AttributeError where OpenGL is not
        reason = f"There are no pictures, for the environment cannot be drawn here: {error!r}"
        warnings.warn(reason, stacklevel=2)
        if not is_set:  # without OpenGL, MuJoCo could no longer be imported by other processes
            os.environ.pop("MUJOCO_GL", None)
        return []
    if env.render_mode != mode:
        raise ValueError(
            f"make_env makes an environment with render_mode {env.render_mode!r}: make it with "
            f"gymnasium.make(..., render_mode={mode!r})."
        )
    options: Any = {"exploration_type": ExplorationType.DETERMINISTIC} | collector_options
    with GymCollector(lambda: recorder, policy, frames_per_batch=steps, **options) as collector:
        collector.set_seed(seed)
        del episodes[:-1]  # resets of before
        collector.rollout()
    return episodes[0]


def plot_frames(
    frames: Sequence[np.ndarray], *, count: int = 8, title: str | None = None
) -> Figure:
    """Draw pictures of an episode in a row, at even distances from the first to the last.

    Args:
        frames: pictures ``[H, W, 3]`` (uint8), as :func:`record_episode` returns them.
        count: how many to draw; all, where there are fewer.
        title: of the figure.

    Returns:
        A matplotlib figure, made with pyplot: save it with ``figure.savefig(path)``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no pictures, or ``count`` is less than 1.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")  # no window
        >>> figure = plot_frames([np.zeros((40, 60, 3), np.uint8)] * 20, count=4)
        >>> len(figure.axes)
        4
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError("plot_frames needs matplotlib: pip install ppokit[plot]") from error
    if not len(frames) or count < 1:
        raise ValueError(f"There is nothing to draw: {len(frames)} frames, and count is {count}.")
    count = min(count, len(frames))
    height, width = frames[0].shape[:2]
    size = 1.5 * count, 1.5 * height / width + (0.3 if title else 0.1)
    figure, axes = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    for axis, at in zip(axes.flat, np.linspace(0, len(frames) - 1, count).round(), strict=True):
        axis.imshow(frames[int(at)])
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("0.8")
    figure.suptitle(title or "")
    return figure


def _labelled(runs: Any) -> dict[str, Sequence[Run]]:
    """Return the runs of each label; a single run or group has the label ``""``."""
    groups = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    if not groups:
        raise ValueError("There are no runs to draw.")
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
            frames, mean, band = _summary(curves)
            color = COLORS[(place if one_label else at) % len(COLORS)]
            words = [label, "" if one_name else name.replace("_", " ")]
            axis.plot(
                frames,
                mean,
                label=", ".join(word for word in words if word) or None,
                color=color,
                ls=STYLES[place % len(STYLES)],
                lw=1.4,
                marker="." if len(frames) <= FEW else None,
            )
            if band is not None:
                axis.fill_between(frames, *band, color=color, alpha=0.2, lw=0)
    axis.set_title(title, fontsize="medium")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.3)


def _draw_stops(axis: Axes, groups: Mapping[str, Sequence[Rows]], limit: float | None) -> None:
    """Draw the limit of the KL, and a mark at each update of a single run that was stopped."""
    rows = [row for group in groups.values() for run in group for row in run]
    limits = {float(row["kl_limit"]) for row in rows if "kl_limit" in row}
    for value in [limit] if limit is not None else sorted(limits)[:1] * (len(limits) == 1):
        axis.axhline(value, color="0.4", ls="--", lw=1, label="stops above")
    stopped = [row for row in rows if row.get("stopped") and "kl" in row]
    if stopped and sum(map(len, groups.values())) == 1:
        points = [(row[FRAMES], row["kl"]) for row in stopped]
        axis.plot(*zip(*points, strict=True), "x", color=COLORS[1], ms=4, label="stopped")


def _curve(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return frames and values of a statistic, where it is there and finite."""
    if name == "frames_per_second":  # of a first update PPOUpdate knows no seconds of collection
        rows = [row for row in rows if row.get("seconds_collecting") != 0.0]
    points = [(row[FRAMES], float(row[name])) for row in rows if name in row]
    points = [point for point in points if math.isfinite(point[1])]
    frames, values = zip(*points, strict=True) if points else ((), ())
    return np.array(frames, dtype=float), np.array(values, dtype=float)


def _summary(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return frames, mean of the runs, and of several the 95% interval of the mean ``[2, N]``."""
    if len(curves) == 1:
        return *curves[0], None
    start = max(frames[0] for frames, _ in curves)
    end = min(frames[-1] for frames, _ in curves)
    frames = np.linspace(start, max(start, end), GRID)
    values = np.stack([np.interp(frames, *curve) for curve in curves])
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(1_000, len(values)))].mean(1)
    return frames, values.mean(0), np.percentile(means, [2.5, 97.5], axis=0)
