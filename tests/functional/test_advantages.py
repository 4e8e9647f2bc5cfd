"""Discounted returns, GAE: a slow reference, what is not finite, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppokit.functional import gae, reversed_discounted_returns
from tests import reference
from tests.functional.strategies import Layout, assert_matches, layouts

pytestmark = pytest.mark.usefixtures("kernel")

NAN = math.nan
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.97, 1.0])


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool).unsqueeze(-1)


def trajectory(*shape, seed=0, end_probability=0.2):
    """Reward, value, next_value, done, terminated, with both kinds of ends."""
    generator = torch.Generator().manual_seed(seed)
    floats = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3)]
    done = torch.rand(shape, generator=generator) < end_probability
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    return [*floats, done, terminated]


# -- reversed_discounted_returns ---------------------------------------------------------


@settings(max_examples=100)
@given(layouts(), DISCOUNTS, st.booleans())
def test_returns_equal_reference(layout: Layout, gamma, with_initial):
    reward, done = layout.normal(), layout.ends()
    initial = layout.row() if with_initial else None
    arguments = {"gamma": gamma, "initial": initial, "dim": layout.dim}
    returns, carry = reversed_discounted_returns(reward, done, **arguments)
    expected, expected_carry = reference.reversed_discounted_returns(reward, done, **arguments)
    assert_matches(returns, expected, layout.dtype)
    assert_matches(carry, expected_carry, layout.dtype)


def test_a_bad_reward_stays_in_its_episode():
    reward, done = column(1, NAN, 2, 3), flags(0, 1, 0, 1)
    returns, carry = reversed_discounted_returns(reward, done, gamma=0.5)
    assert returns.flatten()[[0, 2, 3]].tolist() == [1, 2, 4]
    assert returns[1].isnan().all()
    assert carry.tolist() == [0]
    _, carry = reversed_discounted_returns(reward[:2], done[:2], gamma=0.5)
    assert carry.tolist() == [0]


# -- gae: the reference ---------------------------------------------------------


@settings(max_examples=150)
@given(layouts(), DISCOUNTS, DISCOUNTS, st.sampled_from(["truncated", "terminated", "mixed"]))
def test_gae_equals_reference(layout: Layout, gamma, lmbda, ends):
    reward, value, next_value = layout.normal(), layout.normal(), layout.normal()
    done, terminated = layout.ends(), layout.ends()
    if ends == "truncated":
        terminated = torch.zeros_like(done)
    elif ends == "terminated":
        terminated = done
    inputs = (reward, value, next_value, done, terminated)
    arguments = {"gamma": gamma, "lmbda": lmbda, "dim": layout.dim}
    advantage, target = gae(*inputs, **arguments)
    expected, expected_target = reference.gae(*inputs, **arguments)
    assert_matches(advantage, expected, layout.dtype)
    assert_matches(target, expected_target, layout.dtype)


def test_gae_with_one_discount_for_each_row():
    batch = trajectory(2, 9, 1)
    gamma = torch.tensor([0.5, 0.9], dtype=torch.float64)
    lmbda = torch.tensor([1.0, 0.7], dtype=torch.float64)
    together = gae(*batch, gamma=gamma.reshape(2, 1, 1), lmbda=lmbda.reshape(2, 1, 1))[0]
    for row in range(2):
        discounts = {"gamma": gamma[row].item(), "lmbda": lmbda[row].item()}
        alone = reference.gae(*(t[row] for t in batch), **discounts)[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-13, atol=1e-13)


# -- gae: what is not finite ---------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_gae_does_not_read_the_value_after_a_terminal_step(bad):
    reward, value, next_value, done, terminated = trajectory(3, 9, 1, end_probability=0.5)
    expected = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8)
    next_value = next_value.masked_fill(terminated, bad).requires_grad_()
    value.requires_grad_()
    actual = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(actual[0].sum(), (value, next_value))
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[1][terminated].any()


@pytest.mark.parametrize(("which", "ending"), [(0, "done"), (1, "terminated"), (2, "done")])
def test_a_bad_frame_stays_in_its_episode(which, ending):
    batch = trajectory(1, 12, 1, end_probability=0)
    *floats, done, terminated = batch
    done[:, [3, 7]] = True
    terminated[:, [3, 7]] = ending == "terminated"
    expected = gae(*batch, gamma=0.9, lmbda=0.8)[0]
    floats[which][:, 5] = NAN
    for tensor in floats:
        tensor.requires_grad_()
    actual = gae(floats[0], floats[1], floats[2], done, terminated, gamma=0.9, lmbda=0.8)[0]
    outside = torch.tensor([t not in range(4, 8) for t in range(12)])
    torch.testing.assert_close(actual[:, outside], expected[:, outside], rtol=1e-12, atol=1e-12)
    assert actual[:, 5].isnan().all()
    gradients = torch.autograd.grad(actual[:, outside].sum(), floats)
    assert all(g[:, outside].isfinite().all() for g in gradients)


# -- bad inputs ----------------------------------------------------------------


def good_returns():
    return {"reward": torch.ones(2, 3, 1), "done": torch.zeros(2, 3, 1).bool(), "gamma": 0.9}


def good_gae():
    floats = {name: torch.ones(2, 3, 1) for name in ("reward", "value", "next_value")}
    ends = {name: torch.zeros(2, 3, 1).bool() for name in ("done", "terminated")}
    return {**floats, **ends, "gamma": 0.9, "lmbda": 0.8}


FUNCTIONS = [(reversed_discounted_returns, good_returns), (gae, good_gae)]


ONES, FLAT = torch.ones(2, 3, 1), torch.ones(2, 3)
UNEVEN = torch.tensor([0.5, 1.5]).reshape(2, 1, 1)
BAD = [
    ({"gamma": -0.1}, ValueError, r"gamma must lie in \[0, 1\], got -0.1.*grow without bound"),
    ({"gamma": NAN}, ValueError, r"gamma must lie in \[0, 1\], got nan"),
    ({"gamma": UNEVEN}, ValueError, r"(?s)gamma must lie in \[0, 1\], got .*grow without bound"),
    ({"gamma": ONES.expand(3, 2, 3, 1)}, ValueError, r"gamma.*\[3, 2, 3, 1\].*\[2, 3, 1\]"),
    ({"reward": ONES.long()}, TypeError, r"reward has dtype torch.int64 \(shape \[2, 3, 1\]\).*be"),
    ({"reward": FLAT}, ValueError, r"but reward has shape \[2, 3\].*squeeze"),
    ({"done": ONES}, TypeError, r"done has dtype torch.float32 .*must be"),
    ({"done": FLAT.bool()}, ValueError, r"done has shape \[2, 3\], but reward has .*unsqueeze"),
    ({"done": ONES[:1].bool()}, ValueError, r"done has shape \[1, 3, 1\], but reward has shape"),
    ({"dim": 3}, ValueError, r"reward has shape \[2, 3, 1\], which has no dimension 3"),
]
BAD_GAE = [
    ({"lmbda": 1.1}, ValueError, r"lmbda must lie in \[0, 1\], got 1.1"),
    ({"value": ONES.long()}, TypeError, "value has dtype torch.int64"),
    ({"next_value": FLAT}, ValueError, r"next_value has shape \[2, 3\].*unsqueeze"),
    ({"terminated": ONES}, TypeError, "terminated has dtype torch.float32"),
]


@pytest.mark.parametrize(
    ("function", "good", "bad", "error", "message"),
    [(*each, *bad) for each in FUNCTIONS for bad in BAD] + [(*FUNCTIONS[1], *x) for x in BAD_GAE],
)
def test_bad_input_raises(function, good, bad, error, message):
    function(**good())
    with pytest.raises(error, match=message):
        function(**{**good(), **bad})


@pytest.mark.parametrize(("function", "good"), FUNCTIONS)
def test_an_empty_batch_raises(function, good):
    empty = {
        name: value[:, :0] if isinstance(value, torch.Tensor) else value
        for name, value in good().items()
    }
    with pytest.raises(ValueError, match=r"reward is empty \(shape \[2, 0, 1\]\)"):
        function(**empty)


def test_an_initial_of_the_wrong_shape_raises():
    with pytest.raises(ValueError, match=r"initial has shape \[2\].*\[2, 1\].*unsqueeze"):
        reversed_discounted_returns(**good_returns(), initial=torch.ones(2))
