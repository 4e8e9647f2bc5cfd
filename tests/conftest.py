import os
import sys

# The tests run in a process for each core (pytest -n 0 for one); threads beside them would wait
# for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")  # no windows

import pytest
import torch
from hypothesis import settings
from torchrl.envs.utils import exploration_type

# The same examples in every run, and no database of failures that would change them.
settings.register_profile("ppokit", derandomize=True, deadline=None, max_examples=40, database=None)
# pytest -n 0 --hypothesis-profile=fuzz tests/fuzz: other examples in each run, for hours.
settings.register_profile("fuzz", deadline=None, max_examples=10_000, database=None)
settings.load_profile("ppokit")


collect_ignore_glob = ["benchmarks/originals/*"]  # run in virtual environments of their own


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    assert exploration_type() is None, "the test has left an exploration type to later ones"


@pytest.fixture(autouse=True)
def _no_figures_left():
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")


def pytest_collection_modifyitems(items):
    """Skip what needs a CUDA device where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
