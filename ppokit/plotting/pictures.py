"""Pictures of a trained policy: an episode that is recorded, and drawn as a strip."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from torchrl.envs import ExplorationType

from ppokit.collectors import GymCollector

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODE = "rgb_array"


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
        seed: of the environment, as a collector's: of the episode after the reset with it.
        **collector_options: of GymCollector, such as ``observation_transform`` (one that counts
            observations counts these, too, unless it is frozen), ``categorical_action_encoding`` or
            ``device``.

    Returns:
        Pictures ``[H, W, 3]`` (uint8), the first of them before the first step. None of them, with
        a warning that says why, where the environment cannot be drawn: MuJoCo needs OpenGL, the
        environments of classic control and Box2D need pygame.

    Raises:
        TypeError: ``make_env`` is neither an id nor makes an environment.
        ValueError: ``every``, ``steps`` or ``seed`` is out of range; an option says how many
            environments or frames; the environment has another ``render_mode``; or GymCollector
            refuses an option.
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
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}.")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}.")
    if own := collector_options.keys() & {"num_envs", "frames_per_batch", "total_frames"}:
        raise ValueError(f"One environment is recorded, for steps=: leave {', '.join(own)} out.")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number from 0 on, got {seed!r}.")
    if not callable(make_env) and not isinstance(make_env, str):
        raise TypeError(f"make_env is an id or a function that makes one, got {make_env!r}.")
    recorder = _make_recorder(make_env, every, seed)
    if recorder is None:
        return []
    options: Any = {"exploration_type": ExplorationType.DETERMINISTIC} | collector_options
    with GymCollector(lambda: recorder, policy, frames_per_batch=steps, **options) as collector:
        collector.set_seed(seed)
        del recorder.episodes[:-1]  # resets of before
        collector.rollout()
    return recorder.episodes[0]


class _Recorder(gym.Wrapper):
    """Keeps a picture of every so many steps of each episode."""

    def __init__(self, env: gym.Env, every: int) -> None:
        super().__init__(env)
        self.episodes: list[list[np.ndarray]] = []
        self._every, self._now = every, 0

    def reset(self, **options: Any) -> Any:
        result, self._now = super().reset(**options), 0
        self.episodes.append([self._picture()])
        return result

    def step(self, action: Any) -> Any:
        result, self._now = super().step(action), self._now + 1
        if self._now % self._every == 0:
            self.episodes[-1].append(self._picture())
        return result

    def _picture(self) -> np.ndarray:
        drawn: Any = self.env.render()
        if drawn is None:
            raise RuntimeError("render() returned None")
        return np.array(drawn)  # of its own: some environments draw on the same array again


def _make_recorder(
    make_env: str | Callable[[], gym.Env], every: int, seed: int
) -> _Recorder | None:
    """Return a recorder whose first picture was drawn; None, with a warning, where none can be."""
    is_set = "MUJOCO_GL" in os.environ
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
        if not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        env = gym.make(make_env, render_mode=MODE) if isinstance(make_env, str) else make_env()
        if not isinstance(env, gym.Env):
            raise TypeError(f"make_env made a {type(env).__name__}, which is no gymnasium.Env.")
        recorder = _Recorder(env, every)
        if env.render_mode == MODE:
            recorder.reset(seed=seed)
    except (gym.error.UnregisteredEnv, NameError, TypeError, LookupError):  # not of drawing
        raise
    except Exception as error:  # of any kind: MuJoCo raises an AttributeError where OpenGL is not
        reason = f"There are no pictures, for the environment cannot be drawn here: {error!r}"
        warnings.warn(reason, stacklevel=3)  # of who called record_episode
        if not is_set:  # without OpenGL, MuJoCo could no longer be imported by other processes
            os.environ.pop("MUJOCO_GL", None)
        return None
    if env.render_mode != MODE:
        raise ValueError(
            f"make_env makes an environment with render_mode {env.render_mode!r}: make it with "
            f"gymnasium.make(..., render_mode={MODE!r})."
        )
    return recorder


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
    for number, frame in enumerate(frames):
        if np.ndim(frame) != 3 or np.shape(frame)[-1] not in (3, 4) or 0 in np.shape(frame):
            raise ValueError(
                f"Picture {number} is of shape {np.shape(frame)}, and not [H, W, 3]; frames are a "
                "sequence of pictures, as record_episode returns it."
            )
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
