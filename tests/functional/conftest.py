"""Every kernel that this machine has, and every way it may take, passes the same tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ppokit import kernels
from ppokit.kernels import torch as torch_kernel

NATIVE = kernels.native_kernel()
WAYS = [f"native-{name}" for name in NATIVE.instruction_sets()] if NATIVE else []
# The torch kernel chooses by size and device: here its ways are taken at any size.
WAYS += ["torch-doubling", "torch-blocks", "torch-pairs"]


@pytest.fixture(scope="module", params=WAYS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests on one kernel after the other."""
    name, way = request.param.split("-")
    with kernels.use(name), pytest.MonkeyPatch.context() as patch:
        if NATIVE and name == "native":
            before = NATIVE.use_instruction_set(way)
            yield name
            NATIVE.use_instruction_set(before)
            return
        patch.setattr(torch_kernel, "_FEW", torch.inf if way == "doubling" else 0)
        if way == "pairs":
            nowhere = torch.tensor(torch.nan)
            patch.setattr(torch_kernel, "_scan_finite", lambda *_: nowhere)
        yield name
