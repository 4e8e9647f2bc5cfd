"""The choice of kernel, what each is given, and what the operator is to the rest of torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from ppokit import kernels
from ppokit.functional import gae, linear_scan, reversed_discounted_returns
from ppokit.kernels import fused
from tests import reference

native = pytest.mark.skipif("native" not in kernels.available(), reason="no C compiler")


# torch itself scripts its forward-mode formulas, and deprecates scripting.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
# torch.library.opcheck reads the gradients of its own copies.
opcheck = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
)


def scan_inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)


def gae_inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    floats = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    done = torch.rand(shape) < 0.1
    return [*floats, done, done & (torch.rand(shape) < 0.5)]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    variables = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


# -- the choice ----------------------------------------------------------------


def test_torch_is_always_there():
    assert kernels.available()[-1] == "torch"


@native
def test_use_forces_a_kernel_and_gives_it_back():
    with kernels.use(None):
        chosen = kernels.fused_kernel(torch.ones(1))
        with kernels.use("torch"):
            assert kernels.fused_kernel(torch.ones(1)) is None
            with kernels.use("native"):
                assert kernels.fused_kernel(torch.ones(1)) is chosen is not None
            assert kernels.fused_kernel(torch.ones(1)) is None


def test_unknown_kernel_raises():
    with (
        pytest.raises(ValueError, match=r"'triton'.*not in this installation, which has.*torch"),
        kernels.use("triton"),
    ):
        pass


@native
@pytest.mark.parametrize("name", ["native", "torch"])
def test_the_environment_forces_a_kernel(name: str):
    code = "import torch; from ppokit import kernels; "
    code += "print(kernels.fused_kernel(torch.ones(1)) is None)"
    assert run_python(code, PPOKIT_KERNEL=name).stdout.strip() == str(name == "torch")


def test_the_environment_refuses_an_unknown_kernel():
    result = run_python("import ppokit.kernels", PPOKIT_KERNEL="numba")
    assert result.returncode
    assert "'numba' (PPOKIT_KERNEL, or kernels.use) is not in this installation" in result.stderr


def test_works_without_the_extension():
    code = """
import sys
sys.modules["ppokit.kernels.native"] = None
import torch
from ppokit import kernels
from ppokit.functional import linear_scan
assert kernels.available() == ("torch",)
print(linear_scan(torch.ones(3, 1), 1.0).flatten().tolist())
"""
    assert run_python(code, PPOKIT_KERNEL="").stdout.strip() == "[1.0, 2.0, 3.0]"


@native
def test_a_torch_without_its_private_names_takes_the_slow_way():
    """They are there again once ppokit is imported: torch itself cannot do without them."""
    code = """
import torch, torchrl.collectors, torchrl.objectives, torchrl.trainers
from torch.autograd import forward_ad
names = ("_len_torch_dispatch_stack", "_is_tracing", "_are_functorch_transforms_active")
kept = [(torch._C, name, getattr(torch._C, name)) for name in names]
kept.append((forward_ad, "_current_level", forward_ad._current_level))
for owner, name, _ in kept:
    delattr(owner, name)
from ppokit import kernels
from ppokit.functional import gae, linear_scan
assert kernels.in_forward_mode() and kernels.in_function_transform()
for owner, name, value in kept:
    setattr(owner, name, value)
assert kernels.fused_kernel(torch.ones(1)) is None
x = torch.ones(3, 1, requires_grad=True)
y = linear_scan(x, 0.5)
y.sum().backward()
batched = torch.func.vmap(linear_scan)(torch.ones(2, 3, 1), torch.full((2, 3, 1), 0.5))[1]
done, zeros = torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 1)
advantage, _ = gae(torch.ones(3, 1), zeros, zeros, done, done, gamma=0.5, lmbda=1.0)
print([x.flatten().tolist() for x in (y, x.grad, batched, advantage)])
"""
    result = run_python(code)
    up, down = [1.0, 1.5, 1.75], [1.75, 1.5, 1.0]
    assert result.stdout.strip() == str([up, down, up, down]), result.stderr


# -- the native kernel ---------------------------------------------------------


@native
def test_eager_calls_go_straight_to_it():
    inputs = gae_inputs(2, 9, 1)
    with kernels.use("native"), torch.profiler.profile() as profile:
        gae(*inputs, gamma=0.9, lmbda=0.9)
    names = {event.name for event in profile.events() or () if event.name.startswith("aten::")}
    assert names == {"aten::empty_like", "aten::empty_strided"}


def declined():
    x = torch.arange(1.0, 5.0).reshape(4, 1)
    yield "dtype", x.half()
    yield "integers", x.long()
    yield "negative view", torch._C._VariableFunctions._neg_view(x)
    yield "symbolic zeros", torch._C._VariableFunctions._efficientzerotensor((4, 1))
    yield "meta", x.to("meta")
    yield "sparse", x.to_sparse()
    yield "gradient", x.clone().requires_grad_()
    yield "parameter", nn.Parameter(x)
    yield "empty", torch.ones(0, 1)
    yield "no time", torch.ones(4)
    yield "no tensor", [1.0]


@pytest.mark.parametrize("x", [pytest.param(x, id=name) for name, x in declined()])
def test_other_tensors_take_the_torch_kernel(x):
    assert fused.linear_scan(x, x, None, False, -2) is None
    assert fused.gae(x, x, x, x, x, 0.9, 0.9, -2) is None


@native
def test_wrong_arguments_are_left_to_the_checks():
    reward, value, next_value, done, terminated = gae_inputs(2, 3, 1)
    good = [reward, value, next_value, done, terminated, 0.9, 0.9, -2]
    assert fused.gae(*good) is not None
    for position, bad in [
        (0, reward.double()),
        (1, value[:, :2]),
        (2, next_value.squeeze(-1)),
        (3, done.float()),
        (4, terminated[:1]),
        (5, 1.5),
        (5, -0.1),
        (5, float("nan")),
        (5, torch.rand(2, 1, 1)),
        (5, torch.tensor(0.9, requires_grad=True)),
        (7, 3),
        (7, -4),
        (7, None),
    ]:
        arguments = [*good[:position], bad, *good[position + 1 :]]
        assert fused.gae(*arguments) is None, (position, bad)
    for initial in (torch.ones(1, 1), torch.ones(2, 3, 1)):
        assert fused.linear_scan(reward, value, initial, False, -2) is None


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (9, 513, 1), (8, 256, 1), (3, 40, 65), (2, 33, 64), (2, 3, 4, 5), (1001, 3)],
)
@pytest.mark.parametrize("dim", [-2, 0, -1])
def test_shapes_that_fill_no_block(shape: tuple[int, ...], dim: int):
    inputs = gae_inputs(*shape)
    found = gae(*inputs, gamma=0.97, lmbda=0.9, dim=dim)
    expected = reference.gae(*inputs, gamma=0.97, lmbda=0.9, dim=dim)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_a_discount_of_0_stops_what_is_not_finite():
    reward = torch.tensor([[torch.inf], [1.0], [torch.nan], [2.0]])
    done = torch.zeros(4, 1, dtype=torch.bool)
    returns, carry = reversed_discounted_returns(reward, done, gamma=0.0)
    torch.testing.assert_close(returns, reward, equal_nan=True)
    assert carry.item() == 2.0


def test_expanded_and_overlapping_inputs():
    reward, value, next_value, done, terminated = gae_inputs(4, 6, 1)
    spread = [x[:1].expand(4, 6, 1) for x in (reward, done, terminated)]
    inputs = (spread[0], value, next_value, *spread[1:])
    found = gae(*inputs, gamma=0.9, lmbda=0.9)
    expected = gae(*(x.clone() for x in inputs), gamma=0.9, lmbda=0.9)
    torch.testing.assert_close(found, expected)
    assert all(x.stride() != (0, 1, 1) for x in found)


@pytest.mark.parametrize("number", [1, True, 0])
def test_whole_numbers_are_discounts(number):
    inputs = gae_inputs(2, 9, 1)
    found = gae(*inputs, gamma=number, lmbda=number)
    expected = gae(*inputs, gamma=float(number), lmbda=torch.tensor(float(number)))
    torch.testing.assert_close(found, expected)


def test_discounts_in_tensors_are_read_in_their_own_precision():
    inputs = gae_inputs(2, 40, 1, dtype=torch.float64)
    exact = gae(*inputs, gamma=0.99, lmbda=0.95)
    in_float64 = [torch.tensor(x, dtype=torch.float64) for x in (0.99, 0.95)]
    assert torch.equal(gae(*inputs, gamma=in_float64[0], lmbda=in_float64[1])[0], exact[0])
    in_float32 = [x.float() for x in in_float64]
    assert not torch.equal(gae(*inputs, gamma=in_float32[0], lmbda=in_float32[1])[0], exact[0])


def test_inputs_are_not_modified():
    inputs = gae_inputs(3, 50, 1)
    before = [x.clone() for x in inputs]
    for name in kernels.available():
        with kernels.use(name):
            gae(*inputs, gamma=0.9, lmbda=0.9)
            reversed_discounted_returns(inputs[0], inputs[3], gamma=0.9, initial=inputs[1][:, 0])
            linear_scan(inputs[0], inputs[1], initial=inputs[2][:, 0])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


# -- the operator --------------------------------------------------------------


@opcheck
@pytest.mark.parametrize("grad", [False, True])
def test_operator_passes_torchs_own_checks(grad: bool):
    x, decay = scan_inputs(3, 6, 2)
    initial = torch.randn(3, 2, dtype=torch.float64)
    inputs = [t.requires_grad_(grad) for t in (x, decay, initial)]
    torch.library.opcheck(torch.ops.ppokit.linear_scan.default, (*inputs, True, -2))


@forward_mode
@pytest.mark.parametrize("reverse", [False, True])
def test_forward_mode_derivatives(reverse: bool):
    x, decay = scan_inputs(2, 5, 1)
    inputs = [t.requires_grad_() for t in (x, decay, torch.randn(2, 1, dtype=torch.float64))]

    def scan(x, decay, initial):
        return linear_scan(x, decay, initial=initial, reverse=reverse)

    assert gradcheck(scan, inputs, check_forward_ad=True, check_batched_forward_grad=True)


@forward_mode
def test_forward_mode_sees_a_tangent_without_a_gradient():
    x, decay = scan_inputs(4, 1)
    with forward_ad.dual_level():
        y = linear_scan(forward_ad.make_dual(x, torch.ones_like(x)), decay)
        tangent = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(tangent, linear_scan(torch.ones_like(x), decay))


def test_a_trace_records_it():
    x, decay = scan_inputs(4, 1)
    graph = make_fx(lambda x, decay: linear_scan(x, decay))(x, decay)
    assert "ppokit.linear_scan" in graph.code
    torch.testing.assert_close(graph(decay, x), linear_scan(decay, x))


def test_export():
    class Returns(nn.Module):
        def forward(self, reward: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
            return reversed_discounted_returns(reward, done, gamma=0.9)[0]

    reward, done = torch.randn(2, 300, 1), torch.rand(2, 300, 1) < 0.1
    program = torch.export.export(Returns(), (reward, done))
    assert len(list(program.graph.nodes)) < 30  # time is not unrolled
    found = program.module()(reward, done)
    torch.testing.assert_close(found, reversed_discounted_returns(reward, done, gamma=0.9)[0])
