"""One parameter, one writer; and time, which does not go backwards."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from ppokit import AdaptiveKLCoeff, DualClipPPOLoss, InterpSchedule, ParameterScheduler
from tests.blocks import make_actor, make_critic

LINE = InterpSchedule.linear(1.0, 0.0, frames=100)


def make_optimizer(**options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "name": name} for name in ("a", "b")]
    return torch.optim.Adam([{**group, **options} for group in groups], lr=0.3)


def make_loss(**options: Any) -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic(), **options)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


# -- two schedulers --------------------------------------------------------------

TARGETS: dict[Any, Any] = {
    "lr": make_optimizer,
    ("lr", "b"): make_optimizer,
    "clip_epsilon": make_loss,
    ("entropy_coeff", "go"): lambda: make_loss(entropy_coeff={"go": 0.1, "turn": 0.2}),
}


@pytest.mark.parametrize("name", TARGETS, ids=str)
def test_a_second_scheduler_of_a_value_raises(name: Any):
    target = TARGETS[name]()
    scheduler = ParameterScheduler({name: (target, LINE)})
    scheduler.step(10)
    message = r"A ParameterScheduler drives .* of this (Adam|DualClip\w+) already.*`del`"
    with pytest.raises(ValueError, match=message):
        ParameterScheduler({name: (target, LINE)})
    scheduler.step(20)
    assert scheduler.values == {name: LINE(20)}
    del scheduler
    ParameterScheduler({name: (target, LINE)}).step(20)


def test_lr_of_all_groups_overlaps_with_that_of_one():
    optimizer = make_optimizer()
    scheduler = ParameterScheduler({"lr": (optimizer, LINE)})
    with pytest.raises(ValueError, match=r"drives \('lr', 1\) of this Adam"):
        ParameterScheduler({("lr", "b"): (optimizer, LINE)})
    scheduler.step(20)


def test_schedulers_of_different_parameters_get_along():
    optimizer, loss = make_optimizer(), make_loss(entropy_coeff={"go": 0.1, "turn": 0.2})
    schedulers = [
        ParameterScheduler({name: (target, LINE)})
        for name, target in {
            ("lr", "a"): optimizer,
            ("lr", "b"): optimizer,
            ("entropy_coeff", "go"): loss,
            ("entropy_coeff", "turn"): loss,
            "clip_epsilon": loss,
        }.items()
    ]
    for frames in (25, 50):
        for scheduler in schedulers:
            scheduler.step(frames)
    assert rates(optimizer) == [0.5, 0.5]
    assert loss.head_entropy_coeff.tolist() == [0.5, 0.5]


def test_a_deleted_scheduler_is_no_writer_though_a_cycle_keeps_it():
    optimizer = make_optimizer()
    scheduler = ParameterScheduler({"lr": (optimizer, LINE)})
    scheduler.itself = [scheduler]  # pyright: ignore
    del scheduler
    ParameterScheduler({"lr": (optimizer, LINE)}).step(20)


def test_copies_are_writers_of_their_own_targets():
    optimizer = make_optimizer()
    scheduler = ParameterScheduler({"lr": (optimizer, LINE)})
    twin, twins_optimizer = copy.deepcopy((scheduler, optimizer))
    for frames in (20, 40):
        scheduler.step(frames)
        twin.step(frames)
    assert rates(optimizer) == rates(twins_optimizer) == [0.6, 0.6]


# -- two schedules, or another kind of writer --------------------------------------


def test_two_names_for_one_tensor():
    rate = torch.tensor(0.3)
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate) for _ in range(2))
    for optimizer in (one, other):
        optimizer.param_groups[0]["name"] = f"group {id(optimizer)}"
    schedules = {("lr", o.param_groups[0]["name"]): (o, LINE) for o in (one, other)}
    with pytest.raises(ValueError, match=r"drive the same parameter of SGD; the later one would"):
        ParameterScheduler(schedules)


def test_a_schedule_beside_an_adaptive_coefficient():
    loss = make_loss(kl_coeff=0.1)
    adaptive = AdaptiveKLCoeff(loss)
    with pytest.raises(ValueError, match=r"AdaptiveKLCoeff drives 'kl_coeff' of this DualClip"):
        ParameterScheduler({"kl_coeff": (loss, LINE)})
    scheduler = ParameterScheduler({"target_kl": (adaptive, LINE), "clip_epsilon": (loss, LINE)})
    scheduler.step(50)
    assert adaptive.target_kl == 0.5


def test_another_scheduler_leaves_everything_where_it_was():
    optimizer, loss = make_optimizer(), make_loss()
    scheduler = ParameterScheduler({"clip_epsilon": (loss, LINE), "lr": (optimizer, LINE)})
    scheduler.step(25)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ValueError, match=r"Another learning-rate scheduler drives this Adam"):
        scheduler.step(50)
    assert (int(scheduler.frames), loss.clip_epsilon.item()) == (25, 0.75)


# -- frames ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (24, r"step\(24\) goes backwards: the scheduler is at 25 frames\. Pass the absolute"),
        (-1, r"step\(-1\) goes backwards"),
        (25.5, r"step\(25\.5\): frames are environment steps, a whole number"),
        (math.nan, r"step\(nan\): frames are environment steps, a whole number"),
        (math.inf, r"step\(inf\): frames are environment steps, a whole number"),
    ],
)
def test_frames_that_are_none_and_frames_that_are_past(frames: float, message: str):
    optimizer = make_optimizer()
    scheduler = ParameterScheduler({"lr": (optimizer, LINE)})
    scheduler.step(25)
    with pytest.raises(ValueError, match=message):
        scheduler.step(frames)
    assert (int(scheduler.frames), rates(optimizer)) == (25, [0.75, 0.75])


@pytest.mark.parametrize("frames", [50, 50.0, torch.tensor(50), torch.tensor(50.0)], ids=repr)
def test_frames_of_any_kind(frames: Any):
    scheduler = ParameterScheduler({"lr": (make_optimizer(), LINE)})
    scheduler.step(frames)
    assert scheduler.frames.dtype == torch.int64
    assert scheduler.values == {"lr": 0.5}
