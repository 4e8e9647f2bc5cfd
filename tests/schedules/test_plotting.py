"""A picture of what a scheduler will do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from torch import nn

from ppokit import DualClipPPOLoss, InterpSchedule, ParameterScheduler, StepSchedule
from tests.blocks import make_actor, make_critic

matplotlib.use("Agg")

from matplotlib import pyplot as plt

STEPS = StepSchedule([(0, 0.5), (30, 0.25), (200, 0.0)])
LINE = InterpSchedule.linear(1.0, 0.5, frames=50)
WAVE = InterpSchedule.cosine(1.0, 0.0, frames=100, pieces=4)
TITLES = [
    "lr, actor (Adam)",
    "clip_epsilon (DualClipPPOLoss)",
    "entropy_coeff, go (DualClipPPOLoss)",
    "clip (Holder)",
]


class Holder:
    clip = 0.5


def make_scheduler() -> ParameterScheduler:
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2))], "name": "actor"}])
    loss = DualClipPPOLoss(make_actor(), make_critic(), entropy_coeff={"go": 0.1})
    return ParameterScheduler(
        {
            ("lr", "actor"): (optimizer, STEPS),
            "clip_epsilon": (loss, LINE),
            ("entropy_coeff", "go"): (loss, WAVE),
            "clip": (Holder(), lambda frames: float(frames >= 40)),
        }
    )


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def curves(figure: Any) -> list[Any]:
    """The schedules' lines: the first of each panel."""
    return [panel.lines[0] for panel in figure.axes]


def test_a_panel_for_each_schedule_over_all_frames():
    figure = make_scheduler().plot(100)
    assert [panel.get_title() for panel in figure.axes] == TITLES
    for panel in figure.axes:
        assert panel.get_xlabel() == "frames (environment steps)"
        assert panel.get_xlim() == (0, 100)
    assert figure.number in plt.get_fignums()  # so that plt.show() and notebooks show it


def test_steps_are_drawn_as_steps_and_lines_from_point_to_point():
    steps, line, wave, sampled = curves(make_scheduler().plot(100))
    assert steps.get_drawstyle() == "steps-post"
    assert steps.get_xydata().tolist() == [[0, 0.5], [30, 0.25], [100, 0.25]]
    assert [curve.get_drawstyle() for curve in (line, wave, sampled)] == ["default"] * 3
    assert line.get_xydata().tolist() == [[0, 1], [50, 0.5], [100, 0.5]]
    assert wave.get_xydata().tolist() == [list(point) for point in WAVE.points]
    # of any other callable the points are not known
    assert sampled.get_xdata().tolist() == list(range(101))
    assert sampled.get_ydata().tolist() == [0.0] * 40 + [1.0] * 61


def test_long_runs_are_sampled():
    *_, sampled = curves(make_scheduler().plot(10_000_000))
    xs = sampled.get_xdata()
    assert (len(xs), xs[0], xs[-1]) == (1001, 0, 10_000_000)
    assert all(x == int(x) for x in xs)


@pytest.mark.parametrize("total_frames", [100, 20])
def test_a_mark_where_it_is_now(total_frames: int):
    scheduler = make_scheduler()
    scheduler.step(40)
    figure = scheduler.plot(total_frames)
    for panel, value in zip(figure.axes, scheduler.values.values(), strict=True):
        _, across, mark = panel.lines
        assert mark.get_xydata().tolist() == [[40, value]]
        assert list(across.get_xdata()) == [40, 40]
        (label,) = panel.get_legend().get_texts()
        assert label.get_text() == f"now: {value:.4g}"
        assert panel.get_xlim() == (0, max(total_frames, 40))


def test_plotting_changes_nothing():
    scheduler = make_scheduler()
    scheduler.step(40)
    before = scheduler.values
    scheduler.plot(100)
    assert (int(scheduler.frames), scheduler.values) == (40, before)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_as_many_panels_as_schedules(count: int, tmp_path: Path):
    holder = Holder()
    for number in range(count):
        setattr(holder, f"x{number}", 0.0)
    schedules = {f"x{number}": (holder, StepSchedule.constant(0.1)) for number in range(count)}
    figure = ParameterScheduler(schedules).plot(10)
    assert len(figure.axes) == count
    figure.savefig(tmp_path / "schedules.png")
    assert (tmp_path / "schedules.png").stat().st_size > 1_000


@pytest.mark.parametrize("total_frames", [0, -1, float("nan"), float("inf")])
def test_a_run_of_no_length(total_frames: float):
    with pytest.raises(ValueError, match=f"total_frames must be positive.* got {total_frames}"):
        make_scheduler().plot(total_frames)
    assert not plt.get_fignums()


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    scheduler = make_scheduler()  # itself needs none
    with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install ppokit\[plot\]"):
        scheduler.plot(100)
