"""What rl8 computed on recorded inputs, and how close is close enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_RL8: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "rl8.json").read_text())

# meta.tolerance: (rtol, atol)
_TOLERANCE = {torch.float64: (1e-9, 1e-12), torch.float32: (2e-5, 1e-6)}


def rl8(section: str) -> Any:
    """Return one section of the recorded figures."""
    return _RL8[section]


def assert_golden(actual: Tensor, recorded: Any) -> None:
    """Raise unless the tensor agrees with the recorded numbers within rl8.json's tolerance."""
    expected = torch.as_tensor(recorded, dtype=actual.dtype)
    rtol, atol = _TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.detach(), expected, rtol=rtol, atol=atol)
