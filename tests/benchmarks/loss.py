"""The PPO loss against others' and against its networks alone: forward and backward.

``python -m tests.benchmarks.loss`` takes about eight minutes and writes
``docs/benchmarks/loss.{csv,md,png}``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.timing import on_one_thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true", help="two settings, a temporary folder")
    args = parser.parse_args()
    on_one_thread()
    # torch, with which the rest comes, reads the environment that the line above has set.
    import torch

    from tests.benchmarks import loss_report
    from tests.benchmarks.report import output_folder

    torch.set_num_threads(1)
    folder = args.out or output_folder(args.quick)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with tqdm(loss_report.QUICK_STAGES if args.quick else loss_report.STAGES, unit="stage") as bar:
        for stage in bar:
            bar.set_postfix_str(f"{stage.setting.name}, {stage.frames:,} frames")
            rows += loss_report.rows(stage)
    report = loss_report.write_report(folder, rows)
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
