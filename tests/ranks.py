"""Real ranks: processes that meet over gloo, and leave what they found in a folder."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

# Imported before a process group exists: modules of torch and torchrl that are first imported later
# keep the group in default arguments and in tracebacks.
import ppokit.collectors
import ppokit.update  # noqa: F401

LIMIT = 240  # seconds for two ranks, after which the processes are killed


def run_on_ranks(count: int, find: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what a function of the rank, at the top of a module, returns on each of the ranks."""
    context = start_processes(
        _process, (find, count, str(folder)), nprocs=count, join=False, start_method="spawn"
    )
    limit = LIMIT * count / 2
    deadline = time.monotonic() + limit
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for child in context.processes:
                child.kill()
            pytest.fail(f"A rank is still waiting after {limit} s.")
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def run_on_two_ranks(find: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what a function of the rank returns on each of two."""
    return run_on_ranks(2, find, folder)


def _process(rank: int, find: Callable[[int], Any], count: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=count, timeout=timedelta(seconds=20)
    )
    torch.save(find(rank), f"{folder}/{rank}.pt")
    gc.collect()  # an error that was caught may be in a cycle with what it was raised in
    dist.destroy_process_group()
    # Gloo's threads end with the last reference to the group. One that frees a tensor while the
    # interpreter ends aborts the process. Linux lists a thread a little longer than it runs.
    deadline = time.monotonic() + 10.0
    while gloo_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not gloo_threads(), "something holds the process group"


def gloo_threads() -> list[str]:
    """Return the names of the threads of this process that belong to gloo (on Linux)."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]
