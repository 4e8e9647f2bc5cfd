"""Reward normalisation against other libraries': a whole batch at once, or step by step.

``python -m tests.benchmarks.rewards`` takes about two minutes and writes
``docs/benchmarks/rewards.{csv,md,png}``. Other libraries take part where they are installed
(``pip install 'ppokit[bench]'``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.timing import on_one_thread

SECONDS, QUICK_SECONDS = 12.0, 1.0  # of timing, for each shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true", help="small shapes, a temporary folder")
    args = parser.parse_args()
    on_one_thread()
    # torch, with which the rest comes, reads the environment that the line above has set.
    import torch

    from tests.benchmarks import data, reward_rows
    from tests.benchmarks.report import output_folder

    torch.set_num_threads(1)
    folder = args.out or output_folder(args.quick)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = data.QUICK_SHAPES if args.quick else data.SHAPES
    rows = []
    with tqdm(shapes, unit="shape") as bar:
        for shape in bar:
            bar.set_postfix_str(str(list(shape)))
            rows += reward_rows.rows(shape, QUICK_SECONDS if args.quick else SECONDS)
    report = reward_rows.write_report(folder, rows)
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
