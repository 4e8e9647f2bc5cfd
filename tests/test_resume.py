"""A run that is killed again and again, and resumed, equals an uninterrupted one bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_state import assert_same_state, flat
from tests.tutorial_runs import command, history, run

FRAMES = 30_000  # six checkpoints
OPTIONS = ["--quick", "--deterministic", "--total-frames", str(FRAMES)]


def trained(out: Path) -> dict[str, Any]:
    """Return all parameters and the state of the optimizer."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    state = state | state.get("update", {})
    return {name: flat(state[name]) for name in ("policy", "critic", "optimizer")}


def kill(out: Path, inside: bool, delay: float, *options: str) -> None:
    """Kill a run while it writes a checkpoint, or a moment after it has written one."""
    checkpoint, unfinished = out / "checkpoint.pt", out / "checkpoint.pt.unfinished"
    unfinished.unlink(missing_ok=True)
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    process = subprocess.Popen(
        command("coding_ppo", out, *options),
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
@pytest.mark.parametrize("kind", [[], ["--engine"]], ids=["by hand", "engine"])
def test_a_run_that_is_killed_and_resumed_equals_an_uninterrupted_one(
    tmp_path: Path, kind: list[str]
):
    whole, out, chance = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    checkpoint = out / "checkpoint.pt"
    assert run("coding_ppo", whole, *OPTIONS, *kind).returncode == 0
    resumed_at = set()
    for inside in (False, True, False, True, False):
        resume = ["--resume"] * checkpoint.exists()
        kill(out, inside, chance.uniform(0.0, 0.5), *OPTIONS, *kind, *resume)
        saved = torch.load(checkpoint, weights_only=True)
        resumed_at.add(saved["history"][-1]["total_frames"])
    assert run("coding_ppo", out, *OPTIONS, *kind, "--resume").returncode == 0
    assert len(resumed_at) > 2
    assert_same_state(trained(out), trained(whole))
    assert history(out)[-1]["total_frames"] == FRAMES
