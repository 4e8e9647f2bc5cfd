"""linear_scan: hand values, a slow reference, reductions, gradients, vmap, torch.compile."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from ppokit.functional import linear_scan
from tests import reference
from tests.functional.strategies import Layout, assert_matches, layouts

NAN = math.nan

# torch.compile itself makes an instance of autograd.Function, and torch warns of it.
compiles = pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
    ":DeprecationWarning"
)

pytestmark = pytest.mark.usefixtures("kernel")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


# -- hand-computed values ------------------------------------------------------


def test_forward():
    y = linear_scan(f64(1, 2, 3), f64(9, 0.5, 2), dim=0)
    assert y.tolist() == [1, 2.5, 8]  # 1; 2 + 0.5 * 1; 3 + 2 * 2.5


def test_reverse_with_initial():
    y = linear_scan(f64(1, 2, 3), f64(2, 0.5, 0.25), initial=f64(4).squeeze(), reverse=True, dim=0)
    assert y.tolist() == [9, 4, 4]  # 3 + 0.25 * 4; 2 + 0.5 * 4; 1 + 2 * 4


def test_time_is_second_to_last_by_default():
    x = f64(1, 10, 1, 10, 1, 10).reshape(1, 3, 2)
    assert linear_scan(x, 1.0).tolist() == [[[1, 10], [2, 20], [3, 30]]]


# -- the float64 reference -----------------------------------------------------


@given(layouts(), st.booleans(), st.booleans())
def test_equals_reference(layout: Layout, reverse, with_initial):
    x, decay = layout.normal(), layout.uniform()
    initial = layout.row() if with_initial else None
    y = linear_scan(x, decay, initial=initial, reverse=reverse, dim=layout.dim)
    expected = reference.linear_scan(x, decay, initial=initial, reverse=reverse, dim=layout.dim)
    assert_matches(y, expected, layout.dtype)


@given(layouts(), st.booleans(), st.sampled_from([0.0, 0.5, 0.99, 1.0, -0.7]))
def test_equals_reference_with_one_decay(layout: Layout, reverse, decay):
    x = layout.normal()
    y = linear_scan(x, decay, reverse=reverse, dim=layout.dim)
    expected = reference.linear_scan(x, decay, reverse=reverse, dim=layout.dim)
    assert_matches(y, expected, layout.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_in_float32(dtype):
    # A sum of 2000 ones: in bfloat16 it would stop at 256.
    y = linear_scan(torch.ones(2000, 1, dtype=dtype), 1.0)
    assert y.dtype == dtype
    assert y[-1].item() == 2000


# -- reductions ----------------------------------------------------------------


# -- invariants ----------------------------------------------------------------


@given(layouts((torch.float64,)), st.booleans(), st.data())
def test_split_in_time_carries_on(layout: Layout, reverse, data):
    x, decay, initial = layout.normal(), layout.uniform(), layout.row()
    dim, steps = layout.dim, layout.steps
    cut = data.draw(st.integers(0, steps))
    whole = linear_scan(x, decay, initial=initial, reverse=reverse, dim=dim)
    pieces = [(0, cut), (cut, steps - cut)]
    found = []
    for start, length in reversed(pieces) if reverse else pieces:
        part = linear_scan(
            x.narrow(dim, start, length),
            decay.narrow(dim, start, length),
            initial=initial,
            reverse=reverse,
            dim=dim,
        )
        if length:
            initial = part.select(dim, 0 if reverse else length - 1)
        found.append(part)
    joined = torch.cat(found[::-1] if reverse else found, dim)
    torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-12)


# -- what is not finite --------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@given(layouts((torch.float64, torch.float32)), st.booleans(), st.data())
def test_nothing_crosses_a_decay_of_0(bad, layout: Layout, reverse, data):
    x, decay = layout.normal().clone(), layout.uniform()
    x.select(layout.dim, data.draw(st.integers(0, layout.steps - 1))).fill_(bad)
    y = linear_scan(x, decay, reverse=reverse, dim=layout.dim)
    expected = reference.linear_scan(x, decay, reverse=reverse, dim=layout.dim)
    assert_matches(y, expected, layout.dtype)


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


@compiles
def test_compiles_without_a_graph_break():
    def scan(x, decay, initial):
        return linear_scan(x, decay, initial=initial, reverse=True)

    inputs = [torch.randn(3, 6, 1), torch.rand(3, 6, 1), torch.randn(3, 1)]
    inputs = [t.requires_grad_() for t in inputs]
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    expected, actual = scan(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )


# -- bad inputs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (torch.ones(3, 1, dtype=torch.int64), 0.5),
            {},
            TypeError,
            r"x has dtype torch.int64 \(shape \[3, 1\]\).*\.float\(\)",
        ),
        (
            (torch.ones(3, 1), torch.ones(3)),
            {},
            ValueError,
            r"decay has shape \[3\].*x has shape \[3, 1\].*unsqueeze",
        ),
        (
            (torch.ones(2, 3, 1), torch.ones(1, 3, 1)),
            {},
            ValueError,
            r"decay has shape \[1, 3, 1\].*\[2, 3, 1\]",
        ),
        (
            (torch.ones(2, 3, 1), 0.5),
            {"initial": torch.ones(2, 1, 1)},
            ValueError,
            r"initial has shape \[2, 1, 1\].*time.*\[2, 1\]",
        ),
        ((torch.ones(3, 1), 0.5), {"dim": 2}, ValueError, r"\[3, 1\], which has no dimension 2"),
    ],
)
def test_bad_input_raises(arguments, options, error, message):
    with pytest.raises(error, match=message):
        linear_scan(*arguments, **options)
