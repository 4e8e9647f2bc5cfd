"""One contender on one task, in a process of its own: ``loop.py`` starts it.

``python -m tests.benchmarks.loop_measure JOB FILE`` writes what it found to the file, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.loop_contenders import CONTENDERS, FLOOR, Job, Loop, Task

FEWEST = 3  # batches


def measure(job: Job) -> dict[str, Any]:
    """Return frames a second of an untouched loop, then the parts of an instrumented one."""
    from tests.benchmarks.loop_clock import Clock

    loop = CONTENDERS[job.contender].make(job.task, job.round)
    start = time.perf_counter()
    loop.run()  # first calls allocate, and may compile
    first = time.perf_counter() - start
    cpu = time.process_time()
    whole = _run(loop, job.seconds, FEWEST)
    cpu = time.process_time() - cpu
    clock = Clock()
    loop.instrument(clock)
    clock.start()
    instrumented = _run(loop, job.seconds_in_parts, 1)
    clock.stop()
    _check_steps(loop, job.task, 1 + len(whole) + len(instrumented))
    frames = job.task.frames * len(instrumented)
    return {
        "frames_per_second": job.task.frames * len(whole) / sum(whole),
        "first_batch_seconds": first,
        "batch_seconds": whole,
        "share_of_core": cpu / sum(whole),  # less than 1 where others were in the way
        "us_per_frame": {part: 1e6 * s / frames for part, s in clock.seconds.items()},
    }


def _run(loop: Loop, seconds: float, fewest: int) -> list[float]:
    """Return the seconds of batches, as many as it takes."""
    took: list[float] = []
    while len(took) < fewest or sum(took) < seconds:
        start = time.perf_counter()
        loop.run()
        took.append(time.perf_counter() - start)
    return took


def _check_steps(loop: Loop, task: Task, batches: int) -> None:
    """Raise unless the optimiser has done what it does for the others, too."""
    steps = {int(state["step"]) for state in loop.optimizer.state.values()}
    if steps != {batches * task.steps}:
        raise RuntimeError(f"{steps} optimiser steps in {batches} batches of {task.steps}.")


def main() -> None:
    given, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    job = Job(**(given | {"task": Task(**given["task"])}))
    torch.set_num_threads(1)
    torch.manual_seed(job.round)
    if job.contender == FLOOR:
        from tests.benchmarks import loop_floor

        found = loop_floor.measure(job)
    else:
        found = measure(job)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(job) | found, indent=1))
    os.replace(unfinished, file)


if __name__ == "__main__":
    main()
