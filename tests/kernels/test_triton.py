"""The scans in Triton: on CUDA, or on the CPU in a process with Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from ppokit import kernels
from ppokit.functional import gae, linear_scan, reversed_discounted_returns
from tests import reference
from tests.functional.strategies import Layout, assert_matches, layouts

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif("triton" not in kernels.available(), reason="no CUDA")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="extra 'test' is not installed: no triton")
def test_the_interpreter_passes_these_tests():
    """``TRITON_INTERPRET`` is read when Triton is imported."""
    tests = [Path(__file__), ROOT / "tests" / "functional" / "test_golden.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "not interpreter"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PPOKIT_KERNEL": "triton"}
    result = subprocess.run(
        [*command, "-rs", *map(str, tests)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert "skipped" not in result.stdout, result.stdout[-3000:]


# Compiles each kernel for a GPU that need not be there.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ppokit.kernels import triton as kernels

def check(kernel, constants, warps, **types):
    types |= dict.fromkeys(("rows", "inner"), "i64") | {"steps": "i32"}
    types |= dict.fromkeys(constants, "constexpr")
    types |= {name: dtype for name in kernel.arg_names if name not in types}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    assert triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"]

flags = dict.fromkeys(("done_at", "terminated_at"), "*u8")
flags |= dict.fromkeys(("gamma_at", "lmbda_at"), "*fp64")
for dtype in ("*fp32", "*fp64"):
    for reverse in (False, True):
        check(kernels._scan, {"REVERSE": reverse, "BLOCK": kernels.ROWS}, 1)
    for steps in (2, kernels.MOST_STEPS_APART, kernels.MOST_STEPS):
        constants = {"STEPS": steps, "BLOCK": max(kernels.TILE // steps, 1)}
        check(kernels._gae, constants, 2, **flags)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="extra 'test' is not installed: no triton")
@pytest.mark.parametrize("capability", [80, 90])
def test_without_the_interpreter_the_kernels_compile_for(capability: int):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(scope="module")
def _in_triton() -> Iterator[None]:
    with kernels.use("triton"), np.errstate(invalid="ignore"):
        yield


LAYOUTS = layouts((torch.float64, torch.float32), DEVICE)
DISCOUNTS = st.sampled_from([0.5, 0.97, 1.0])


def on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [x.cpu() for x in tensors]


@needs_triton
@pytest.mark.usefixtures("_in_triton")
@settings(max_examples=100)
@given(LAYOUTS, DISCOUNTS, DISCOUNTS)
def test_drawn_advantages(layout: Layout, gamma: float, lmbda: float):
    inputs = [*(layout.normal(odd=True) for _ in range(3)), layout.ends(), layout.ends()]
    options = {"gamma": gamma, "lmbda": lmbda, "dim": layout.dim}
    expected = reference.gae(*on_cpu(*inputs), **options)
    for found, value in zip(gae(*inputs, **options), expected, strict=True):
        assert_matches(found, value, layout.dtype)


@needs_triton
@pytest.mark.usefixtures("_in_triton")
@settings(max_examples=100)
@given(LAYOUTS, DISCOUNTS)
def test_drawn_returns(layout: Layout, gamma: float):
    reward, done, initial = layout.normal(odd=True), layout.ends(), layout.row()
    options = {"gamma": gamma, "dim": layout.dim}
    found = reversed_discounted_returns(reward, done, initial=initial, **options)
    options["initial"] = initial.cpu()
    expected = reference.reversed_discounted_returns(*on_cpu(reward, done), **options)
    for x, y in zip(found, expected, strict=True):
        assert_matches(x, y, layout.dtype)


@needs_triton
@pytest.mark.usefixtures("_in_triton")
@settings(max_examples=100)
@given(LAYOUTS, st.booleans())
def test_drawn_scans(layout: Layout, reverse: bool):
    x, decay, initial = layout.normal(odd=True), layout.uniform(), layout.row()
    options = {"reverse": reverse, "dim": layout.dim}
    found = linear_scan(x, decay, initial=initial, **options)
    expected = reference.linear_scan(*on_cpu(x, decay), initial=initial.cpu(), **options)
    assert_matches(found, expected, layout.dtype)


@needs_triton
@pytest.mark.usefixtures("_in_triton")
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients(reverse: bool):
    options = {"dtype": torch.float64, "device": DEVICE, "requires_grad": True}
    x, decay, initial = torch.randn(3, 4, 2, **options), torch.rand(3, 4, 2, **options), None
    initial = torch.randn(3, 2, **options)

    def scan(x: Tensor, decay: Tensor, initial: Tensor) -> Tensor:
        return linear_scan(x, decay, initial=initial, reverse=reverse)

    assert gradcheck(scan, (x, decay, initial))


@needs_triton
@pytest.mark.usefixtures("_in_triton")
def test_discounts_in_tensors_are_not_read():
    x = torch.ones(2, 4, 1, device=DEVICE)
    done = torch.zeros(2, 4, 1, dtype=torch.bool, device=DEVICE)
    half = torch.tensor(0.5, device=DEVICE)
    found = gae(x, x, x, done, done, gamma=half, lmbda=half)
    torch.testing.assert_close(found, gae(x, x, x, done, done, gamma=0.5, lmbda=0.5))


@needs_triton
@pytest.mark.usefixtures("_in_triton")
@pytest.mark.parametrize("last", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("shape", [(2, 1_100), (2, 150, 3)])
def test_rows_of_several_tiles(last: float, shape: tuple[int, ...]):
    """Products of decays underflow: what is not finite is neither lost nor made NaN."""
    reward = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    reward[0, -1] = reward[1, 0] = last
    flags = torch.zeros(shape, dtype=torch.bool)
    flags[0, 40] = flags[1, 60] = True
    value, options = reward.flip(0).nan_to_num(0.0, 0.0), {"gamma": 0.5, "lmbda": 0.5, "dim": 1}
    expected = reference.gae(reward, value, value, flags, flags, **options)
    found = gae(*(x.to(DEVICE) for x in (reward, value, value, flags, flags)), **options)
    sums = reversed_discounted_returns(reward.to(DEVICE), flags.to(DEVICE), gamma=0.5, dim=1)
    expected += reference.reversed_discounted_returns(reward, flags, gamma=0.5, dim=1)
    for x, y in zip((*found, *sums), expected, strict=True):
        torch.testing.assert_close(x.cpu(), y.to(x.dtype), equal_nan=True)
