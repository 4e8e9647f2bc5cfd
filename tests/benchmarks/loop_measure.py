"""One contender of the loop benchmark on one task, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.loop_tasks import CONTENDERS, PARTS, Task

FEWEST = 3  # batches


class Clock:
    """Charges all time to the innermost part that is running."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running = ["rest"]
        self._since = time.perf_counter()

    def start(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    def stop(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.stop()
        self._running.append(name)
        try:
            yield
        finally:
            self.stop()
            self._running.pop()

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return call

    def wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def iterate(self, items: Iterable[Any], getting: str, using: str) -> Iterator[Any]:
        """Yield the items; charge the iteration to one part and the use of the items to another."""
        following = self.timed(iter(items).__next__, getting)
        while True:
            try:
                item = following()
            except StopIteration:
                return
            with self.part(using):
                yield item

    def wrap_training(self, optimizer: Any) -> None:
        self.wrap(Tensor, "backward", "backward")
        self.wrap(nn.utils, "clip_grad_norm_", "clip")
        for name in ("step", "zero_grad"):
            self.wrap(optimizer, name, "optimizer")


def measure(
    task: dict[str, Any], contender: str, seed: int, seconds: float, in_parts: float
) -> dict[str, Any]:
    """Return frames per second of the plain loop, then the parts of an instrumented one."""
    torch.manual_seed(seed)
    size = Task(**task)
    loop = CONTENDERS[contender].make(size, seed)
    start = time.perf_counter()
    loop.run()  # first calls allocate, and may compile
    first = time.perf_counter() - start
    whole = _run(loop, seconds, FEWEST)
    clock = Clock()
    loop.instrument(clock)
    clock.start()
    instrumented = _run(loop, in_parts, 1)
    clock.stop()
    _check_steps(loop, size, 1 + len(whole) + len(instrumented))
    frames = size.frames * len(instrumented)
    return {
        "frames_per_second": size.frames * len(whole) / sum(whole),
        "first_batch_seconds": first,
        "us_per_frame": {part: 1e6 * s / frames for part, s in clock.seconds.items()},
    }


def _run(loop: Any, seconds: float, fewest: int) -> list[float]:
    took: list[float] = []
    while len(took) < fewest or sum(took) < seconds:
        start = time.perf_counter()
        loop.run()
        took.append(time.perf_counter() - start)
    return took


def _check_steps(loop: Any, task: Task, batches: int) -> None:
    """Raise unless the loop has made the same number of optimizer steps as the others."""
    steps = {int(state["step"]) for state in loop.optimizer.state.values()}
    if steps != {batches * task.steps}:
        raise RuntimeError(f"{steps} optimizer steps in {batches} batches of {task.steps}.")
