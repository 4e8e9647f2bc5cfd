"""A run that is killed, twenty times, and resumed, ends as the one that was not: bit for bit."""

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
KILLS = 20
INSIDE_A_SAVE = range(3, KILLS, 4)  # five of them


def digest(out: Path) -> str:
    """SHA-256 of all parameters and the whole state of the optimiser."""
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


def moments(startup: float, history: list[dict[str, float]]) -> list[tuple[int, float]]:
    """Moments uniform over the wall time: the frames done by then, and the seconds after that."""
    frames = [row["total_frames"] for row in history]
    seconds = [row["total_frames"] / row["frames_per_second"] for row in history]
    batches = [(int(n), at) for n, at in zip(frames, seconds, strict=True)]
    began = [(-1, 0.0), (0, startup), *((frames, startup + at) for frames, at in batches)]
    drawn, found = random.Random(0), []
    for moment in sorted(drawn.uniform(0, began[-1][1]) for _ in range(KILLS)):
        frames, at = max((frames, at) for frames, at in began if at <= moment)
        found.append((frames, moment - at))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--engine"]], ids=["by hand", "engine"])
def test_killed_twenty_times(tmp_path: Path, kind: list[str]):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    started = time.perf_counter()
    run = Run(whole, *kind)
    run.wait_for(0)
    startup = time.perf_counter() - started
    run.finish()
    history = json.loads((whole / "history.json").read_text())
    checkpoint, unfinished = out / "checkpoint.pt", out / "checkpoint.pt.unfinished"
    resumed_at, inside = set(), 0
    for number, (frames, seconds) in enumerate(moments(startup, history)):
        unfinished.unlink(missing_ok=True)
        run = Run(out, *kind, *["--resume"] * checkpoint.exists())
        if number in INSIDE_A_SAVE:
            run.kill_when(unfinished.exists)
            inside += unfinished.exists()
        else:
            if frames >= 0:
                run.wait_for(frames)
            end = time.perf_counter() + seconds
            run.kill_when(lambda end=end: time.perf_counter() >= end)
        if checkpoint.exists():
            resumed_at.add(torch.load(checkpoint, weights_only=True)["history"][-1]["total_frames"])
    run = Run(out, *kind, *["--resume"] * checkpoint.exists())
    run.finish()
    print(f"{KILLS} kills, {inside} inside a save, resumed at {sorted(resumed_at)} frames")
    print(digest(whole))
    assert inside >= 3
    assert len(resumed_at) >= 2
    assert digest(out) == digest(whole)
    assert json.loads((out / "history.json").read_text())[-1]["total_frames"] == FRAMES
