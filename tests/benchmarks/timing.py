"""Interleaved timing of calls.

The calls take turns, so that all of them meet a busy spell of the machine. This module does not
import torch: :func:`on_one_thread` must come first.
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
    # glibc keeps freed memory. Otherwise a result of a few MiB costs between none and a thousand
    # page faults, depending on the calls before it.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
SAMPLE = 2e-3  # seconds: long beside the clock's resolution, short beside a busy spell


@dataclass(frozen=True)
class Call:
    """The function to time, and its surroundings, which are not timed."""

    run: Callable[[], object]
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    #: called before a sample with its number of runs, for calls that consume their input
    prepare: Callable[[int], object] = lambda _: None
    #: waits for what a sample began on a device; timed
    finish: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of the samples, in seconds per call."""

    median: float
    lower: float
    upper: float
    samples: int


def on_one_thread() -> None:
    """Restart this process with one thread, unless it runs with one.

    OpenMP and the allocator read their environment once, so this must come before torch's import.
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
    """Time the calls in turn, one sample of each per round, in a random order.

    A sample is as many calls in a row as take ``sample`` seconds. Every call gets the same share of
    ``seconds``, between ``fewest`` and ``most`` samples, spread evenly over the rounds. The order
    is random because a call's predecessor decides the state of the caches.
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
    found = {}
    for name, times in took.items():
        lower, median, upper = quantiles(times, n=4, method="inclusive")
        found[name] = Timing(median, lower, upper, len(times))
    return found


def _calibrate(call: Call, sample: float) -> tuple[int, float]:
    """Return the number of calls in a sample, and its seconds."""
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
            run()  # a short call must not pay for the caches that the previous contender left
        call.finish()
        gc.disable()  # a collection would be charged to an arbitrary contender
        start = time.perf_counter()
        for _ in turns:
            run()
        call.finish()
        took = time.perf_counter() - start
    if was_enabled:
        gc.enable()
    return took
