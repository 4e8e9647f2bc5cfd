"""Figures of runs: what is drawn, from which source, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torchrl.record.loggers import CSVLogger, TensorboardLogger

from ppokit.plotting import PANELS, plot_run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

History = list[dict[str, float]]


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


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
    assert [text.get_text() for text in axis.get_legend().get_texts()][:2] == ["ours", "theirs"]


def test_a_band_is_over_the_frames_that_all_runs_have():
    figure = plot_run([history(0, updates=20), history(1, updates=10)], panels={"KL": ["kl"]})
    assert figure.axes[0].lines[0].get_xdata()[-1] == 1000.0


def test_statistics_that_come_now_and_then_or_are_not_finite():
    rows: History = [{"total_frames": 10.0 * n, "lr": 1.0} for n in range(1, 5)]
    rows[1]["episode_return"] = 3.0
    rows[2]["episode_return"] = float("nan")
    rows[3]["episode_return"] = 5.0
    figure = plot_run(rows)
    x, y = np.asarray(axis_of(figure, "return of an episode").lines[0].get_data())
    assert (x.tolist(), y.tolist()) == ([20.0, 40.0], [3.0, 5.0])
    assert len(figure.axes) == 2  # other panels have nothing to show


@pytest.mark.parametrize("where", ["the folder", "its parent"])
def test_a_log_of_torchrl(tmp_path: Path, where: str):
    logger = CSVLogger("run", log_dir=str(tmp_path))
    rows = history()
    for number, row in enumerate(rows):
        for name, value in row.items():
            logger.log_scalar(name, value, step=100 * (number + 1))
        logger.log_scalar("lr/critic", 0.1, step=100 * (number + 1))
    figure = plot_run(tmp_path / "run" if where == "the folder" else str(tmp_path))
    expected = plot_run(rows)
    for axis, other in zip(figure.axes, expected.axes, strict=True):
        for line, twin in zip(axis.lines, other.lines, strict=True):
            np.testing.assert_allclose(line.get_data(), twin.get_data())
    assert plot_run(tmp_path, panels={"rate": ["lr/critic"]}).axes[0].lines


def test_a_log_of_tensorboard(tmp_path: Path):
    logger = TensorboardLogger("run", log_dir=str(tmp_path))
    for number in range(6):
        logger.log_scalar("kl", 0.5 * number, step=10 * number)
    logger.experiment.close()
    x, y = np.asarray(plot_run(tmp_path).axes[0].lines[0].get_data())
    assert (x.tolist(), y.tolist()) == ([10.0 * n for n in range(6)], [0.5 * n for n in range(6)])


def test_bad_input(tmp_path: Path):
    with pytest.raises(ValueError, match="None of the statistics to draw is there: frames, total"):
        plot_run([{"frames": 1.0}])
    with pytest.raises(ValueError, match="Row 1 has neither 'total_frames' nor 'frames', but kl"):
        plot_run([{"frames": 1.0}, {"kl": 1.0}])
    with pytest.raises(ValueError, match="There are no runs to draw"):
        plot_run([])
    with pytest.raises(ValueError, match="no runs to draw"):
        plot_run({})
    with pytest.raises(TypeError, match="sequence of statistics, or the folder of a log"):
        plot_run({"kl": 0.5})
    with pytest.raises(FileNotFoundError, match="is no folder of a log"):
        plot_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="neither the files of torchrl's CSVLogger"):
        plot_run(tmp_path)
    for name in ("a", "b"):
        CSVLogger(name, log_dir=str(tmp_path)).log_scalar("kl", 0.5, step=1)
    with pytest.raises(ValueError, match=r"several runs \(a, b\)"):
        plot_run(tmp_path)
