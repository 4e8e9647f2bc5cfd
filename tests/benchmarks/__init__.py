"""Benchmarks: ``python -m tests.benchmarks.NAME``. Those that time calls run on one thread."""

import sys

from tests.benchmarks.timing import on_one_thread

TIMED = {"gae", "loss", "ray_workers", "recurrent", "rewards", "scale", "step", "trainer"}
TIMED |= {"vector_environments", "workers"}

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].rsplit(".", 1)[-1] in TIMED:
    on_one_thread()  # before torch is imported
