import os

# The tests run in a process for each core (pytest -n 0 for one); threads beside them would wait
# for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# The same examples in every run, and no database of failures that would change them.
settings.register_profile("ppokit", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("ppokit")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
