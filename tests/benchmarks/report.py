"""The command line of a benchmark, its output files, and the line about the machine."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm

from tests.benchmarks.tables import Row, write_rows

ROOT = Path(__file__).parents[2]


class Benchmark:
    """One run of ``python -m tests.benchmarks.NAME``, which writes ``NAME.{csv,md,png}``.

    Args:
        name: of the output files.
        keeps_results: whether finished runs are files in ``outputs/benchmarks/NAME``, so that a
            later start skips them.
        packages: optional packages whose versions belong to the line about the machine.
        has_record: whether the CSV file is a record of runs: adds ``--pages``.
    """

    def __init__(
        self,
        name: str,
        *,
        keeps_results: bool = False,
        packages: tuple[str, ...] = (),
        has_record: bool = False,
    ) -> None:
        self.name, self._turns = name, ""
        parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
        parser.add_argument("--quick", action="store_true", help="few frames, a temporary folder")
        parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
        if has_record:
            parser.add_argument("--pages", action="store_true", help="write the page, run nothing")
        self.options = options = parser.parse_args()
        self.quick: bool = options.quick
        default = tempfile.mkdtemp(prefix="ppokit-") if self.quick else ROOT / "docs" / "benchmarks"
        self.folder = Path(options.out or default).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.machine = machine() + (f"\n{versions(*packages)}" if packages else "")
        if keeps_results:
            runs = self.folder / "runs" if self.quick else ROOT / "outputs" / "benchmarks" / name
            self.results, started = runs, runs / "machine.txt"
            runs.mkdir(parents=True, exist_ok=True)
            if not started.exists():  # a later start may be on another machine
                started.write_text(self.machine)
            self.machine = started.read_text()

    def file(self, suffix: str) -> Path:
        """Return the path of the output file with the suffix."""
        return self.folder / f"{self.name}.{suffix}"

    def measure(self, stages: Iterable[Callable[[], Sequence[Row]]]) -> list[Row]:
        """Call the stages behind a progress bar, and write their rows to the CSV file."""
        self._turns = (
            " The contenders take turns in a random order; figures are medians, and "
            f"`{self.name}.csv` has the quartiles."
        )
        rows = [row for stage in tqdm(list(stages), unit="stage") for row in stage()]
        write_rows(self.file("csv"), rows)
        return rows

    def write_page(self, text: str) -> None:
        """Write the Markdown page, with the command and the machine, and print it."""
        command = f"Made by `python -m tests.benchmarks.{self.name}`."
        foot, page = f"{command}{self._turns} {self.machine}\n", self.file("md")
        if getattr(self.options, "pages", False) and page.exists():  # nothing was measured here
            foot = command + page.read_text().rpartition(command)[2]
        text = f"{text.rstrip()}\n\n{foot}"
        page.write_text(text)
        print(f"{self.file('md')}\n\n{text}")


def machine() -> str:
    """Return one line on processor, versions and commit, and whether CUDA was available."""
    packages = ("torch", "torchrl", "tensordict", "gymnasium")
    # A nightly build is a package of another name.
    found = ", ".join(f"{name} {import_module(name).__version__}" for name in packages)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "not run on CUDA"
    return (
        f"{_processor()} ({torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores), "
        f"Python {platform.python_version()}, {found}, commit {commit()}; {device}."
    )


def commit() -> str:
    """Return the short name of the commit, and whether the sources differ from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changes = [*git, "status", "--porcelain", "--", "ppokit", "tutorials"]
    return name + (" with changes" if subprocess.check_output(changes) else "")


def versions(*packages: str) -> str:
    """Return one sentence on the optional packages that took part, and those not installed."""
    there, absent = [], []
    for package in packages:
        try:
            there.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            absent.append(package)
    text = f"Besides those: {', '.join(there) or 'none'}."
    return text + (f" Not installed, and left out: {', '.join(absent)}." if absent else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
