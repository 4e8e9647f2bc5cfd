"""The same tests for every kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppokit import kernels


@pytest.fixture(scope="module", params=kernels.available())
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests on one kernel after the other."""
    with kernels.use(request.param):
        yield request.param
