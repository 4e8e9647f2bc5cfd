"""The parts of the benchmark of a GPU, in small on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks import device


@pytest.mark.slow
@pytest.mark.parametrize("part", [device.scans, device.steps, device.loops])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_part_runs(part: Any):
    rows, text = part(torch.device("cpu"), quick=True)
    assert text.startswith("## ")
    assert "nan" not in text
    assert bool(rows) is (part is not device.loops)
