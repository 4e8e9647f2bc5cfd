"""The scans in Triton: on CUDA, or on the CPU in a process with Triton's interpreter."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from ppokit import kernels
from ppokit.functional import gae, linear_scan, reversed_discounted_returns
from tests import reference

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif("triton" not in kernels.available(), reason="no CUDA")
counts = pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="extra 'test' is not installed: no triton")
@counts
def test_the_interpreter_passes_these_tests(count: int):
    """``TRITON_INTERPRET`` is read when Triton is imported."""
    tests = [Path(__file__), ROOT / "tests" / "functional" / "test_golden.py"]
    chosen = "(drawn and 1000)" if count == 1000 else "not interpreter"
    marks = "slow" if count == 1000 else "not slow"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", chosen, "-m", marks]
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


class Drawn:
    """Tensors of a drawn shape, time dimension, dtype and layout."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        sizes = [self.random.choice([1, 2, 3, 5, 33]) for _ in range(self.random.randint(0, 2))]
        self.dim = self.random.randint(-len(sizes) - 1, len(sizes))
        at = self.dim % (len(sizes) + 1)
        self.row_shape = tuple(sizes)
        self.shape = (*sizes[:at], self.random.randint(1, 9), *sizes[at:])
        self.dtype = self.random.choice([torch.float32, torch.float64])
        self.gamma, self.lmbda = (self.random.choice([0.5, 0.97, 1.0]) for _ in range(2))
        self.layout = self.random.choice(["contiguous", "transposed", "sliced", "expanded"])

    def numbers(self, *, wild: bool = True) -> Tensor:
        """Return normal numbers, one in twenty of them not finite."""
        x = torch.randn(self.shape, generator=self.generator, dtype=self.dtype)
        if wild:
            where = torch.rand(self.shape, generator=self.generator)
            for share, value in ((0.05, torch.nan), (0.03, torch.inf), (0.015, -torch.inf)):
                x = torch.where(where < share, value, x)
        return self.laid_out(x)

    def flags(self) -> Tensor:
        """Return flags, one in five of them True."""
        return self.laid_out(torch.rand(self.shape, generator=self.generator) < 0.2)

    def row(self) -> Tensor:
        """Return a number for each row."""
        return torch.randn(self.row_shape, generator=self.generator, dtype=self.dtype).to(DEVICE)

    def laid_out(self, x: Tensor) -> Tensor:
        """Return the same numbers in another layout."""
        x = x.to(DEVICE)
        if self.layout == "transposed":
            return x.movedim(0, -1).contiguous().movedim(-1, 0)
        if self.layout == "sliced":
            return torch.stack([x, x], -1)[..., 0]
        return x[..., :1].expand(x.shape) if self.layout == "expanded" else x

    def check(self, found: Tensor, expected: Tensor) -> None:
        """Raise unless the numbers are those of the reference."""
        limit = 1e-5 if self.dtype is torch.float32 else 1e-12
        options = {"rtol": limit, "atol": limit, "equal_nan": True}
        torch.testing.assert_close(found.cpu().double(), expected, **options)


def drawn(count: int) -> Iterator[Drawn]:
    return map(Drawn, range(count))


@pytest.fixture
def _in_triton() -> Iterator[None]:
    with kernels.use("triton"), np.errstate(invalid="ignore"):
        yield


@needs_triton
@counts
@pytest.mark.usefixtures("_in_triton")
def test_drawn_advantages(count: int):
    for case in drawn(count):
        floats, flags = [case.numbers() for _ in range(3)], [case.flags() for _ in range(2)]
        options = {"gamma": case.gamma, "lmbda": case.lmbda, "dim": case.dim}
        expected = reference.gae(*(x.cpu() for x in (*floats, *flags)), **options)
        for found, value in zip(gae(*floats, *flags, **options), expected, strict=True):
            case.check(found, value)


@needs_triton
@counts
@pytest.mark.usefixtures("_in_triton")
def test_drawn_returns(count: int):
    for case in drawn(count):
        reward, done, initial = case.numbers(), case.flags(), case.row()
        options = {"gamma": case.gamma, "dim": case.dim}
        found = reversed_discounted_returns(reward, done, initial=initial, **options)
        expected = reference.reversed_discounted_returns(
            reward.cpu(), done.cpu(), initial=initial.cpu(), **options
        )
        for x, y in zip(found, expected, strict=True):
            case.check(x, y)


@needs_triton
@counts
@pytest.mark.usefixtures("_in_triton")
def test_drawn_scans(count: int):
    for case in drawn(count):
        x, decay, initial = case.numbers(), case.numbers(wild=False), case.row()
        decay = torch.where(case.flags(), 0.0, decay)
        reverse = case.random.random() < 0.5
        found = linear_scan(x, decay, initial=initial, reverse=reverse, dim=case.dim)
        arguments = (t.cpu() for t in (x, decay))
        expected = reference.linear_scan(
            *arguments, initial=initial.cpu(), reverse=reverse, dim=case.dim
        )
        case.check(found, expected)


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
