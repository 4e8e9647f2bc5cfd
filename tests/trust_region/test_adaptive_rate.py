"""AdaptiveLearningRate: the rule, rates in tensors, one writer, and bad input."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrl.objectives import KLAdaptiveLR

from ppokit import AdaptiveLearningRate
from tests.schedules.cases import rates as rates_of

NAN = math.nan
LOW, GOOD, HIGH = 0.001, 0.01, 0.03  # below half of the target, at it, above twice the target


def make_optimizer(*rates: Any, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in rates or (1,)]
    groups = [{"params": [p], "lr": r} for p, r in zip(parameters, rates or (1e-3,), strict=True)]
    return kind(groups, lr=1e-3)


# -- the rule ---------------------------------------------------------------------------


@given(
    kls=st.lists(st.floats(1e-5, 1), max_size=30),
    target=st.floats(1e-4, 1),
    factor=st.floats(1.01, 4),
    rates=st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=3),
)
def test_with_a_positive_kl_it_is_torchrls_rule(kls: Any, target: float, factor: float, rates: Any):
    own, expected = make_optimizer(*rates), make_optimizer(*rates)
    adaptive = AdaptiveLearningRate(own, target_kl=target, factor=factor)
    torchrls = KLAdaptiveLR(expected, target_kl=target, factor=factor)
    for kl in kls:
        adaptive.update(kl)
        torchrls.step(kl)
        assert rates_of(own) == rates_of(expected)


THRESHOLDS = [(0.0, 1), (-0.02, 1), (1e-7, 1), (1.1e-7, 2)]  # 1e-7 may be rounding
THRESHOLDS += [(0.0049, 2), (0.005, 1), (0.02, 1), (0.0201, 0.5), (9.0, 0.5)]


@pytest.mark.parametrize(("kl", "factor"), THRESHOLDS)
def test_thresholds_by_hand(kl: float, factor: float):
    optimizer = make_optimizer(1e-3, 2e-3)
    AdaptiveLearningRate(optimizer, factor=2.0).update(kl)
    assert rates_of(optimizer) == [1e-3 * factor, 2e-3 * factor]


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
@pytest.mark.parametrize("kl", [0.0, NAN, GOOD])
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_a_rate_that_does_not_move_may_be_beyond_the_bounds(kl: float, rate: float):
    optimizer = make_optimizer(1e-3)
    adaptive = AdaptiveLearningRate(optimizer, target_kl=GOOD)
    optimizer.param_groups[0]["lr"] = rate
    adaptive.update(kl)
    assert rates_of(optimizer) == [rate]


def test_each_group_stays_within_the_bounds():
    optimizer = make_optimizer(1e-3, 4e-3)
    adaptive = AdaptiveLearningRate(optimizer, factor=2.0, bounds=(5e-4, 5e-3))
    for kl, expected in ((LOW, [2e-3, 5e-3]), (LOW, [4e-3, 5e-3]), (LOW, [5e-3, 5e-3])):
        adaptive.update(kl)
        assert rates_of(optimizer) == expected
    for _ in range(5):
        adaptive.update(HIGH)
    assert rates_of(optimizer) == [5e-4, 5e-4]


@pytest.mark.parametrize("kl", [NAN, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_changes_nothing_and_warns(kl: float):
    optimizer = make_optimizer()
    with pytest.warns(RuntimeWarning, match=r"is (nan|inf|-inf): the learning rate stays"):
        AdaptiveLearningRate(optimizer).update(torch.tensor(kl))
    assert rates_of(optimizer) == [1e-3]


def test_without_valid_frames_the_rate_stays_and_nothing_warns():
    optimizer = make_optimizer()
    AdaptiveLearningRate(optimizer).update(torch.tensor([NAN, HIGH]), weight=torch.tensor([0, 0]))
    assert rates_of(optimizer) == [1e-3]


# -- rates in tensors -------------------------------------------------------------------


def test_tensors_are_written_in_place_and_once_if_groups_share_one():
    shared = torch.tensor(1e-3, dtype=torch.float64)
    optimizer = make_optimizer(shared, shared, torch.tensor(2e-3), 4e-3)
    tensors = [group["lr"] for group in optimizer.param_groups]
    AdaptiveLearningRate(optimizer, factor=2.0).update(HIGH)
    assert rates_of(optimizer) == pytest.approx([5e-4, 5e-4, 1e-3, 2e-3])
    kept = [a is group["lr"] for a, group in zip(tensors, optimizer.param_groups, strict=True)]
    assert kept == [True, True, True, False]
    assert isinstance(optimizer.param_groups[3]["lr"], float)
    for bound in (1e-5, 1e-2):  # a rate in float32 may be at a bound
        AdaptiveLearningRate(make_optimizer(torch.tensor(bound)))


def test_a_kl_on_a_device_is_not_read():
    """Nothing can be read from the meta device."""
    optimizer = make_optimizer(1e-3, torch.tensor(1e-3))
    adaptive = AdaptiveLearningRate(optimizer)
    kls = torch.zeros(3, device="meta")
    adaptive.update(kls)
    first = [group["lr"] for group in optimizer.param_groups]
    assert all(rate.is_meta and rate.dtype is torch.float32 for rate in first)
    adaptive.update(kls, weight=torch.ones(3))
    adaptive.update(0.03)  # a number of the host
    assert all(a is group["lr"] for a, group in zip(first, optimizer.param_groups, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kl", [LOW, GOOD, HIGH, NAN])
def test_on_a_gpu_the_host_does_not_wait(kl: float):
    parameter = nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    adaptive, expected = AdaptiveLearningRate(optimizer), make_optimizer()
    value = torch.tensor(kl, device="cuda")
    parameter.grad = torch.ones_like(parameter)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            adaptive.update(value)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            AdaptiveLearningRate(expected).update(kl)
    assert rates_of(optimizer) == pytest.approx(rates_of(expected))


# -- other writers -----------------------------------------------------------------------


def test_a_scheduler_of_torch_raises_in_both_orders():
    optimizer = make_optimizer()
    adaptive = AdaptiveLearningRate(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for call in (partial(adaptive.update, HIGH), partial(AdaptiveLearningRate, optimizer)):
        with pytest.raises(ValueError, match=r"drives this SGD .*'initial_lr'.* Keep one"):
            call()
    assert rates_of(optimizer) == [1e-3]


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"target_kl": NAN}, "target_kl must be positive and finite, got nan"),
        ({"target_kl": math.inf}, "target_kl must be positive and finite, got inf"),
        ({"factor": math.inf}, "factor must be above 1 and finite, got inf"),
        ({"factor": 1.0}, r"factor must be above 1 and finite, got 1\.0"),
        (
            {"bounds": (0.0, 1.0)},
            r"bounds must be two finite numbers, .* got \(0\.0, 1\.0\)",
        ),
        ({"bounds": (0.1, 0.01)}, "0 < low <= high"),
        ({"bounds": (1e-5, math.inf)}, "bounds must be two finite numbers, 0 < low <= high"),
        ({"bounds": (1e-5, 1e-3, 1e-2)}, "bounds must be two finite numbers"),
        ({"bounds": (2e-3, 1.0)}, r"rates \[0\.001\] must lie within bounds=\(0\.002, 1\.0\)"),
        ({"bounds": (1e-5, 5e-4)}, r"rates \[0\.001\] must lie within"),
        ({"when": "batch"}, "when must be 'minibatch' or 'epoch', got 'batch'"),
    ],
)
def test_bad_options_raise(option: dict[str, Any], message: str):
    optimizer = make_optimizer()
    with pytest.raises(ValueError, match=message):
        AdaptiveLearningRate(optimizer, **option)
    AdaptiveLearningRate(optimizer)


def test_a_bad_optimizer_raises():
    wrong: Any = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="optimizer must be an Optimizer, got Linear"):
        AdaptiveLearningRate(wrong)
    expected = "AdaptiveLearningRate(lr=[0.001], target_kl=0.01, factor=1.5, when='epoch')"
    assert repr(AdaptiveLearningRate(make_optimizer())) == expected
