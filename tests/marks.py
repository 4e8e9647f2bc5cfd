"""Marks of cases."""

from functools import partial

import pytest
from torchrl import modules

slow = partial(pytest.param, marks=pytest.mark.slow)
HAS_TRANSFORMER = hasattr(modules, "CausalTransformer")
nightly = pytest.mark.skipif(
    not HAS_TRANSFORMER, reason="torchrl has no transformer: its nightly has one"
)
