"""Ctrl-C at random moments of collecting, training and saving."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import ppokit
from ppokit import load_checkpoint, save_checkpoint
from tests.test_state import assert_same_state, flat, make_run

STATE = Path(ppokit.__file__).parent / "_state.py"


def phases(path: Path, parts: dict[str, Any]) -> None:
    """Collect, train and save until interrupted."""
    while True:
        batch = parts["collector"].rollout()
        parts["update"](batch)
        save_checkpoint(path, parts)


def interrupted_after(seconds: float, path: Path, parts: dict[str, Any]) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        phases(path, parts)
    timer.join()


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    """Background jobs of a shell start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def lines_until(target: int, call: Callable[[], Any]) -> int:
    """Return how many lines of the state's file a call runs; it is interrupted after so many."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "call" and Path(frame.f_code.co_filename) != STATE:
            return None
        if event == "line":
            lines += 1
            if lines == target:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    with contextlib.suppress(KeyboardInterrupt):
        sys.settrace(trace)
        call()
    sys.settrace(None)
    return lines


def test_an_interrupt_at_any_line_leaves_a_load_whole_or_undone(tmp_path: Path):
    path, names = tmp_path / "saved", ("first", "second")
    save_checkpoint(path, {name: nn.Linear(1, 1) for name in names})

    def load(target: int) -> tuple[int, set[bool]]:
        parts = {name: nn.Linear(1, 1) for name in names}
        before = [part.weight.item() for part in parts.values()]
        lines = lines_until(target, lambda: load_checkpoint(path, parts))
        after = [part.weight.item() for part in parts.values()]
        return lines, {x != y for x, y in zip(before, after, strict=True)}

    count, loaded = load(0)
    assert loaded == {True}
    found = [load(target)[1] for target in range(1, count + 1)]
    assert {len(x) for x in found} == {1}
    assert {False} in found


# A signal may come between open() and the `with` around it.
@pytest.mark.filterwarnings("ignore:.*saved.unfinished:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_the_last_checkpoint_is_whole_and_the_blocks_can_continue(tmp_path: Path):
    path = tmp_path / "saved"
    for seconds in np.random.default_rng(0).uniform(0.05, 1.0, 50):  # a round takes 0.2
        parts = make_run()
        save_checkpoint(path, parts)
        interrupted_after(seconds, path, parts)
        # After loading, the interrupted update equals a new one.
        interrupted, new = parts["update"], make_run()
        load_checkpoint(path, parts | {"collector": new["collector"]})
        load_checkpoint(path, new)
        with new["collector"] as collector:
            collector.set_seed(1)
            batch = collector.rollout()
        for update in (interrupted, new["update"]):
            update(batch.clone())
        states = (flat(update.state_dict()) for update in (interrupted, new["update"]))
        assert_same_state(*states)
        assert all(x.isfinite().all() for x in interrupted.state_dict()["loss"].values())
        parts["collector"].shutdown()
        assert not multiprocessing.active_children()
