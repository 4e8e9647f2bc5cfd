"""ParameterScheduler: frames, bad input, one writer, states; and the schedules themselves."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.objectives import ClipPPOLoss

import ppokit
from ppokit import GAE, InterpSchedule, ParameterScheduler, StepSchedule
from tests.golden import rl8
from tests.schedules.cases import CONSTANT, LINE, Holder, make_loss, make_optimizer, rates

# -- frames -----------------------------------------------------------------------------


@pytest.mark.parametrize("trailing", [(), (1,)], ids=["[B, T]", "[B, T, 1]"])
@pytest.mark.parametrize("key", [("collector", "mask"), "valid", None])
def test_a_batch_advances_by_its_valid_frames_and_gets_the_values(trailing: Any, key: Any):
    optimizer = make_optimizer()
    schedules = {"clip": (Holder(), LINE), ("lr", "a"): (optimizer, LINE)}
    scheduler = ParameterScheduler(schedules, **({"mask_key": key} if key == "valid" else {}))
    batch = TensorDict({}, [5, 8])
    if key is not None:
        mask = torch.zeros(5, 8, *trailing, dtype=torch.bool)
        mask[:, :5] = True
        batch[key] = mask
    assert scheduler(batch) is batch
    frames = 40 if key is None else 25
    assert int(scheduler.frames) == frames
    assert rates(optimizer) == [LINE(frames), 0.3]
    for out_key in (("schedule", "clip"), ("schedule", "lr", "a")):
        assert out_key in scheduler.out_keys
        torch.testing.assert_close(batch[out_key], torch.full((5, 8), LINE(frames)))
    scheduler(TensorDict({}, [0, 5]))
    assert int(scheduler.frames) == frames


@pytest.mark.parametrize("frames", [50, 50.0, torch.tensor(50)], ids=repr)
def test_step_takes_the_absolute_number_of_frames(frames: Any):
    scheduler = ParameterScheduler({"lr": (make_optimizer(), LINE)})
    for _ in range(2):
        scheduler.step(frames)
        assert scheduler.values == {"lr": 0.5}
    assert repr(scheduler).startswith("ParameterScheduler(frames=50, schedules={'lr': Interp")


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (torch.zeros(5, 8), ValueError, "'schedule' of the batch is a Tensor.*rename the entry"),
        (TensorDict({}, [5, 8]).lock_(), RuntimeError, "'schedule' of the batch is locked.*unlock"),
    ],
)
def test_a_batch_that_cannot_take_the_values_is_not_counted(entry: Any, error: Any, message: str):
    scheduler = ParameterScheduler({"lr": (make_optimizer(), LINE)})
    with pytest.raises(error, match=message):
        scheduler(TensorDict({"schedule": entry}, [5, 8]))
    assert int(scheduler.frames) == 0


def beside_torchs_scheduler() -> Any:
    optimizer = make_optimizer(kind=torch.optim.SGD)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


def two_heads() -> Any:
    return make_loss(entropy_coeff={"move": 0.1, "turn": 0.2})


JUMP, HEADS = ("entropy_coeff", "jump"), r"\['move', 'turn'\]"
BAD_TARGETS: list[tuple[Any, Callable[[], Any], type[Exception], str]] = [
    (("lr", "value"), make_optimizer, ValueError, r"named 'value'; the groups .* \['a', 'b'\]"),
    ("lr", Holder, TypeError, "'lr' needs an optimizer, got Holder"),
    ("lr", beside_torchs_scheduler, ValueError, r"drives this SGD .*'initial_lr'.* Keep one"),
    ("slip", Holder, AttributeError, r"Holder.slip is missing or None, .* 'slip' would have no"),
    ("clip", lambda: Holder(None), AttributeError, r"Holder.clip is missing or None"),
    ("clip_eps", make_loss, AttributeError, "clip_eps is missing"),
    ("entropy_coeff", lambda: make_loss(entropy_bonus=False), AttributeError, "is .* without"),
    ("critic_coeff", lambda: make_loss(critic_coeff=0.0), AttributeError, "is .* without"),
    ("critic_coeff", lambda: make_loss(ClipPPOLoss, critic_coeff=1), TypeError, r"torch\.int64"),
    (JUMP, two_heads, AttributeError, rf"'jump'\).* the heads {HEADS}"),
    ("entropy_coeff", two_heads, AttributeError, rf"no coefficient .* the heads {HEADS}"),
    (("entropy_coeff", "turn"), make_loss, AttributeError, "has no coefficient .*'turn'"),
]


@pytest.mark.parametrize(("name", "make", "error", "message"), BAD_TARGETS)
def test_a_target_that_cannot_be_driven_raises(name: Any, make: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        ParameterScheduler({name: (make(), CONSTANT)})


def test_bad_schedules_raise():
    optimizer, gae = make_optimizer(), GAE(gamma=0.9, lmbda=0.95, value_network=None)
    below, above = InterpSchedule([(0, 1.0), (10, -0.1)]), InterpSchedule([(0, 0.9), (10, 1.5)])
    overlapping = {"lr": (optimizer, LINE), ("lr", "a"): (optimizer, LINE)}
    rate, stopper = ppokit.AdaptiveLearningRate(make_optimizer(1e-3)), ppokit.KLEarlyStopper(1.0)
    penalty = ppokit.AdaptiveKLCoeff(make_loss(kl_coeff=0.2))
    bad: Any = [
        ({"clip": (Holder(), 0.1)}, TypeError, "'clip' has .*0.1.; it must have"),
        ({"lr": LINE}, TypeError, r"'lr' has .* must have a target .* \(optimizer, schedule"),
        (overlapping, ValueError, r"'lr' and \('lr', 'a'\) cannot be in one scheduler"),
        ({"lr": (optimizer, below)}, ValueError, r"schedule of .lr. gives -0\.1"),
        ({"gamma": (gae, above)}, ValueError, r"gamma must lie in \[0, 1\], got 1.5"),
        ({"bounds": (rate, LINE)}, TypeError, r"bounds is \(1e-05, 0.01\); a schedule can only"),
        ({"target_kl": (rate, LINE)}, ValueError, "target_kl must be positive and finite, got 0"),
        ({"target_kl": (stopper, below)}, ValueError, "target_kl must be positive, got -0.1"),
        ({"tolerance": (stopper, LINE)}, ValueError, "tolerance must be positive, got 0"),
        (
            {"target_kl": (penalty, LINE)},
            ValueError,
            "target_kl must be positive and finite, got 0",
        ),
    ]
    for schedules, error, message in bad:
        with pytest.raises(error, match=message):
            ParameterScheduler(schedules)
    assert (rates(optimizer), gae.gamma, rate.target_kl) == ([0.3, 0.3], 0.9, 0.01)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (24, r"step\(24\) goes backwards: the scheduler is at 25 frames\. Pass the absolute"),
        (-1, r"step\(-1\) goes backwards"),
        (math.nan, "a whole number, got nan"),
        (50, r"schedule of 'lr' gives nan; Adam needs a finite"),
    ],
)
def test_bad_frames_and_values_raise_and_change_nothing(frames: float, message: str):
    optimizer, holder = make_optimizer(), Holder()
    nan_later = lambda n: math.nan if n == 50 else LINE(n)  # noqa: E731
    scheduler = ParameterScheduler({"clip": (holder, LINE), "lr": (optimizer, nan_later)})
    scheduler.step(25)
    with pytest.raises(ValueError, match=message):
        scheduler.step(frames)
    assert (int(scheduler.frames), rates(optimizer), holder.clip) == (25, [0.75, 0.75], 0.75)


# -- other writers of a value -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("lr", make_optimizer),
        (("lr", "b"), make_optimizer),
        ("clip_epsilon", make_loss),
        (("entropy_coeff", "go"), lambda: make_loss(entropy_coeff={"go": 0.1, "turn": 0.2})),
    ],
)
def test_a_scheduler_may_be_built_again_as_in_a_notebook(name: Any, make: Callable[[], Any]):
    target, bad = make(), InterpSchedule([(0, 0.1), (10, -1.0)])
    first = ParameterScheduler({name: (target, LINE)})
    first.step(20)
    with pytest.raises(ValueError, match=r"-1\.0"):
        ParameterScheduler({name: (target, bad)})
    second = ParameterScheduler({name: (target, LINE)})  # the corrected call
    second.step(50)
    assert (first.values, second.values) == ({name: LINE(20)}, {name: LINE(50)})


def test_a_scheduler_of_torch_that_was_made_later_raises():
    optimizer, loss = make_optimizer(), make_loss()
    scheduler = ParameterScheduler({"lr": (optimizer, LINE), "clip_epsilon": (loss, LINE)})
    scheduler.step(25)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ValueError, match=r"Another learning-rate scheduler drives this Adam"):
        scheduler.step(50)
    assert (int(scheduler.frames), loss.clip_epsilon) == (25, 0.75)


# -- states and copies ------------------------------------------------------------------


def make_scheduler() -> tuple[ParameterScheduler, Any, Callable[[Any], tuple[float, ...]]]:
    module = nn.Module()
    module.register_buffer("coefficient", torch.tensor(7.0))
    targets = Holder(), module, make_optimizer()
    names = "clip", "coefficient", "lr"
    schedule = InterpSchedule([(0, 0.5), (1_000_000, 0.25)])
    pairs = zip(names, targets, strict=True)
    scheduler = ParameterScheduler({name: (target, schedule) for name, target in pairs})
    return scheduler, targets, lambda x: (x[0].clip, x[1].coefficient.item(), *rates(x[2]))


def test_a_scheduler_resumes_from_its_state():
    scheduler, targets, read = make_scheduler()
    scheduler.step(123_457)
    resumed, other, _ = make_scheduler()
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for frames in (123_457, 200_000, 2_000_000):
        scheduler.step(frames)
        resumed.step(frames)
        assert read(other) == read(targets)
    with pytest.raises(ValueError, match="goes backwards"):
        resumed.step(5)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_drives_the_copies_of_its_targets(clone: Callable[[Any], Any]):
    scheduler, targets, read = make_scheduler()
    scheduler.step(500_000)
    twin, others = clone((scheduler, targets))
    twin.step(10**6)
    assert read(others) == (0.25,) * 4
    assert read(targets) == (0.375,) * 4


# -- StepSchedule and InterpSchedule -----------------------------------------------------

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


def test_values_by_hand():
    """Numbers of frames are exact, and values are floats."""
    line = InterpSchedule([(0, 1), (10, 0), (20, 4)])
    assert [line(frames) for frames in (0.5, 10, 15, 1e9)] == pytest.approx([0.95, 0, 2, 4])
    schedule = StepSchedule([(0, 1), (2**53 + 1, 2)])
    assert [schedule(frames) for frames in (0, 2**53, 2**53 + 1)] == [1.0, 1.0, 2.0]
    assert type(schedule(0)) is type(line(0)) is float


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
    "twice": (lambda: StepSchedule([(0, 1.0), (5, 2), (5, 3)]), r"Point 2, .* 1, \(5, 2(.0)?\)"),
    "nan": (lambda: InterpSchedule([(0, 1.0), (math.nan, 5)]), "Point 1, .* does not come after"),
    "before 0": (lambda: StepSchedule([(0, 1.0)])(-0.5), "frames must be 0 or more, got -0.5"),
    "at nan": (lambda: StepSchedule([(0, 1.0)])(math.nan), "frames must be 0 or more, got nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_points_raise(name: str):
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()
