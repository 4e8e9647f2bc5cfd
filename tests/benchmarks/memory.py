"""The peak memory of a call beyond its results, from the kernel's high-water mark.

``python -m tests.benchmarks.memory '[[64, 128]]'`` prints it for every contender of :mod:`.gae`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.data import Data
from tests.benchmarks.gae_contenders import contenders
from tests.benchmarks.runs import run_module

# Writing 5 to it resets the high-water mark to the present use.
CLEAR = Path("/proc/self/clear_refs")
# The allocator returns blocks of 64 KiB and more to the kernel when they are freed.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}
SMALLEST = 2**19  # bytes of the advantage; the kernel's page counts are off by up to 200 KiB


def extra_memory(shapes: Sequence[tuple[int, int]]) -> dict[tuple[str, int, int], float]:
    """Return KiB by (contender, B, T), measured in a new process; empty on other systems.

    Shapes whose memory is below the error of the counters are left out.
    """
    shapes = [(b, t) for b, t in shapes if 4 * b * t >= SMALLEST]
    if not CLEAR.exists() or not shapes:
        return {}
    return {(name, b, t): kib for name, b, t, kib in run_module("memory", shapes, **ALLOCATOR)}


def main() -> None:
    found = []
    for batch, steps in json.loads(sys.argv[1]):
        data = Data.draw(batch, steps)
        for name, contender in contenders().items():
            call = contender.prepare(data)
            with call.within():
                found.append((name, batch, steps, _in_a_fork(call.run)))
    print(json.dumps(found))


def _in_a_fork(run: Callable[[], Any]) -> float:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, str(_measure(run)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return float(pipe.read())


def _measure(run: Callable[[], Any]) -> float:
    first, _ = _peak(run)  # includes what is set up once
    result, peak = _peak(run)
    known = {_address(x) for x in _arrays(first)}  # results written in place take no new memory
    new = sum(x.nbytes for x in _arrays(result) if _address(x) not in known)
    return max(0.0, peak - new / 1024)


def _peak(run: Callable[[], Any]) -> tuple[Any, int]:
    CLEAR.write_text("5")
    before = _status_kib("VmRSS")
    result = run()
    return result, _status_kib("VmHWM") - before


def _arrays(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _address(x: Any) -> int:
    return x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
