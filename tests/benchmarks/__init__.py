"""Benchmarks: ``python -m tests.benchmarks.NAME`` writes ``docs/benchmarks/NAME.{csv,md,png}``.

``--quick`` runs one in small, and writes to a temporary folder. Other libraries take part if they
are installed (``pip install 'ppokit[bench]'``). Benchmarks that time calls run on one thread. Those
that train keep finished runs in ``outputs/benchmarks/NAME``, and skip them when started again.
"""

import sys

from tests.benchmarks.timing import on_one_thread

TIMED = {"gae", "pixels", "ray_workers", "recurrent", "rewards", "scale", "step", "trainer"}
TIMED |= {"vector_environments", "workers"}

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].rsplit(".", 1)[-1] in TIMED:
    on_one_thread()  # before torch is imported
