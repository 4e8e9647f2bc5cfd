"""Figures of runs and of episodes: the numbers that are drawn, their sources, bad input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor
from torchrl.record.loggers import CSVLogger

from ppokit import ObservationNormalizer
from ppokit.plotting import PANELS, plot_frames, plot_run, read_run, record_episode
from tests.blocks import categorical_actor

History = list[dict[str, float]]


def history(seed: int = 0, updates: int = 20, frames: int = 100) -> History:
    """Statistics of every panel, from random numbers."""
    rng = np.random.default_rng(seed)
    names = [name for names in PANELS.values() for name in names]
    return [
        {name: float(rng.random()) for name in names}
        | {"frames": float(frames), "stopped": float(number % 5 == 0), "kl_limit": 0.5}
        for number in range(updates)
    ]


def axis_of(figure: Figure, title: str) -> Axes:
    (axis,) = (axis for axis in figure.axes if axis.get_title() == title)
    return axis


def test_each_panel_shows_its_statistics_over_the_frames_so_far():
    rows = history()
    figure = plot_run(rows)
    assert [axis.get_title() for axis in figure.axes] == list(PANELS)
    for title, names in PANELS.items():
        axis = axis_of(figure, title)
        for line, name in zip(axis.lines, names, strict=False):
            x, y = np.asarray(line.get_data())
            assert x.tolist() == [100.0 * (n + 1) for n in range(20)]
            assert y.tolist() == [row[name] for row in rows]
    assert [axis.get_xlabel() for axis in figure.axes[-3:]] == ["frames (environment steps)"] * 3
    clipped = axis_of(figure, "clipped share of the frames")
    assert [line.get_linestyle() for line in clipped.lines] == ["-", "--"]


def test_stops_and_their_limit_are_marked():
    rows = history()
    axis = axis_of(plot_run(rows), "KL(old || new) (nats)")
    by_label = {line.get_label(): np.asarray(line.get_data()) for line in axis.lines}
    assert by_label["stops above"][1].tolist() == [0.5, 0.5]
    assert by_label["stopped"][0].tolist() == [100.0, 600.0, 1100.0, 1600.0]
    axis = axis_of(plot_run(rows, kl_limit=0.25), "KL(old || new) (nats)")
    by_label = {line.get_label(): np.asarray(line.get_data()) for line in axis.lines}
    assert by_label["stops above"][1].tolist() == [0.25, 0.25]


def test_runs_under_one_label_are_a_mean_with_its_interval():
    seeds = [history(seed) for seed in range(5)]
    figure = plot_run({"ours": seeds, "theirs": history(9)}, panels={"KL": ["kl"]})
    (axis,) = figure.axes
    ours, theirs = axis.lines[:2]
    x, y = np.asarray(ours.get_data())
    assert (x[0], x[-1]) == (100.0, 2000.0)
    assert y[0] == pytest.approx(np.mean([rows[0]["kl"] for rows in seeds]))
    (band,) = axis.collections
    (path,) = band.get_paths()
    vertices = np.asarray(path.vertices)
    low, high = vertices[:, 1].min(), vertices[:, 1].max()
    assert low < y.min()
    assert high > y.max()
    assert theirs.get_xdata()[-1] == 2000.0
    shorter = plot_run([history(0, updates=20), history(1, updates=10)], panels={"KL": ["kl"]})
    assert shorter.axes[0].lines[0].get_xdata()[-1] == 1000.0
    assert [text.get_text() for text in axis.get_legend().get_texts()][:2] == ["ours", "theirs"]


def logged(rows: Any, folder: Path, name: str = "run") -> Path:
    """Write rows with torchrl's logger, and return the folder."""
    logger, frames = CSVLogger(name, log_dir=str(folder)), 0.0
    for row in rows:
        frames += row["frames"]
        for key, value in row.items():
            logger.log_scalar(key, value, step=int(frames))
    return folder


@pytest.mark.parametrize("kind", ["rows", "CSV"])
def test_nan_in_a_run_or_in_its_log_is_not_drawn(tmp_path: Path, kind: str):
    nan = float("nan")
    rows: History = [
        {"frames": 10.0, "kl": kl, "kl_limit": 0.03, "stopped": 1.0, "reward_scale": nan}
        for kl in (nan, 0.02, nan, 0.04, nan)
    ]
    run: Any = rows if kind == "rows" else logged(rows, tmp_path)
    (axis,) = plot_run(run, panels={"KL": ["kl"], "scale": ["reward_scale"]}).axes
    axis.figure.canvas.draw()
    line, *_, stops = axis.lines
    for drawn in (line, stops):
        np.testing.assert_allclose(drawn.get_data(), [[20.0, 40.0], [0.02, 0.04]])
    assert np.isfinite([*axis.get_xlim(), *axis.get_ylim()]).all()


def test_a_log_of_torchrl(tmp_path: Path):
    rows = [row | {"lr/critic": 0.1} for row in history()]
    expected = plot_run(rows)
    for where in (logged(rows, tmp_path) / "run", str(tmp_path)):
        for axis, other in zip(plot_run(where).axes, expected.axes, strict=True):
            for line, twin in zip(axis.lines, other.lines, strict=True):
                np.testing.assert_allclose(line.get_data(), twin.get_data())
    assert plot_run(tmp_path, panels={"rate": ["lr/critic"]}).axes[0].lines


def test_bad_runs_raise(tmp_path: Path):
    bad: Any = [
        ([{"frames": 1.0}], ValueError, "none of the statistics to draw. They have: frames, total"),
        ([{"frames": 1.0}, {"kl": 1.0}], ValueError, "Row 1 has neither 'total_frames' nor 'fra"),
        ([], ValueError, "the runs have no rows of statistics"),
        ([[]], ValueError, "The run has no rows"),
        *((x, TypeError, "A run is a seq.* of the dict") for x in ([[0.5]], {"kl": 1.0}, None, 3)),
        (tmp_path / "nowhere", FileNotFoundError, "no numbers in files of torchrl's CSVLogger"),
        (tmp_path, FileNotFoundError, "no numbers in files of torchrl's CSVLogger"),
    ]
    for runs, error, message in bad:
        with pytest.raises(error, match=message):
            plot_run(runs)


def test_one_of_several_logged_runs_must_be_named(tmp_path: Path):
    for name in ("a", "b"):
        logged([{"frames": 10.0, "kl": 0.5 * n} for n in range(6)], tmp_path, name)
    with pytest.raises(ValueError, match=r"several runs \(a, b\)"):
        plot_run(tmp_path)
    x, y = np.asarray(plot_run(tmp_path / "a").axes[0].lines[0].get_data())
    assert (x.tolist(), y.tolist()) == (
        [10.0 * n for n in range(1, 7)],
        [0.5 * n for n in range(6)],
    )


@pytest.mark.parametrize(
    ("frames", "kept"),
    [
        ([100, 200, 300, 200, 300, 400], [0, 3, 4, 5]),
        ([100, 200, 300, 150, 250], [0, 3, 4]),
    ],
)
def test_rows_after_the_checkpoint_of_a_resumed_run_are_replaced(
    tmp_path: Path, frames: list[int], kept: list[int]
):
    kl = [float(n) for n in range(len(frames))]
    rows: Any = [{"total_frames": f, "kl": k} for f, k in zip(frames, kl, strict=True)]
    for f, k in zip(frames, kl, strict=True):
        CSVLogger("run", log_dir=str(tmp_path)).log_scalar("kl", k, step=f)
    for run in (rows, tmp_path):
        line = plot_run(run).axes[0].lines[0]
        assert np.asarray(line.get_data()).tolist() == [[frames[n] for n in kept], kept]


def test_a_name_that_is_logged_seldom_loses_its_points_after_the_checkpoint(tmp_path: Path):
    logger = lambda: CSVLogger("run", log_dir=str(tmp_path))  # noqa: E731
    for frames in (10, 20, 30, 40):
        logger().log_scalar("kl", 0.1, step=frames)
    for frames in (20, 40):
        logger().log_scalar("eval", 0.2, step=frames)
    logger().log_scalar("kl", 0.3, step=30)  # resumed at 20
    rows = read_run(tmp_path)
    assert [row["total_frames"] for row in rows] == [10, 20, 30]
    assert [row.get("eval") for row in rows] == [None, 0.2, None]


def test_entries_that_are_no_numbers_are_not_drawn():
    rows: Any = [{"frames": 1.0, "kl": 0.5, "entropy": None, "phase": "train", "lr": np.nan}] * 3
    assert [axis.get_title() for axis in plot_run(rows).axes] == ["KL(old || new) (nats)"]


# -- frames of an episode -----------------------------------------------------------


class Counts(gym.Env):
    """Shows the number of the step, in an observation and as the brightness of a picture."""

    observation_space = gym.spaces.Box(0.0, 255.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, length: int) -> None:
        self.length, self.render_mode = length, "rgb_array"
        self.actions: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.actions.append(int(action))
        self.now += 1
        return np.full(1, self.now, np.float32), 1.0, self.now == self.length, False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), self.now, np.uint8)


class Unseen(Counts):
    """Raises as MuJoCo does where there is no OpenGL."""

    def render(self) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")


class Blank(Counts):
    def render(self) -> Any:
        return None


def more_often_1() -> ProbabilisticActor:
    """A policy that draws 0 in one of four steps."""
    logits = torch.tensor([0.25, 0.75]).log()
    module = TensorDictModule(lambda x: logits + 0 * x, ["observation"], ["logits"])
    return categorical_actor(module)


@pytest.mark.parametrize(
    ("length", "every", "shown"),
    [(7, 1, range(8)), (7, 3, [0, 3, 6]), (50, 1, range(13)), (12, 12, [0, 12])],
)
def test_frames_of_one_episode(length: int, every: int, shown: Sequence[int]):
    env = Counts(length)
    options: Any = {"steps": 12, "every": every, "categorical_action_encoding": True}
    frames = record_episode(lambda: env, more_often_1(), **options)
    assert [int(frame[0, 0, 0]) for frame in frames] == list(shown)
    assert env.actions == [1] * 12  # the most probable ones


def test_frames_are_of_the_policy_in_evaluation_mode():
    """It and the random numbers are as before, and a transform counts nothing."""
    network = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Dropout(0.9))
    actor, norm = categorical_actor(network).train(), ObservationNormalizer(1)
    options: Any = {"categorical_action_encoding": True, "observation_transform": norm}
    torch.manual_seed(0)
    expected = torch.rand(1)
    for seed in range(5):
        torch.manual_seed(seed)
        env = Counts(7)
        record_episode(lambda env=env: env, actor, steps=7, **options)
        assert len({*env.actions}) == 1
    assert all(x.training for x in actor.modules())
    assert norm.count == 0
    torch.manual_seed(0)
    record_episode(lambda: Counts(7), actor, steps=7, **options)
    assert torch.equal(torch.rand(1), expected)
    for bad in ("steps", "every"):
        with pytest.raises(ValueError, match=f"{bad} must be a whole number of at least 1"):
            record_episode(lambda: Counts(7), actor, **{bad: 0})


def test_frames_between_0_and_1_become_bytes():
    """As MinAtar has them."""

    class Floats(Counts):
        def render(self) -> Any:
            return super().render() / 255

    options: Any = {"steps": 6, "categorical_action_encoding": True}
    frames = record_episode(lambda: Floats(6), more_often_1(), **options)
    assert [frame.dtype for frame in frames] == [np.uint8] * 7
    assert [int(frame[0, 0, 0]) for frame in frames] == list(range(7))

    class Others(Counts):
        def render(self) -> Any:
            picture = super().render()
            return picture * 200.0 if len(self.actions) % 2 else picture.astype(np.int64)

    others = record_episode(lambda: Others(6), more_often_1(), **options)
    assert {frame.dtype for frame in others} == {np.dtype(np.uint8)}


def test_frames_of_an_environment_by_its_id():
    network = nn.Linear(4, 2)
    actor = categorical_actor(network)
    norm = ObservationNormalizer(4).freeze()
    options: Any = {"observation_transform": norm, "categorical_action_encoding": True}
    first, again, other = (
        record_episode("CartPole-v1", actor, steps=8, seed=seed, **options) for seed in (0, 0, 1)
    )
    assert first[0].shape == (400, 600, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], other[0])
    figure = plot_frames(first, count=4, title="CartPole")
    assert len(figure.axes) == 4
    for axis, at in zip(figure.axes, [0, 3, 5, 8], strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array(), first[at])
    assert len(plot_frames(first[:3]).axes) == 3


def test_environments_that_cannot_be_drawn_warn_or_raise(monkeypatch: pytest.MonkeyPatch):
    for kind, error in ((Unseen, "AttributeError"), (Blank, r"RuntimeError\(.render\(\) ret")):
        with pytest.warns(UserWarning, match=f"cannot be drawn here: {error}"):
            assert record_episode(partial(kind, 3), more_often_1()) == []
    gym.register("NoRenderMode-v0", partial(Counts, 3))
    with pytest.warns(UserWarning, match="cannot be drawn here: TypeError"):
        assert record_episode("NoRenderMode-v0", more_often_1()) == []
    gym.registry.pop("NoRenderMode-v0")
    monkeypatch.setitem(sys.modules, "pygame", None)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.warns(UserWarning, match="cannot be drawn here: DependencyNotInstalled"):
        assert record_episode("CartPole-v1", more_often_1()) == []
    assert "MUJOCO_GL" not in os.environ
    with pytest.raises(gym.error.NameNotFound):
        record_episode("NoSuchThing-v0", more_often_1())
    with pytest.raises(NameError):
        record_episode(lambda: undefined, more_often_1())  # noqa: F821  # pyright: ignore
    with pytest.raises(ValueError, match="no pictures to draw"):
        plot_frames([])


def test_rows_with_the_same_frames_are_one():
    """As where a resumed run repeats its last update, or an evaluation follows one."""
    rows = [{"total_frames": 100.0 * n, "kl": n} for n in (1, 2, 3)]
    again = {"total_frames": 300.0, "kl": 33.0}
    found = read_run([*rows, again, {"total_frames": 300.0, "score": 7.0}, rows[0] | {"kl": 9.0}])
    assert found == [{"total_frames": 100.0, "kl": 9.0}]
    assert read_run([*rows, again])[2:] == [again]
    assert read_run([*rows, {"total_frames": 300.0, "score": 7.0}])[2:] == [
        {"total_frames": 300.0, "kl": 3.0, "score": 7.0}
    ]
