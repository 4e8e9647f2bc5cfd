"""clipped_surrogate, clipped_critic_loss, kl_estimate: the papers' form, a reference, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppokit.functional import clipped_critic_loss, clipped_surrogate, kl_estimate
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
    """The objective as the papers write it."""
    low, high = both_sides(clip_epsilon)
    ratio = log_ratio.exp()
    s = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual_clip is None:
        return s
    return torch.where(advantage < 0, torch.max(s, dual_clip * advantage), s)


# -- clipped_surrogate: the form of the papers ---------------------------------


@settings(max_examples=80)
@given(layouts(), CLIPS, st.sampled_from([None, 1.5, 5.0]))
def test_surrogate_is_the_min_max_form_in_value_and_gradient(layout, clip_epsilon, dual_clip):
    inputs = [layout.normal().requires_grad_() for _ in range(2)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    ours = clipped_surrogate(*inputs, clip_epsilon=clip_epsilon, dual_clip=dual_clip)
    theirs = min_max_form(*doubles, clip_epsilon, dual_clip)
    assert_matches(ours, theirs, layout.dtype)
    if layout.dtype is torch.float64:
        gradients = (
            torch.autograd.grad(*x) for x in ((ours.sum(), inputs), (theirs.sum(), doubles))
        )
        torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


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


# -- clipped_surrogate: bad inputs ---------------------------------------------


THREE = torch.full((3,), 2.0)  # which would be broadcast to [3, 3]
BAD_SURROGATES = [
    ({"log_ratio": torch.ones(3, 1).long()}, TypeError, r"log_ratio has dtype torch.int64"),
    ({"advantage": torch.ones(3, 1).bool()}, TypeError, r"advantage has dtype torch.bool"),
    ({"advantage": THREE}, ValueError, r"\[3\], but log_ratio has shape \[3, 1\].*unsqueeze"),
    ({"clip_epsilon": -0.1}, ValueError, r"clip_epsilon \(low\) must lie in \[0, 1\], got -0.1"),
    (
        {"clip_epsilon": (0.1, -0.2)},
        ValueError,
        r"\(high\) .* \[0, inf\), got -0.2: the ratio would",
    ),
    ({"clip_epsilon": THREE / 10}, ValueError, r"within these bounds has shape \[3, 3\].*\[3, 1\]"),
    ({"dual_clip": 1.0}, ValueError, r"dual_clip must exceed 1, got 1.0.*None turns it off"),
    ({"dual_clip": torch.tensor(1.0)}, ValueError, r"dual_clip must exceed 1, got 1.0"),
    ({"dual_clip": THREE}, ValueError, r"within these bounds has shape \[3, 3\].*\[3, 1\]"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD_SURROGATES)
def test_bad_surrogate_input_raises(changed, error, message):
    good = {"log_ratio": torch.zeros(3, 1), "advantage": torch.ones(3, 1)}
    with pytest.raises(error, match=message):
        clipped_surrogate(**{**good, **changed})


# -- clipped_critic_loss: the reference -----------------------------------------


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


BAD_CRITICS = [
    ({"value": torch.ones(3, 1).long()}, TypeError, r"value has dtype torch.int64"),
    ({"target": THREE}, ValueError, r"target has shape \[3\], but value has .*\[3, 1\].*unsqueeze"),
    ({"old_value": THREE}, ValueError, r"old_value has shape \[3\], but value has .*unsqueeze"),
    ({"old_value": None}, ValueError, r"clip_value needs old_value"),
    ({"clip_value": -0.1}, ValueError, r"clip_value must lie in \[0, inf\), got -0.1"),
    ({"clip_value": THREE}, ValueError, r"within clip_value has shape \[3, 3\].*\[3, 1\]"),
    ({"loss_clip": -1.0}, ValueError, r"loss_clip must lie in \[0, inf\), got -1.0"),
    ({"loss_clip": THREE}, ValueError, r"loss within loss_clip has shape \[3, 3\].*\[3, 1\]"),
    ({"kind": "huber"}, ValueError, r"\['l1', 'l2', 'smooth_l1'\], got 'huber'"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD_CRITICS)
def test_bad_critic_input_raises(changed, error, message):
    good = {name: torch.zeros(3, 1) for name in ("value", "target", "old_value")}
    with pytest.raises(error, match=message):
        clipped_critic_loss(**{**good, "clip_value": 0.2, **changed})


# -- kl_estimate --------------------------------------------------------------


@given(layouts(), st.sampled_from(["k1", "k2", "k3"]))
def test_kl_estimate_equals_reference(layout: Layout, estimator):
    d = layout.normal()
    assert_matches(
        kl_estimate(d, estimator=estimator),
        reference.kl_estimate(d, estimator=estimator),
        layout.dtype,
    )


def test_k3_is_never_negative():
    assert (kl_estimate(torch.linspace(-20, 20, 4001, dtype=torch.float64)) >= 0).all()


def test_k3_of_a_small_ratio_keeps_its_digits():
    # exp(d) - 1 - d would be 0 or 1e-7 in float32
    kl = kl_estimate(torch.tensor([1e-4, -1e-4]))
    torch.testing.assert_close(kl, torch.tensor([5e-9, 5e-9]), rtol=1e-2, atol=0)


def test_bad_kl_input_raises():
    with pytest.raises(TypeError, match=r"log_ratio has dtype torch.int64 \(shape \[3\]\)"):
        kl_estimate(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"estimator must be 'k1', 'k2' or 'k3', got 'k4'"):
        kl_estimate(torch.ones(3), estimator="k4")
