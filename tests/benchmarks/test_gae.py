"""The benchmark of GAE cannot leave out a library without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks import gae
from tests.benchmarks.data import Data, check_advantage, reference_advantage


@pytest.mark.parametrize("missing", gae.REQUIRED)
def test_the_full_run_needs_every_library(missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gae, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ModuleNotFoundError, match=rf"{missing}: not installed.*\[bench\]"):
        gae.stages(quick=False)
    assert gae.stages(quick=True)


def test_ratios_are_of_the_same_work():
    """Tianshou makes advantage and returns of the same inputs; its kernel is no peer."""
    pytest.importorskip("tianshou")
    data = Data.draw(3, 40)
    truth = reference_advantage(data)
    for name in ("Tianshou", "Tianshou, float32 rewards", gae.KERNEL):
        call, read = gae.contenders()[name][1](data)
        assert read is not None
        result: Any = call.run()
        check_advantage(name, read(result).reshape(3, 40), truth)
        expected = truth + data.value.squeeze(-1)
        torch.testing.assert_close(torch.from_numpy(result[1]).reshape(3, 40), expected)
    rows = {row.contender: row for row in gae.function_rows((3, 40), 0.05)}
    peers = [row.median_us for name, row in rows.items() if name.startswith(("T", "S", "t", "r"))]
    peers.remove(rows[gae.KERNEL].median_us)
    native = next(iter(rows.values()))
    assert native.best_peer_over_this == min(peers) / native.median_us
