"""One contender of the loop benchmark on one task, in a process of its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.benchmarks.loop_tasks import CONTENDERS, Task

FEWEST = 3  # batches


def measure(task: dict[str, Any], contender: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return frames a second of the loop, and the seconds of its first batch."""
    torch.manual_seed(seed)
    size = Task(**task)
    loop = CONTENDERS[contender].make(size, seed)
    start = time.perf_counter()
    loop.run()  # first calls allocate, and may compile
    first = time.perf_counter() - start
    whole = _run(loop, seconds)
    _check_steps(loop, size, 1 + len(whole))
    return {
        "frames_per_second": size.frames * len(whole) / sum(whole),
        "first_batch_seconds": first,
    }


def _run(loop: Any, seconds: float) -> list[float]:
    took: list[float] = []
    while len(took) < FEWEST or sum(took) < seconds:
        start = time.perf_counter()
        loop.run()
        took.append(time.perf_counter() - start)
    return took


def _check_steps(loop: Any, task: Task, batches: int) -> None:
    """Raise unless the loop has made the same number of optimizer steps as the others."""
    steps = {int(state["step"]) for state in loop.optimizer.state.values()}
    if steps != {batches * task.steps}:
        raise RuntimeError(f"{steps} optimizer steps in {batches} batches of {task.steps}.")
