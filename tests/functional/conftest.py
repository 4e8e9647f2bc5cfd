"""The same tests for every kernel and for every algorithm of the torch kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ppokit import kernels
from ppokit.kernels import torch as torch_kernel

WAYS = ["native-c"] if "native" in kernels.available() else []
# The torch kernel chooses by size and device: here each algorithm runs at any size.
WAYS += ["torch-doubling", "torch-blocks", "torch-pairs"]


@pytest.fixture(scope="module", params=WAYS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests on one kernel after the other."""
    name, way = request.param.split("-")
    with kernels.use(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernel, "_FEW", torch.inf if way == "doubling" else 0)
        if way == "pairs":
            nowhere = torch.tensor(torch.nan)
            patch.setattr(torch_kernel, "_scan_finite", lambda *_: nowhere)
        yield name


@pytest.fixture(scope="module", params=kernels.available())
def available_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests on every kernel, with the algorithm that it chooses."""
    with kernels.use(request.param):
        yield request.param
