"""The time that a training loop spends in each of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from tests.benchmarks.loop_tasks import PARTS


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
