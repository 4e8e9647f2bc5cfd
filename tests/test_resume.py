"""A run that is killed again and again, and resumed, equals an uninterrupted one bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_state import assert_same_state, flat
from tests.tutorial_runs import follow, with_constants

FRAMES = 12_288  # twelve checkpoints
NAME = "checkpoints_and_resume"


def trained(file: Path) -> dict[str, Any]:
    """Return all parameters and the state of the optimizer."""
    state = torch.load(file, weights_only=True)["update"]
    return {name: flat(state[name]) for name in ("loss", "optimizer")}


def kill(script: Path, checkpoint: Path, inside: bool, delay: float) -> None:
    """Kill a run while it writes a checkpoint, or a moment after it has written one."""
    unfinished = checkpoint.with_name(f"{checkpoint.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=script.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while not (inside and unfinished.exists()):
        assert process.poll() is None
        if not inside and checkpoint.exists() and checkpoint.stat().st_mtime_ns != before:
            time.sleep(delay)
            break
        time.sleep(1e-4)
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_equals_an_uninterrupted_one(tmp_path: Path):
    script, chance = tmp_path / "run.py", random.Random(0)
    script.write_text(with_constants(NAME, TOTAL_FRAMES=FRAMES, RESUME=True))
    checkpoint = tmp_path / "outputs" / NAME / "whole.pt"
    resumed_at = set()
    for inside in (False, True, False, True, False):
        kill(script, checkpoint, inside, chance.uniform(0.0, 0.5))
        resumed_at.add(len(torch.load(checkpoint, weights_only=True)["history"]))
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)
    assert len(resumed_at) > 2
    other = tmp_path / "other"
    other.mkdir()
    names = follow(NAME, other, TOTAL_FRAMES=FRAMES)
    assert names["is_equal"]
    assert_same_state(trained(checkpoint), trained(other / "outputs" / NAME / "whole.pt"))
