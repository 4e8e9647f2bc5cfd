"""The choice of kernel, what each is given, and what the operator is to the rest of torch."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad, gradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from ppokit import kernels
from ppokit.functional import gae, linear_scan, reversed_discounted_returns
from tests import reference
from tests.functional.strategies import Layout, assert_matches, layouts

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(
    "absent",
    [
        'sys.modules["ppokit.kernels.native"] = None',
        "del torch.Tensor.__dlpack_c_exchange_api__  # as in torch 2.10",
    ],
)
def test_works_without_the_extension(absent: str):
    code = f"""
import sys
import torch
{absent}
from ppokit import kernels
from ppokit.functional import linear_scan
assert kernels.available() == ("torch",)
print(linear_scan(torch.ones(3, 1), torch.ones(3, 1)).flatten().tolist())
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


@native
def test_sources_that_hide_an_installed_kernel_warn(tmp_path: Path):
    """A script in the root of a checkout imports the sources, which have no C kernel."""
    pytest.importorskip("pip")
    checkout, site, away = (tmp_path / name for name in ("checkout", "site", "away"))
    built = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "ppokit", checkout / "ppokit", ignore=built)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    subprocess.run([*install, "--no-index", "--target", site, checkout], check=True)

    def run(folder: Path, kernel: str = "") -> tuple[str, str]:
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(
            "from ppokit import kernels; print(kernels.available()[0])"
        )
        environment = os.environ | {"PYTHONPATH": str(site), "PPOKIT_KERNEL": kernel}
        command = [sys.executable, "script.py"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return done.stdout.strip(), done.stderr

    kernel, warnings = run(checkout)
    assert kernel == "torch"
    assert warnings.count("RuntimeWarning") == 1
    assert f"Python imported {checkout / 'ppokit' / 'kernels'}, which has no C kernel" in warnings
    assert f"installed ppokit has {site / 'ppokit' / 'kernels' / 'native'}" in warnings
    assert "pip install -e ." in warnings
    assert run(checkout, "torch") == ("torch", "")
    assert run(away) == ("native", "")
    for extension in (site / "ppokit" / "kernels").glob("native*.so"):
        extension.unlink()
    assert run(checkout) == run(away) == ("torch", "")


# -- the native kernel ---------------------------------------------------------


DISCOUNTS = st.sampled_from([0.5, 0.97, 1.0])


@native
@settings(max_examples=300)
@given(layouts((torch.float32, torch.float64)), DISCOUNTS, DISCOUNTS)
def test_drawn_advantages(layout: Layout, gamma: float, lmbda: float):
    """Nothing that is not finite crosses an end, whichever steps are computed together."""
    inputs = [*(layout.normal(odd=True) for _ in range(3)), layout.ends(), layout.ends()]
    options = {"gamma": gamma, "lmbda": lmbda, "dim": layout.dim}
    with np.errstate(invalid="ignore"):
        expected = reference.gae(*inputs, **options)
    with kernels.use("native"):
        for found, value in zip(gae(*inputs, **options), expected, strict=True):
            assert_matches(found, value, layout.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17])
def test_numbers_without_rounding_are_exact(steps: int, dtype: torch.dtype):
    """Sums of small whole numbers and halvings: their order does not matter."""
    whole = torch.arange(3 * steps, dtype=dtype).reshape(3, 1, steps, 1) % 7
    done = torch.zeros(1, steps, 1, dtype=torch.bool)
    done[:, steps // 2] = True
    advantage, target = gae(*whole, done, done & False, gamma=1.0, lmbda=0.5)
    expected, following = [], 0.0
    for t in reversed(range(steps)):
        reward, value, next_value = (int(x) for x in whole[:, 0, t, 0])
        following = reward + next_value - value + (0.0 if done[0, t, 0] else 0.5 * following)
        expected.insert(0, following)
    assert advantage.flatten().tolist() == expected
    assert target.flatten().tolist() == [
        a + int(v) for a, v in zip(expected, whole[1, 0], strict=True)
    ]
    decay = torch.where(done, 0, torch.full_like(whole[0], 0.5))
    up, y = linear_scan(whole[0], decay, initial=torch.full((1, 1), 6.0, dtype=dtype)), 6.0
    for t in range(steps):
        y = whole[0, 0, t, 0].item() + decay[0, t, 0].item() * y
        assert up[0, t, 0].item() == y


@native
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_that_overflow_only_without_the_steps_before(reverse: bool):
    """In float32 the second and third term alone are infinite; with the first they are not."""
    x = torch.tensor([-3e38, 3e38, 3e38, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]).unsqueeze(-1)
    x = x.flip(0) if reverse else x
    decay = torch.full_like(x, 0.9)
    y = linear_scan(x, decay, reverse=reverse)
    assert_matches(y, reference.linear_scan(x, decay, reverse=reverse), torch.float32)


@native
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(17))
def test_a_bad_step_at_each_position(position: int, bad: float):
    inputs = gae_inputs(2, 17, 1)
    inputs[0][1, position] = bad
    inputs[3][:, [2, 3, 7, 8, 15]] = True
    options = {"gamma": 0.9, "lmbda": 0.9}
    for found, expected in zip(
        gae(*inputs, **options), reference.gae(*inputs, **options), strict=True
    ):
        assert_matches(found, expected, torch.float32)


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
    assert kernels.fused_scan(x, x, None, False, -2) is None
    assert kernels.fused_gae(x, x, x, x, x, 0.9, 0.9, -2) is None


@native
def test_wrong_arguments_are_left_to_the_checks():
    reward, value, next_value, done, terminated = gae_inputs(2, 3, 1)
    good = [reward, value, next_value, done, terminated, 0.9, 0.9, -2]
    assert kernels.fused_gae(*good) is not None
    for position, bad in [
        (0, reward.double()),
        (1, value[:, :2]),
        (2, next_value.squeeze(-1)),
        (3, done.float()),
        (3, done.byte()),
        (4, terminated[:1]),
        *((position, None) for position in range(8)),
        *((position, bad) for position in range(3) for _, bad in declined()),
        *((position, bad) for position in (3, 4) for bad in (value, [True], done.to("meta"))),
        (5, 1.5),
        (5, -0.1),
        (6, float("nan")),
        (5, torch.rand(2, 1, 1)),
        (5, torch.tensor(0.9, requires_grad=True)),
        (6, "0.9"),
        (7, 3),
        (7, -4),
        (7, 2**70),
        (7, 1.0),
    ]:
        arguments = [*good[:position], bad, *good[position + 1 :]]
        assert kernels.fused_gae(*arguments) is None, (position, bad)
    for initial in (torch.ones(1, 1), torch.ones(2, 3, 1), torch.ones(2), torch.ones(())):
        assert kernels.fused_scan(reward, value, initial, False, -2) is None


@native
def test_calls_keep_no_reference():
    """Of arguments that are taken, copied or declined."""
    good = gae_inputs(2, 40, 1)
    copied = [x.expand(2, 40, 3)[..., :1] for x in gae_inputs(2, 40, 1)]
    wrong = [*gae_inputs(2, 40, 1)[:4], torch.ones(2, 40, 1)]
    initial = torch.ones(2, 1)
    for inputs in (good, copied, wrong):
        before = [sys.getrefcount(x) for x in (*inputs, initial, None, *kernels._TORCH)]
        for _ in range(50):
            kernels.fused_gae(*inputs, 0.9, 0.9, -2)
            kernels.fused_scan(inputs[0], inputs[1], initial, True, -2)
            kernels.fused_scan(inputs[0], inputs[3], None, True, -2)
        after = [sys.getrefcount(x) for x in (*inputs, initial, None, *kernels._TORCH)]
        assert all(abs(x - y) < 10 for x, y in zip(before, after, strict=True))


@native
def test_without_recording_a_gradient_is_no_hindrance():
    inputs = gae_inputs(2, 9, 1)
    expected = kernels.fused_gae(*inputs, 0.9, 0.9, -2)
    inputs[1].requires_grad_()
    assert kernels.fused_gae(*inputs, 0.9, 0.9, -2) is None
    with torch.no_grad():
        found = kernels.fused_gae(*inputs, 0.9, 0.9, -2)
    assert found is not None
    assert expected is not None
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert not x.requires_grad


@native
def test_an_exchange_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch):
    class Header(ctypes.Structure):
        _fields_ = [
            ("major", ctypes.c_uint32),
            ("minor", ctypes.c_uint32),
            ("previous", ctypes.c_void_p),
            ("functions", ctypes.c_void_p * 5),
        ]

    api, name = ctypes.pythonapi, b"dlpack_exchange_api"
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    current = api.PyCapsule_GetPointer(kernels._TORCH[1], name)
    inputs = gae_inputs(2, 9, 1)
    expected = gae(*inputs, gamma=0.9, lmbda=0.9)
    for previous in (None, current):
        header = Header(2, 0, previous)
        capsule = api.PyCapsule_New(ctypes.addressof(header), name, None)
        monkeypatch.setattr(kernels, "_TORCH", (kernels._TORCH[0], capsule, *kernels._TORCH[2:]))
        assert (kernels.fused_gae(*inputs, 0.9, 0.9, -2) is None) == (previous is None)
        torch.testing.assert_close(gae(*inputs, gamma=0.9, lmbda=0.9), expected)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (9, 513, 1),
        (8, 256, 1),
        (3, 40, 65),
        (2, 33, 64),
        (2, 3, 4, 5),
        (1001, 3),
        (7, 3, 1),
    ],
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
