"""Recurrent training: an epoch of an LSTM, drawing minibatches of sequences, cutting a large batch.

``python -m tests.benchmarks.recurrent`` takes about five minutes and writes
``docs/benchmarks/recurrent.{csv,md,png}``. SB3-contrib takes part where it is installed
(``pip install 'ppokit[bench]'``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.timing import on_one_thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true", help="one shape, a temporary folder")
    args = parser.parse_args()
    on_one_thread()
    # torch, with which the rest comes, reads the environment that the line above has set.
    import torch

    from tests.benchmarks import recurrent_report
    from tests.benchmarks.report import output_folder

    torch.set_num_threads(1)
    folder = args.out or output_folder(args.quick)
    folder.mkdir(parents=True, exist_ok=True)
    stages = recurrent_report.QUICK_STAGES if args.quick else recurrent_report.STAGES
    rows = []
    with tqdm(stages, unit="stage") as bar:
        for stage in bar:
            bar.set_postfix_str(stage.name)
            rows += recurrent_report.rows(stage)
    report = recurrent_report.write_report(folder, rows)
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
