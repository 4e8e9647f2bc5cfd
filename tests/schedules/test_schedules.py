"""StepSchedule and InterpSchedule: their values, their constructors, and bad points."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppokit import InterpSchedule, StepSchedule
from tests.golden import rl8

SCHEDULES = rl8("schedulers")
KINDS = {"step": StepSchedule, "interp": InterpSchedule}


# -- values -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", SCHEDULES["cases"], ids=lambda case: case["name"])
def test_golden_values_of_rl8(case: dict[str, Any]):
    """rl8 sorts its points; points in another order raise here."""
    frames = [point[0] for point in case["schedule"]]
    if frames != sorted(set(frames)):
        with pytest.raises(ValueError, match=r"Point 2, .* does not come after point 1, "):
            KINDS[case["kind"]](case["schedule"])
        return
    schedule = KINDS[case["kind"]](case["schedule"])
    for count, value in zip(case["counts"], case["values"], strict=True):
        if count >= 0:
            assert schedule(count) == value, count


@pytest.mark.parametrize("case", SCHEDULES["errors"], ids=lambda c: f"{c['kind']}{c['schedule']}")
def test_golden_errors_of_rl8(case: dict[str, Any]):
    with pytest.raises(ValueError, match="The first point must be at frame 0"):
        KINDS[case["kind"]](case["schedule"])


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (StepSchedule([(0, 0.5)]), {0: 0.5, 1: 0.5, 10**12: 0.5}),
        (StepSchedule([(0, 1), (10, 0)]), {0: 1, 9.5: 1, 10: 0, 1e9: 0}),
        (InterpSchedule([(0, 1), (10, 0), (20, 4)]), {0: 1, 0.5: 0.95, 10: 0, 15: 2, 1e9: 4}),
        (StepSchedule([(0, 1.0), (2**53 + 1, 2.0)]), {2**53: 1.0, 2**53 + 1: 2.0}),
    ],
    ids=["constant", "step", "interp", "2**53"],
)
def test_values_by_hand(schedule: Any, values: dict[float, float]):
    for frames, value in values.items():
        assert schedule(frames) == pytest.approx(value, rel=1e-15, abs=1e-15)
        assert type(schedule(frames)) is float


@st.composite
def point_lists(draw: st.DrawFn) -> list[tuple[int, float]]:
    gaps = draw(st.lists(st.integers(1, 10**7), max_size=6))
    frames = list(itertools.accumulate([0, *gaps]))
    return [(n, draw(st.floats(-1e3, 1e3))) for n in frames]


@given(point_lists(), st.floats(0, 1))
def test_schedules_meet_their_points_and_stay_between_them(points: Any, share: float):
    step, interp = StepSchedule(points), InterpSchedule(points)
    for frames, value in points:
        assert step(frames) == interp(frames) == value
    end, last = points[-1]
    assert step(end + 1) == interp(end + 10**9) == last
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        between = x0 + share * (x1 - x0)
        assert step(between) == (y0 if between < x1 else y1)
        assert min(y0, y1) - 1e-9 <= interp(between) <= max(y0, y1) + 1e-9


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_schedules_are_values_with_a_repr_that_evaluates(copier: Callable[[Any], Any]):
    for schedule in (StepSchedule([(0, 3e-4)]), InterpSchedule([(0, 1), (9, 0.1)])):
        again = eval(repr(copier(schedule)))
        assert again == schedule
        assert hash(again) == hash(schedule)
    assert StepSchedule([(0, 1.0)]) != InterpSchedule([(0, 1.0)])


# -- bad input --------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no points": (lambda: StepSchedule([]), r"put \(0, value\) first"),
    "first": (lambda: InterpSchedule([(1, 2.0)]), r"points are \[\(1, 2.0\)\]. The first"),
    "twice": (
        lambda: StepSchedule([(0, 1.0), (5, 2.0), (5, 3.0)]),
        r"Point 2, \(5, 3.0\), .* point 1, \(5, 2.0\)",
    ),
    "nan": (lambda: InterpSchedule([(0, 1.0), (math.nan, 5)]), "Point 1, .* does not come after"),
    "before 0": (lambda: StepSchedule([(0, 1.0)])(-0.5), "frames must be 0 or more, got -0.5"),
    "at nan": (lambda: StepSchedule([(0, 1.0)])(math.nan), "frames must be 0 or more, got nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_points_raise(name: str):
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()
