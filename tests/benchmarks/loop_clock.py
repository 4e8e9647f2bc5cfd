"""Which part of a training loop time is spent in, measured from outside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from tests.benchmarks.loop_contenders import PARTS


class Clock:
    """Charges all time to parts: at any moment to the innermost one that is under way."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._under_way = ["rest"]
        self._since = time.perf_counter()

    def start(self) -> None:
        """Forget what was charged so far."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Charge what has passed since the last part began or ended."""
        now = time.perf_counter()
        self.seconds[self._under_way[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge to a part what is done meanwhile, save for the parts within."""
        self.stop()
        self._under_way.append(name)
        try:
            yield
        finally:
            self.stop()
            self._under_way.pop()

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that charges its calls to a part."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return call

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Charge all calls of an attribute to a part."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def iterate(self, items: Iterable[Any], getting: str, using: str) -> Iterator[Any]:
        """Yield the items; charge getting each to one part, and what is done with it to another."""
        following = self.timed(iter(items).__next__, getting)
        while True:
            try:
                item = following()
            except StopIteration:
                return
            with self.part(using):
                yield item

    def wrap_training(self, optimizer: Any) -> None:
        """Tell apart what most loops call by the same names."""
        self.wrap(Tensor, "backward", "backward")
        self.wrap(nn.utils, "clip_grad_norm_", "clip")
        for name in ("step", "zero_grad"):
            self.wrap(optimizer, name, "optimiser")
