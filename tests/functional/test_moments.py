"""masked_mean, masked_std, merge_moments: a slow reference, what is not finite, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppokit.functional import masked_mean, masked_std, merge_moments
from tests import reference
from tests.functional.strategies import FLOATS, Layout, assert_matches, layouts

NAN, ONES = math.nan, torch.ones(3, 1)


def f64(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def moments(x):
    """Count, mean and sum of squared deviations; the mean of nothing is NaN."""
    return torch.tensor(reference.moments(x), dtype=torch.float64).unbind()


# -- masked_mean, masked_std: hand-computed values -----------------------------


def test_by_hand():
    x = torch.tensor([[1.0, 3.0, NAN], [2.0, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_mean(x, mask).item() == 2
    assert masked_std(x, mask).item() == 1
    assert masked_mean(x, mask, 1).tolist() == [2, 2]
    assert masked_mean(x, mask, 0)[:2].tolist() == [1.5, 3]
    assert masked_std(x, mask, 1, correction=0).tolist() == [1, 0]


# -- the reference and reductions ----------------------------------------------


@given(layouts(), st.sampled_from([0, 1]), st.booleans())
def test_equals_reference(layout: Layout, correction, masked):
    x = layout.normal()
    mask = layout.ends() if masked else None
    mean = torch.tensor(reference.mean(x, mask), dtype=torch.float64)
    std = torch.tensor(reference.std(x, mask, correction=correction), dtype=torch.float64)
    assert_matches(masked_mean(x, mask), mean, layout.dtype)
    assert_matches(masked_std(x, mask, correction=correction), std, layout.dtype)


@pytest.mark.parametrize("dim", [0, -1, (0, 2), (0, 1, 2), None])
def test_without_a_mask_they_are_torch_mean_and_std(dim):
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(masked_mean(x, dim=dim), torch.mean(x, dim))
    for correction in (0, 1):
        ours = masked_std(x, dim=dim, correction=correction)
        torch.testing.assert_close(ours, torch.std(x, dim, correction=correction))


# -- what is not finite --------------------------------------------------------


@pytest.mark.parametrize("rubbish", [NAN, math.inf])
def test_what_lies_under_the_mask_is_not_seen(rubbish):
    x, mask = torch.randn(5, 8, dtype=torch.float64), torch.rand(5, 8) < 0.6
    for function in (masked_mean, masked_std):
        clean = x.clone().requires_grad_()
        dirty = x.masked_fill(~mask, rubbish).requires_grad_()
        for dim in (None, 0, 1):
            expected, actual = function(clean, mask, dim), function(dirty, mask, dim)
            assert torch.equal(actual, expected)
            (gradient,) = torch.autograd.grad(actual.sum(), dirty)
            assert torch.equal(gradient, torch.autograd.grad(expected.sum(), clean)[0])
            assert gradient.isfinite().all()
            assert not gradient[~mask].any()


def test_of_too_few_elements_is_nan():
    x = torch.tensor([1.0, 2.0, 3.0])
    none, one = torch.tensor([False] * 3), torch.tensor([False, True, False])
    assert masked_mean(x, none).isnan()
    assert masked_std(x, none).isnan()
    assert masked_std(x, none, correction=0).isnan()
    assert masked_std(x, one).isnan()
    assert masked_std(x, one, correction=0).item() == 0


# -- dtypes, bad inputs --------------------------------------------------------


@pytest.mark.parametrize("function", [masked_mean, masked_std])
@pytest.mark.parametrize("dtype", FLOATS)
def test_keeps_the_dtype_and_sums_half_types_in_float32(function, dtype):
    x = torch.ones(5000, dtype=dtype)
    x[::2] = 3
    result = function(x)
    assert result.dtype == dtype
    assert result.item() == pytest.approx(2 if function is masked_mean else 1, rel=1e-3)


@pytest.mark.parametrize("function", [masked_mean, masked_std])
@pytest.mark.parametrize(
    ("x", "mask", "error", "message"),
    [
        (ONES.long(), None, TypeError, r"x has dtype torch.int64 \(shape \[3, 1\]\)"),
        (ONES, ONES, TypeError, r"mask has dtype torch.float32.*\.bool"),
        (
            ONES,
            ONES[:, 0].bool(),
            ValueError,
            r"mask has shape \[3\], but x has .*\[3, 1\].*unsqueeze",
        ),
    ],
)
def test_bad_input_raises(function, x, mask, error, message):
    with pytest.raises(error, match=message):
        function(x, mask)


# -- merge_moments -------------------------------------------------------------


@given(*[st.lists(st.floats(-1e3, 1e3), max_size=20)] * 3)
def test_any_split_merges_to_the_whole(a, b, c):
    parts = [moments(torch.tensor(x, dtype=torch.float64)) for x in (a, b, c)]
    whole = moments(torch.tensor(a + b + c, dtype=torch.float64))
    if not a + b + c:
        whole = f64(0, 0, 0)
    left = merge_moments(*merge_moments(*parts[0], *parts[1]), *parts[2])
    right = merge_moments(*parts[0], *merge_moments(*parts[1], *parts[2]))
    for merged in (left, right):
        torch.testing.assert_close(merged, tuple(whole), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("mean", [0.0, NAN, 7.0])
def test_an_empty_sample_changes_nothing(mean):
    some, none = f64(3, 5, 2), f64(0, mean, 0)
    assert merge_moments(*some, *none) == tuple(some)
    assert merge_moments(*none, *some) == tuple(some)
    assert merge_moments(*none, *none) == tuple(f64(0, 0, 0))


NAMES = ("count_a", "mean_a", "m2_a", "count_b", "mean_b", "m2_b")


@pytest.mark.parametrize("name", NAMES[1:])
def test_merge_raises_for_other_dtypes_and_shapes(name):
    numbers = dict(zip(NAMES, f64(1, 1, 0, 1, 1, 0), strict=True))
    with pytest.raises(TypeError, match=rf"{name} has dtype torch.float32; .*2\*\*24.*\.double"):
        merge_moments(**{**numbers, name: torch.tensor(1.0)})
    arguments = {n: torch.ones(3, 1, dtype=torch.float64) for n in NAMES}
    other = torch.ones(3, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=rf"{name} has shape \[3\], but count_a has shape \[3, 1\]"
    ):
        merge_moments(**(arguments | {name: other}))
