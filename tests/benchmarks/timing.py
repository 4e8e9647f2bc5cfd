"""Timing of calls that take turns, so that a busy spell of the machine strikes all of them.

Nothing here imports torch: :func:`on_one_thread` must come before it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from statistics import quantiles

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # glibc keeps what is freed. Else a result of a few MiB costs up to a thousand page faults or
    # none, as the calls before it happened to leave the heap.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
SAMPLE = 2e-3  # seconds: long beside the clock's own resolution, short beside a busy spell


@dataclass(frozen=True)
class Call:
    """What is timed, and what must hold around it without being timed."""

    run: Callable[[], object]
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    #: called before a sample with the number of runs in it, for calls that use up what they take
    prepare: Callable[[int], object] = lambda _: None


@dataclass(frozen=True)
class Timing:
    """Median and quartiles over the samples, in seconds per call."""

    median: float
    lower: float
    upper: float
    samples: int


def on_one_thread() -> None:
    """Start this process anew on one thread, unless it runs on one.

    OpenMP reads its environment once, when torch is imported, so this must come first, and the
    allocator before that.
    """
    if any(os.environ.get(name, "").lower() != value for name, value in ONE_THREAD.items()):
        arguments = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, os.environ | ONE_THREAD)


def interleave(
    calls: Mapping[str, Call],
    *,
    seconds: float,
    fewest: int = 5,
    most: int = 100,
    sample: float = SAMPLE,
) -> dict[str, Timing]:
    """Time the calls in turn, one sample of each a round.

    Every call gets the same share of ``seconds``, but at least ``fewest`` and at most ``most``
    samples: a slow one sits out rounds, evenly spread over the run. The order within a round is
    drawn anew: who comes after whom decides what the caches and the allocator hold. A sample is as
    many calls in a row as take ``sample`` seconds.
    """
    repeats = {name: _calibrate(call, sample) for name, call in calls.items()}
    share = seconds / len(calls)
    samples = {
        name: max(fewest, min(most, int(share / took))) for name, (_, took) in repeats.items()
    }
    rounds = max(samples.values())
    took: dict[str, list[float]] = {name: [] for name in calls}
    order, random = list(calls), Random(0)
    for number in range(rounds):
        random.shuffle(order)
        for name in order:
            due = (number + 1) * samples[name] // rounds
            if len(took[name]) < due:
                count = repeats[name][0]
                took[name].append(_sample(calls[name], count) / count)
    return {name: _summary(each) for name, each in took.items()}


def _calibrate(call: Call, sample: float) -> tuple[int, float]:
    """Return how many calls make a sample, and how long that takes."""
    count = 1
    _sample(call, count)  # the first call may compile, or fill caches
    while (took := _sample(call, count)) < sample:
        count = max(2 * count, int(1.1 * count * sample / took)) if took else 2 * count
    return count, took


def _sample(call: Call, count: int) -> float:
    run, turns = call.run, range(count)
    was_enabled = gc.isenabled()
    call.prepare(count + (count > 1))
    with call.within():
        if count > 1:
            run()  # a short call must not pay for what the one before it left in the caches
        gc.disable()  # a collection would be charged to whoever happens to run
        start = time.perf_counter()
        for _ in turns:
            run()
        took = time.perf_counter() - start
    if was_enabled:
        gc.enable()
    return took


def _summary(times: list[float]) -> Timing:
    lower, median, upper = quantiles(times, n=4, method="inclusive")
    return Timing(median, lower, upper, len(times))
