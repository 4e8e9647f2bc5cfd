"""Drawn cases, for hours: ``main`` checks as many as the command line says, from a seed on."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable

from tqdm import tqdm


def main(check: Callable[[int], None]) -> None:
    """Check COUNT cases from the seed FIRST on, which is 0 by default; print those that fail."""
    warnings.simplefilter("ignore")
    count, first = [*map(int, sys.argv[1:]), 0][:2]
    failed = []
    for seed in tqdm(range(first, first + count), unit="case", mininterval=30):
        try:
            check(seed)
        except Exception as error:
            failed.append(seed)
            text = "".join(traceback.format_exception(error))
            print(f"\n--- seed {seed}\n{text[-1500:]}", flush=True)
    print(f"{count} cases, {len(failed)} failed: {failed}")
