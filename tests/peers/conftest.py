"""torchrl's own tests, from a checkout of torchrl: ``PPOKIT_TORCHRL`` is its path."""

import os

import pytest

CHECKOUT = os.environ.get("PPOKIT_TORCHRL")
collect_ignore_glob = [] if CHECKOUT else ["test_*.py"]


@pytest.fixture(scope="session")
def checkout():
    return CHECKOUT
