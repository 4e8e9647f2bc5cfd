"""The GAE benchmark's third part: how long torch.compile takes.

``python -m tests.benchmarks.gae_compile 512`` compiles ppokit.GAE for 512 steps and prints the
seconds and the largest difference from eager; ``0`` stands for ``x * 2 + 1`` instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

import torch

import ppokit
from tests.benchmarks.data import GAMMA, LMBDA
from tests.benchmarks.gae_module import critic, critic_batch
from tests.benchmarks.report import ROOT
from tests.benchmarks.tables import Row

PART = "compile"
BATCH, STEPS = 4, (0, 512, 4096)


def compile_rows() -> Iterable[list[Row]]:
    """Yield one row after the other, each compiled in a new process with an empty cache."""
    _in_a_process(0)  # thrown away: it also reads the compilers from the disk
    for steps in STEPS:
        seconds, error = _in_a_process(steps)
        name = f"ppokit.GAE, {steps} steps" if steps else "x * 2 + 1"
        row = Row(PART, name, BATCH, steps or STEPS[-1], 1e6 * seconds, samples=1)
        row.max_error = error
        yield [row]


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1])
    seconds, error = _gae(steps) if steps else _trivial()
    print(json.dumps([seconds, error]))


def _in_a_process(steps: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "tests.benchmarks.gae_compile", str(steps)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        printed = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
    seconds, error = json.loads(printed.splitlines()[-1])
    return seconds, error


def _gae(steps: int) -> tuple[float, float]:
    network = critic()
    batch, _ = critic_batch(BATCH, steps, network)
    module = ppokit.GAE(gamma=GAMMA, lmbda=LMBDA, value_network=network)
    eager = module(batch.copy())["advantage"]
    compiled, own = torch.compile(module, fullgraph=True), batch.copy()
    start = time.perf_counter()
    compiled(own)
    return time.perf_counter() - start, (own["advantage"] - eager).abs().max().item()


def _trivial() -> tuple[float, float]:
    x = torch.randn(BATCH, STEPS[-1])
    compiled = torch.compile(lambda x: x * 2 + 1, fullgraph=True)
    start = time.perf_counter()
    result = compiled(x)
    return time.perf_counter() - start, (result - (x * 2 + 1)).abs().max().item()


if __name__ == "__main__":
    main()
