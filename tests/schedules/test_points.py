"""The schedules people reach for."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppokit import InterpSchedule, StepSchedule

linear, cosine = InterpSchedule.linear, InterpSchedule.cosine
constant, warmup_linear = StepSchedule.constant, InterpSchedule.warmup_linear
FRAMES = 1_000_000
EVERY_KIND = {
    "constant": constant(3e-4),
    "linear": linear(3e-4, 0.1, frames=FRAMES),
    "cosine": cosine(3e-4, 1e-5, frames=FRAMES),
    "short cosine": cosine(1.0, 0.0, frames=7),
    "warm-up": warmup_linear(1e-5, 3e-4, 0.0, warmup=20_000, frames=FRAMES),
}


def exact_cosine(start: float, end: float, frames: int, n: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * n / frames))


# -- values --------------------------------------------------------------------


def test_constant():
    schedule = constant(0.5)
    assert [schedule(n) for n in (0, 1, 10**12)] == [0.5] * 3
    assert schedule == StepSchedule([(0, 0.5)])


@pytest.mark.parametrize(("n", "value"), [(0, 1), (25, 0.8), (50, 0.6), (100, 0.2), (101, 0.2)])
def test_linear_by_hand(n: int, value: float):
    assert linear(1.0, 0.2, frames=100)(n) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("n", "value"), [(0, 0.1), (5, 0.3), (10, 0.5), (60, 0.25), (200, 0)])
def test_warmup_linear_by_hand(n: int, value: float):
    schedule = warmup_linear(0.1, 0.5, 0.0, warmup=10, frames=110)
    assert schedule(n) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("n", "value"), [(0, 1), (250_000, (2 + 2**0.5) / 4), (500_000, 0.5), (1_000_000, 0)]
)
def test_cosine_by_hand(n: int, value: float):
    assert cosine(1.0, 0.0, frames=FRAMES)(n) == pytest.approx(value, abs=1e-15)


def test_cosine_is_torchs():
    """An epoch of torch's scheduler for each point of ours."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64, eta_min=0.1)
    ours = cosine(0.3, 0.1, frames=64_000)
    for n, value in ours.points:
        assert value == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        assert ours(n) == value
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("pieces", [2, 5, 64, 100])
@pytest.mark.parametrize("frames", [1_000_000, 1_000_003])
def test_cosine_is_as_close_as_it_says(pieces: int, frames: int):
    start, end = 3.0, 1.0
    schedule = cosine(start, end, frames=frames, pieces=pieces)
    assert len(schedule.points) == pieces + 1
    errors = [abs(schedule(n) - exact_cosine(start, end, frames, n)) for n in range(0, frames, 101)]
    bound = math.pi**2 / (16 * pieces**2) * (start - end)
    assert 0.6 * bound < max(errors) < 1.001 * bound
    if pieces == 64:
        assert bound < 0.00016 * (start - end)


@pytest.mark.parametrize("frames", [1, 2, 7, 64])
def test_cosine_of_few_frames_is_exact_at_each(frames: int):
    schedule = cosine(3.0, 1.0, frames=frames)
    for n in range(frames + 1):
        assert schedule(n) == pytest.approx(exact_cosine(3.0, 1.0, frames, n), rel=1e-14)


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(1, 10**9), st.integers(2, 200))
def test_cosine_never_turns_back(start: float, end: float, frames: int, pieces: int):
    schedule = cosine(start, end, frames=frames, pieces=pieces)
    values = [value for _, value in schedule.points]
    assert (values[0], values[-1]) == (start, end) == (schedule(0), schedule(frames + 1))
    assert all(isinstance(n, int) for n, _ in schedule.points)
    slack = 1e-12 * max(abs(start), abs(end))
    signs = [math.copysign(1, end - start) * (b - a) for a, b in itertools.pairwise(values)]
    assert all(step >= -slack for step in signs)


# -- as values that can be read back ----------------------------------------------


@pytest.mark.parametrize("schedule", EVERY_KIND.values(), ids=EVERY_KIND.keys())
@pytest.mark.parametrize(
    "copier",
    [lambda s: s, copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
    ids=["itself", "copy", "deepcopy", "pickle"],
)
def test_repr_can_be_read_back(schedule: Any, copier: Callable[[Any], Any]):
    copied = copier(schedule)
    again = eval(repr(copied))
    assert again == copied == schedule
    assert hash(again) == hash(schedule)
    assert type(again) is type(schedule)
    assert again(12_345) == schedule(12_345)


@pytest.mark.parametrize(
    "number", [1e6, 1_000_000, np.int64(1_000_000), np.float32(1e6), torch.tensor(1_000_000)]
)
def test_points_are_plain_numbers(number: Any):
    expected = "InterpSchedule([(0, 1.0), (1000000, 0.5)])"
    assert repr(InterpSchedule([(0, 1), (number, np.float64(0.5))])) == expected
    assert repr(linear(1, np.float64(0.5), frames=number)) == expected
    assert repr(StepSchedule([(0, 1), (2.5, 0)])) == "StepSchedule([(0, 1.0), (2.5, 0.0)])"


@pytest.mark.parametrize("large", [2**53 + 1, 10**18 + 1])
def test_large_numbers_of_frames_stay_exact(large: int):
    assert StepSchedule([(0, 1.0), (large, 2.0)]).points[1][0] == large


# -- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize("frames", [0, -1, 0.5, math.nan, math.inf])
@pytest.mark.parametrize(
    "build",
    [
        lambda n: linear(1.0, 0.0, frames=n),
        lambda n: cosine(1.0, 0.0, frames=n),
        lambda n: warmup_linear(0.0, 1.0, 0.0, warmup=1, frames=n),
    ],
    ids=["linear", "cosine", "warmup_linear"],
)
def test_a_length_that_is_none(build: Callable[[float], Any], frames: float):
    with pytest.raises(ValueError, match=f"frames must be .* of 1 or more, got {frames}"):
        build(frames)


@pytest.mark.parametrize("pieces", [1, 0, 2.5])
def test_too_few_pieces(pieces: Any):
    with pytest.raises(ValueError, match=f"pieces must be .* of 2 or more, got {pieces}"):
        cosine(1.0, 0.0, frames=100, pieces=pieces)


@pytest.mark.parametrize("warmup", [0, 0.5])
def test_a_warmup_of_no_length(warmup: float):
    with pytest.raises(ValueError, match=f"warmup must be .* of 1 or more, got {warmup}"):
        warmup_linear(0.1, 1.0, 0.0, warmup=warmup, frames=100)


@pytest.mark.parametrize("warmup", [100, 101])
def test_a_warmup_that_leaves_nothing(warmup: int):
    with pytest.raises(ValueError, match=f"warmup is {warmup} and frames is 100: .* more than war"):
        warmup_linear(0.1, 1.0, 0.0, warmup=warmup, frames=100)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "build",
    [
        constant,
        lambda x: linear(1.0, x, frames=10),
        lambda x: cosine(x, 0.0, frames=10),
        lambda x: warmup_linear(0.1, x, 0.0, warmup=1, frames=10),
    ],
    ids=["constant", "linear", "cosine", "warmup_linear"],
)
def test_a_value_that_is_not_finite(build: Callable[[float], Any], bad: float):
    with pytest.raises(ValueError, match="is not finite"):
        build(bad)
