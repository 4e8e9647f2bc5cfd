"""How much memory a call takes beyond its results, from the kernel's own high-water mark.

``python -m tests.benchmarks.memory 64x128`` prints it for every contender of the GAE benchmark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.contenders import contenders
from tests.benchmarks.data import Data
from tests.benchmarks.report import ROOT

# Writing 5 to it sets the high-water mark back to what is in use.
CLEAR = Path("/proc/self/clear_refs")
# Blocks of 64 KiB and more go back to the kernel when they are freed: nothing is hidden in a pool.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}

# The kernel counts pages in lots of 32 on each processor, so its figures drift by 100 KiB or two.
SMALLEST = 2**19  # bytes of the advantage


def extra_memory(shapes: Sequence[tuple[int, int]]) -> dict[tuple[str, int, int], float]:
    """Return the KiB by (contender, B, T), measured in a process of its own; empty off Linux.

    Shapes with too little data to tell their memory from the counters' drift are left out.
    """
    shapes = [(b, t) for b, t in shapes if 4 * b * t >= SMALLEST]
    if not CLEAR.exists() or not shapes:
        return {}
    command = [sys.executable, "-m", "tests.benchmarks.memory", *(f"{b}x{t}" for b, t in shapes)]
    printed = subprocess.check_output(command, env=os.environ | ALLOCATOR, cwd=ROOT, text=True)
    return {(name, b, t): kib for name, b, t, kib in json.loads(printed.splitlines()[-1])}


def main() -> None:
    found = []
    for shape in sys.argv[1:]:
        batch, steps = map(int, shape.split("x"))
        data = Data.draw(batch, steps)
        for name, contender in contenders().items():
            call = contender.prepare(data)
            with call.within():
                found.append((name, batch, steps, _in_a_fork(call.run)))
    print(json.dumps(found))


def _in_a_fork(run: Callable[[], Any]) -> float:
    """Measure in a child, so that no contender inherits what another one left in the heap."""
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
    first, _ = _peak(run)  # whatever is set up once is there after it, and no code page is new
    result, peak = _peak(run)
    known = {_address(x) for x in _arrays(first)}  # what is written in place is no new memory
    new = sum(x.nbytes for x in _arrays(result) if _address(x) not in known)
    return max(0.0, peak - new / 1024)


def _peak(run: Callable[[], Any]) -> tuple[Any, int]:
    CLEAR.write_text("5")
    before = _status("VmRSS")
    result = run()
    return result, _status("VmHWM") - before


def _arrays(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _address(x: Any) -> int:
    return x.data_ptr() if hasattr(x, "data_ptr") else x.ctypes.data


def _status(field: str) -> int:
    """KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise KeyError(field)


if __name__ == "__main__":
    main()
