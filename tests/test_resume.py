"""A run that is killed again and again, and resumed, equals an uninterrupted one bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "tutorials" / "coding_ppo.py"
FRAMES = 40_000
KILLS = 12


def digest(out: Path) -> str:
    """Return SHA-256 of all parameters and of the state of the optimizer."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    state = state | state.get("update", {})
    found = hashlib.sha256()
    for name in ("policy", "critic", "optimizer"):
        _add(found, state[name])
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _add(found, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(found, item)
    else:
        found.update(repr(value).encode())


class Run:
    """The tutorial in a process of its own, and how far it has come."""

    def __init__(self, out: Path, *options: str) -> None:
        arguments = ["--deterministic", "--out", str(out), "--total-frames", str(FRAMES), *options]
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.frames: int | None = None
        self.errors = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        stream: Any = self.process.stderr
        with stream:
            while piece := stream.read1(4096):
                self.errors = self.errors[-4096:] + piece
                seen = re.findall(rb"(\d+)/%d " % FRAMES, self.errors)
                self.frames = int(seen[-1]) if seen else None

    def kill_when(self, reached: Callable[[], bool]) -> None:
        """Kill the process, with a signal that it cannot catch, once ``reached()``."""
        while not reached():
            assert self.process.poll() is None, self.errors.decode()
            time.sleep(1e-4)
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        self._reader.join()

    def wait_for(self, frames: int) -> None:
        """Return once so many frames are done; of 0, once training begins."""
        while self.frames is None or self.frames < frames:
            assert self.process.poll() is None, self.errors.decode()
            time.sleep(1e-3)

    def finish(self) -> None:
        assert self.process.wait() == 0, self.errors.decode()
        self._reader.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--engine"]], ids=["by hand", "engine"])
def test_a_run_that_is_killed_and_resumed_equals_an_uninterrupted_one(
    tmp_path: Path, kind: list[str]
):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    Run(whole, *kind).finish()
    checkpoint, unfinished = out / "checkpoint.pt", out / "checkpoint.pt.unfinished"
    chance, resumed_at, inside = random.Random(0), set(), 0
    for number in range(KILLS):
        unfinished.unlink(missing_ok=True)
        run = Run(out, *kind, *["--resume"] * checkpoint.exists())
        if number % 4 == 3:
            run.kill_when(unfinished.exists)
            inside += unfinished.exists()
        else:
            run.wait_for(FRAMES * number // (KILLS + 1))
            end = time.perf_counter() + chance.uniform(0.0, 0.5)
            run.kill_when(lambda end=end: time.perf_counter() >= end)
        if checkpoint.exists():
            resumed_at.add(torch.load(checkpoint, weights_only=True)["history"][-1]["total_frames"])
    Run(out, *kind, *["--resume"] * checkpoint.exists()).finish()
    assert inside >= 1
    assert len(resumed_at) >= 2
    assert digest(out) == digest(whole)
    assert json.loads((out / "history.json").read_text())[-1]["total_frames"] == FRAMES
