"""One optimization step against the eager floor: networks, clipping and fused Adam alone.

``python -m tests.benchmarks.step`` takes about twenty minutes and writes
``docs/benchmarks/step.{csv,md,png}``. Each setting leaves its result in ``--results``; those that
are there are skipped, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from tests.benchmarks.timing import on_one_thread


def main() -> None:
    on_one_thread()
    # torch, with which the rest comes, reads the environment that the line above has set.
    import torch

    from tests.benchmarks import step_report
    from tests.benchmarks.report import ROOT, output_folder
    from tests.benchmarks.runs import read_json, write_json
    from tests.benchmarks.tables import Row

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true", help="one setting, a temporary folder")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "benchmarks" / "step")
    parser.add_argument("--capture", metavar="SETTING", help="time the first two graphs, and end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.capture:
        print(step_report.seconds_to_capture(args.capture))
        return
    folder = args.out or output_folder(args.quick)
    folder.mkdir(parents=True, exist_ok=True)
    if args.quick:
        args.results = folder / "runs"
    args.results.mkdir(parents=True, exist_ok=True)
    rows, captures = [], []
    settings = [] if args.quick else ["2x64, tanh-normal", "3x256, tanh-normal"]
    for setting in tqdm(settings, desc="capture", unit="setting"):
        file = args.results / f"capture {setting}.json"
        if not file.exists():
            write_json(file, step_report.cold_and_warm(setting))
        captures.append(read_json(file))
    stages = step_report.QUICK_STAGES if args.quick else step_report.STAGES
    with tqdm(stages, unit="stage") as bar:
        for stage in bar:
            bar.set_postfix_str(f"{stage.setting.name}, {stage.frames:,} frames")
            file = args.results / f"{stage.setting.name} {stage.frames}.json"
            if not file.exists():
                write_json(file, [asdict(row) for row in step_report.rows(stage)])
            rows += [Row(**row) for row in read_json(file)]
    report = step_report.write_report(folder, rows, captures)
    print(f"{report}\n\n{report.read_text()}")


if __name__ == "__main__":
    main()
