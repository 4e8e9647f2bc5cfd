"""clipped_surrogate, clipped_critic_loss: hand values, a slow reference, gradients, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from ppokit.functional import clipped_critic_loss, clipped_surrogate
from tests import reference
from tests.functional.strategies import FLOATS, Layout, assert_matches, layouts

INF, NAN = math.inf, math.nan
CLIPS = st.sampled_from([0.2, (0.1, 0.3), (0.3, 0.05), (1.0, INF), (0.0, 0.0)])
KINDS = ("l1", "l2", "smooth_l1")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def both_sides(clip_epsilon):
    return clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)


def min_max_form(log_ratio, advantage, clip_epsilon, dual_clip):
    """The objective as the papers write it, in torch, for its gradient."""
    low, high = both_sides(clip_epsilon)
    ratio = log_ratio.exp()
    s = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual_clip is None:
        return s
    return torch.where(advantage < 0, torch.max(s, dual_clip * advantage), s)


# -- clipped_surrogate: hand-computed values -----------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (2.0, 1.0, 1.2, 0),  # clipped from above
        (0.5, 1.0, 0.5, 0.5),  # a bad step is never clipped
        (1.1, 2.0, 2.2, 2.2),
        (0.5, -1.0, -0.8, 0),  # clipped from below
        (2.0, -1.0, -2.0, -2.0),
        (20.0, -1.0, -5.0, 0),  # the dual clip
        (20.0, 1.0, 1.2, 0),
        (20.0, 0.0, 0.0, 0),
    ],
)
def test_surrogate_by_hand(ratio, advantage, expected, slope):
    log_ratio = f64(ratio).log().requires_grad_()
    s = clipped_surrogate(log_ratio, f64(advantage), clip_epsilon=0.2, dual_clip=5.0)
    torch.testing.assert_close(s.detach(), f64(expected))
    torch.testing.assert_close(torch.autograd.grad(s.sum(), log_ratio)[0], f64(slope))


# -- clipped_surrogate: the reference, reductions, invariants ------------------


@given(layouts(), CLIPS, st.sampled_from([None, 1.5, 5.0]))
def test_surrogate_equals_reference(layout: Layout, clip_epsilon, dual_clip):
    log_ratio, advantage = layout.normal(), layout.normal()
    low, high = both_sides(clip_epsilon)
    s = clipped_surrogate(log_ratio, advantage, clip_epsilon=clip_epsilon, dual_clip=dual_clip)
    expected = reference.clipped_surrogate(
        log_ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual_clip
    )
    assert_matches(s, expected, layout.dtype)


@given(layouts((torch.float64,)), CLIPS, st.sampled_from([None, 1.5, 5.0]))
def test_surrogate_is_the_min_max_form_in_value_and_gradient(layout, clip_epsilon, dual_clip):
    log_ratio, advantage = layout.normal().requires_grad_(), layout.normal().requires_grad_()
    ours = clipped_surrogate(log_ratio, advantage, clip_epsilon=clip_epsilon, dual_clip=dual_clip)
    theirs = min_max_form(log_ratio, advantage, clip_epsilon, dual_clip)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), (log_ratio, advantage)),
        torch.autograd.grad(theirs.sum(), (log_ratio, advantage)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_surrogate_takes_bounds_as_tensors():
    log_ratio, advantage = torch.randn(50, 1), torch.randn(50, 1)
    numbers = clipped_surrogate(log_ratio, advantage, clip_epsilon=(0.1, 0.3), dual_clip=3.0)
    tensors = clipped_surrogate(
        log_ratio,
        advantage,
        clip_epsilon=(torch.tensor(0.1), torch.tensor(0.3)),
        dual_clip=torch.full((50, 1), 3.0),
    )
    torch.testing.assert_close(tensors, numbers)


# -- clipped_surrogate: what is not finite -------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("extreme", [INF, -INF, 1000.0, -1000.0])
def test_an_extreme_ratio_has_a_finite_objective_and_gradient(dtype, extreme):
    log_ratio = torch.full((3,), extreme, dtype=dtype, requires_grad=True)
    advantage = torch.tensor([1.0, 0.0, -1.0], dtype=dtype, requires_grad=True)
    s = clipped_surrogate(log_ratio, advantage, clip_epsilon=0.5, dual_clip=4.0)
    expected = [1.5, 0, -4] if extreme > 0 else [0, 0, -0.5]
    torch.testing.assert_close(s.detach(), torch.tensor(expected, dtype=dtype))
    gradients = torch.autograd.grad(s.sum(), (log_ratio, advantage))
    assert gradients[0].tolist() == [0, 0, 0]
    slopes = [1.5, 1.5, 4] if extreme > 0 else [0, 0, 0.5]
    torch.testing.assert_close(gradients[1], torch.tensor(slopes, dtype=dtype))


def test_a_nan_ratio_is_not_hidden():
    s = clipped_surrogate(f64(NAN, NAN, 0), f64(1, -1, 1), dual_clip=3.0)
    assert s.isnan().tolist() == [True, True, False]


# -- clipped_surrogate: derivatives and compilation ----------------------------


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_surrogate_gradients(dual_clip):
    inputs = (
        torch.randn(20, 1).double().requires_grad_(),
        torch.randn(20, 1).double().requires_grad_(),
    )

    def objective(log_ratio, advantage):
        return clipped_surrogate(log_ratio, advantage, clip_epsilon=(0.1, 0.3), dual_clip=dual_clip)

    assert gradcheck(objective, inputs)
    assert gradgradcheck(objective, inputs)


def test_surrogate_compiles_without_a_graph_break():
    dual_clip = 2.0
    log_ratio, advantage = torch.randn(20, 1, requires_grad=True), torch.randn(20, 1)

    def objective(log_ratio, advantage):
        return clipped_surrogate(log_ratio, advantage, dual_clip=dual_clip)

    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    ours, eager = compiled(log_ratio, advantage), objective(log_ratio, advantage)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), log_ratio), torch.autograd.grad(eager.sum(), log_ratio)
    )


# -- clipped_surrogate: bad inputs ---------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"log_ratio": torch.ones(3, 1).long()}, TypeError, r"log_ratio has dtype torch.int64"),
        ({"advantage": torch.ones(3, 1).bool()}, TypeError, r"advantage has dtype torch.bool"),
        (
            {"advantage": torch.ones(3)},
            ValueError,
            r"advantage has shape \[3\], but log_ratio has shape \[3, 1\].*unsqueeze",
        ),
        (
            {"clip_epsilon": -0.1},
            ValueError,
            r"clip_epsilon \(low\) must lie in \[0, 1\], got -0.1",
        ),
        (
            {"clip_epsilon": (0.1, -0.2)},
            ValueError,
            r"clip_epsilon \(high\) must lie in \[0, inf\), got -0.2: the ratio would be clipped",
        ),
        (
            {"clip_epsilon": torch.full((3,), 0.2)},
            ValueError,
            r"objective within these bounds has shape \[3, 3\].*\[3, 1\]",
        ),
        (
            {"dual_clip": 1.0},
            ValueError,
            r"dual_clip must exceed 1, got 1.0.*None turns it off",
        ),
        (
            {"dual_clip": torch.tensor(1.0)},
            ValueError,
            r"dual_clip must exceed 1, got 1.0",
        ),
        (
            {"dual_clip": torch.full((3,), 2.0)},
            ValueError,
            r"objective within these bounds has shape \[3, 3\].*\[3, 1\]",
        ),
    ],
)
def test_bad_surrogate_input_raises(changed, error, message):
    good = {"log_ratio": torch.zeros(3, 1), "advantage": torch.ones(3, 1)}
    with pytest.raises(error, match=message):
        clipped_surrogate(**{**good, **changed})


# -- clipped_critic_loss: hand-computed values ---------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"kind": "l1"}, [0.5, 3.0]),
        ({"kind": "l2"}, [0.25, 9.0]),
        ({"kind": "smooth_l1"}, [0.125, 2.5]),
        ({}, [0.125, 2.5]),
        ({"loss_clip": 2.0}, [0.125, 2.0]),
        ({"kind": "l2", "loss_clip": 0.2}, [0.2, 0.2]),
        # clipped values: 0.5 + 0.25 and 1 - 0.25, targets 0.5 and -2
        ({"kind": "l1", "old_value": f64(0.5, 1), "clip_value": 0.25}, [0.5, 3.0]),
        ({"kind": "l1", "old_value": f64(1.5, -1), "clip_value": 0.25}, [0.75, 3.0]),
        ({"kind": "l1", "old_value": f64(1.5, 5), "clip_value": 0.25}, [0.75, 6.75]),
        ({"kind": "l1", "old_value": f64(1.5, 5), "clip_value": 0.25, "loss_clip": 6}, [0.75, 6]),
    ],
)
def test_critic_loss_by_hand(arguments, expected):
    loss = clipped_critic_loss(f64(1, 1), f64(0.5, -2), **arguments)
    assert loss.tolist() == expected


# -- clipped_critic_loss: the reference, reductions, invariants ----------------


@given(
    layouts((torch.float64, torch.float32)),
    st.sampled_from(KINDS),
    st.sampled_from([None, 0.0, 0.3, 10.0]),
    st.sampled_from([None, 0.0, 0.5, 10.0]),
)
def test_critic_loss_equals_reference(layout: Layout, kind, clip_value, loss_clip):
    value, target, old_value = layout.normal(), layout.normal(), layout.normal()
    arguments = {"kind": kind, "clip_value": clip_value, "loss_clip": loss_clip}
    loss = clipped_critic_loss(value, target, old_value=old_value, **arguments)
    expected = reference.clipped_critic_loss(value, target, old_value=old_value, **arguments)
    assert_matches(loss, expected, layout.dtype)


def test_critic_loss_clip_cuts_the_gradient():
    value = f64(0, 0, 0).requires_grad_()
    loss = clipped_critic_loss(value, f64(1, 3, -9), kind="l2", loss_clip=4.0)
    assert torch.autograd.grad(loss.sum(), value)[0].tolist() == [-2, 0, 0]


def test_value_clip_cuts_the_gradient_of_a_value_that_has_moved_towards_its_target():
    value = f64(1, 1).requires_grad_()
    loss = clipped_critic_loss(value, f64(2, -2), old_value=f64(0, 0), clip_value=0.5, kind="l2")
    assert loss.tolist() == [2.25, 9]  # the larger: of the clipped value, of the value
    assert torch.autograd.grad(loss.sum(), value)[0].tolist() == [0, 6]


# -- clipped_critic_loss: bad inputs -------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"value": torch.ones(3, 1).long()}, TypeError, r"value has dtype torch.int64"),
        (
            {"target": torch.ones(3)},
            ValueError,
            r"target has shape \[3\], but value has shape \[3, 1\].*unsqueeze",
        ),
        (
            {"old_value": torch.ones(3)},
            ValueError,
            r"old_value has shape \[3\], but value has shape \[3, 1\].*unsqueeze",
        ),
        ({"old_value": None}, ValueError, r"clip_value needs old_value"),
        ({"clip_value": -0.1}, ValueError, r"clip_value must lie in \[0, inf\), got -0.1"),
        (
            {"clip_value": torch.ones(3)},
            ValueError,
            r"value within clip_value has shape \[3, 3\].*\[3, 1\]",
        ),
        ({"loss_clip": -1.0}, ValueError, r"loss_clip must lie in \[0, inf\), got -1.0"),
        (
            {"loss_clip": torch.ones(3)},
            ValueError,
            r"loss within loss_clip has shape \[3, 3\].*\[3, 1\]",
        ),
        ({"kind": "huber"}, ValueError, r"\['l1', 'l2', 'smooth_l1'\], got 'huber'"),
    ],
)
def test_bad_critic_input_raises(changed, error, message):
    good = {name: torch.zeros(3, 1) for name in ("value", "target", "old_value")}
    with pytest.raises(error, match=message):
        clipped_critic_loss(**{**good, "clip_value": 0.2, **changed})
