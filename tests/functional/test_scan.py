"""linear_scan: a slow reference, what is not finite, gradients, vmap, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from ppokit.functional import linear_scan
from tests import reference
from tests.functional.strategies import Layout, assert_matches, layouts

NAN = math.nan

pytestmark = pytest.mark.usefixtures("kernel")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


# -- the float64 reference -----------------------------------------------------


@settings(max_examples=200)
@given(
    layouts(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, None, 0.0, 0.5, 0.99, 1.0, -0.7]),
    st.sampled_from([None, None, NAN, math.inf, -math.inf]),
    st.data(),
)
def test_equals_reference(layout: Layout, reverse, with_initial, one_decay, bad, data):
    """Nothing that is not finite crosses a decay of 0."""
    x, decay = layout.normal().clone(), layout.uniform() if one_decay is None else one_decay
    if bad is not None:
        x.select(layout.dim, data.draw(st.integers(0, layout.steps - 1))).fill_(bad)
    options = {"initial": layout.row() if with_initial else None, "reverse": reverse}
    y = linear_scan(x, decay, **options, dim=layout.dim)
    expected = reference.linear_scan(x, decay, **options, dim=layout.dim)
    assert_matches(y, expected, layout.dtype)


def test_no_steps_give_no_results():
    for reverse in (False, True):
        y = linear_scan(torch.ones(2, 0, 1), 0.5, initial=torch.ones(2, 1), reverse=reverse)
        assert y.shape == (2, 0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_in_float32(dtype):
    # A sum of 2000 ones: in bfloat16 it would stop at 256.
    y = linear_scan(torch.ones(2000, 1, dtype=dtype), 1.0)
    assert y.dtype == dtype
    assert y[-1].item() == 2000


# -- what is not finite --------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.1, -0.1])
@pytest.mark.parametrize("steps", [129, 1025])
def test_a_small_decay_is_not_a_cut(dtype, decay, steps):
    # 0.1 ** 64 is 0 in float32: the NaN must reach the end all the same.
    x = torch.ones(steps, 1, dtype=dtype)
    x[0] = NAN
    assert linear_scan(x, decay).isnan().all()
    x[0] = math.inf
    signs = torch.tensor(decay, dtype=dtype).sign() ** torch.arange(steps)
    assert torch.equal(linear_scan(x, decay).squeeze(-1), signs * math.inf)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradient_does_not_cross_a_decay_of_0(reverse):
    x = f64(1, NAN, 2, 3).requires_grad_()
    # nothing enters or leaves step 1
    decay = f64(0.5, 0, 0, 0.5)
    if reverse:
        decay = f64(0, 0, 0.5, 0.5)
    initial = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    y = linear_scan(x, decay, initial=initial, reverse=reverse, dim=0)
    weight = f64(1, NAN, 1, 1)
    gradients = torch.autograd.grad((y * weight).sum(), (x, initial))
    others = gradients[0][[0, 2, 3]]
    assert torch.equal(others, f64(1, 1, 1.5) if reverse else f64(1, 1.5, 1))
    assert gradients[1].item() == (0.75 if reverse else 0.5)


# -- derivatives ---------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("zeros", [False, True], ids=["decays", "with-zeros"])
def test_gradients(reverse, steps, zeros):
    generator = torch.Generator().manual_seed(steps)
    x = torch.randn(2, steps, 1, dtype=torch.float64, generator=generator)
    decay = torch.rand(2, steps, 1, dtype=torch.float64, generator=generator)
    if zeros:
        decay[0, 0] = decay[0, -1] = decay[1, steps // 2] = 0
    initial = torch.randn(2, 1, dtype=torch.float64, generator=generator)
    inputs = tuple(t.requires_grad_() for t in (x, decay, initial))

    def scan(x, decay, initial):
        return linear_scan(x, decay, initial=initial, reverse=reverse)

    assert gradcheck(scan, inputs)
    assert gradgradcheck(scan, inputs)


# -- transforms ----------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_vmap(in_dims):
    shapes = [(5, 1), (5, 1), (1,)]
    inputs = [
        torch.randn(*(() if d is None else (4,)), *s, dtype=torch.float64)
        for d, s in zip(in_dims, shapes, strict=True)
    ]

    def scan(x, decay, initial):
        return linear_scan(x, decay, initial=initial)

    mapped = torch.func.vmap(scan, in_dims=in_dims)(*inputs)
    looped = [
        scan(*(t if d is None else t[i] for t, d in zip(inputs, in_dims, strict=True)))
        for i in range(4)
    ]
    torch.testing.assert_close(mapped, torch.stack(looped), rtol=1e-13, atol=1e-13)


# -- bad inputs ----------------------------------------------------------------


X, WIDE = torch.ones(3, 1), torch.ones(2, 3, 1)
BAD = [
    ({"x": X.long()}, TypeError, r"x has dtype torch.int64 \(shape \[3, 1\]\).*\.float\(\)"),
    ({"decay": torch.ones(3)}, ValueError, r"decay has shape \[3\].*x has .*\[3, 1\].*unsqueeze"),
    ({"x": WIDE, "decay": WIDE[:1]}, ValueError, r"decay has shape \[1, 3, 1\].*\[2, 3, 1\]"),
    ({"x": WIDE, "initial": WIDE[:, :1]}, ValueError, r"has shape \[2, 1, 1\].*time.*\[2, 1\]"),
    ({"dim": 2}, ValueError, r"\[3, 1\], which has no dimension 2"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD)
def test_bad_input_raises(changed, error, message):
    with pytest.raises(error, match=message):
        linear_scan(**{"x": X, "decay": 0.5} | changed)
