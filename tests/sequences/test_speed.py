"""A large batch is cut in less time than its LSTM takes, and in little memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from ppokit import SequenceBatcher

ROWS, STEPS, SEQ_LEN, MINIBATCHES = 8192, 128, 32, 64
STATUS = Path("/proc/self/status")

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's count of resident memory"),
]


def make_batch(dones: float) -> TensorDictBase:
    """What an LSTM from 64 observations to 128 units leaves behind."""
    done = torch.rand(ROWS, STEPS, 1) < dones
    is_init = torch.ones_like(done)
    is_init[:, 1:] = done[:, :-1]
    fill = lambda *shape: torch.empty(ROWS, STEPS, *shape).normal_()  # noqa: E731
    states = lambda: {f"recurrent_state_{name}": fill(1, 128) for name in "hc"}  # noqa: E731
    return TensorDict(
        {
            "observation": fill(64),
            "action": fill(6),
            **{name: fill(1) for name in ("action_log_prob", "state_value", "advantage")},
            "is_init": is_init,
            **states(),
            "next": {
                "observation": fill(64),
                "reward": fill(1),
                "done": done,
                "terminated": done.clone(),
                **states(),
            },
        },
        [ROWS, STEPS],
    )


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure(run: Callable[[], Any]) -> tuple[float, int]:
    """Return the least seconds of three runs, and the most memory that one took."""
    seconds, memory = [], []
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
        before, start = resident("VmRSS"), time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
        memory.append(resident("VmHWM") - before)
        del result
    return min(seconds), max(memory)


@pytest.mark.parametrize("dones", [0.0, 0.01, 0.05])
def test_cutting_takes_less_than_the_lstm(dones):
    torch.set_num_threads(1)
    batch = make_batch(dones)
    own = sum(x.numel() * x.element_size() for x in batch.values(True, True))
    lstm, batcher = nn.LSTM(64, 128, batch_first=True), SequenceBatcher(SEQ_LEN)

    def forward() -> None:
        with torch.no_grad():
            for rows in batch["observation"].split(512):
                lstm(rows)

    def direct() -> None:
        places = batcher.places(batch)
        for _ in batcher.minibatches(places, MINIBATCHES, batch=batch):
            pass

    forward_time, _ = measure(forward)
    cut_time, cut_memory = measure(lambda: batcher(batch))
    places_time, _ = measure(lambda: batcher.places(batch))
    direct_time, direct_memory = measure(direct)
    print(
        f"\n{own / 2**30:.2f} GiB, {dones:.0%} dones: LSTM {forward_time:.2f} s; "
        f"cut {cut_time:.2f} s, {cut_memory / own:.2f} of its memory; places {places_time:.3f} s; "
        f"places and {MINIBATCHES} minibatches {direct_time:.2f} s, {direct_memory / own:.2f}"
    )
    assert cut_time < forward_time
    assert direct_time < forward_time
    assert cut_memory < 1.5 * own
    assert direct_memory < 0.2 * own
