"""The command line of a benchmark, its output files, and the line about the machine."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from tests.benchmarks.tables import Row, write_rows

ROOT = Path(__file__).parents[2]


class Benchmark:
    """One run of ``python -m tests.benchmarks.NAME``.

    Args:
        name: of the output files.
        about: the docstring of the benchmark's module.
        keeps_results: adds ``--results``, a folder with one file for each finished run.
        packages: optional packages whose versions belong to the line about the machine.
        options: further options and their defaults; a list stands for any of its entries.
    """

    def __init__(
        self,
        name: str,
        about: str | None,
        *,
        keeps_results: bool = False,
        packages: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.name = name
        parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
        parser.add_argument("--quick", action="store_true", help="few frames, a temporary folder")
        parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
        if keeps_results:
            folder = ROOT / "outputs" / "benchmarks" / name
            parser.add_argument("--results", type=Path, default=folder, help="finished runs")
        for option, value in options.items():
            if isinstance(value, bool):
                kind: dict[str, Any] = {"action": "store_true"}
            elif isinstance(value, list):
                kind = {"nargs": "+", "default": value, "choices": value}
            else:
                kind = {"type": type(value), "default": value}
            parser.add_argument(f"--{option.replace('_', '-')}", **kind)
        self.options = parser.parse_args()
        self.quick: bool = self.options.quick
        default = tempfile.mkdtemp(prefix="ppokit-") if self.quick else ROOT / "docs" / "benchmarks"
        self.folder = Path(self.options.out or default)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._packages = packages
        if keeps_results:
            self.results: Path = self.folder / "runs" if self.quick else self.options.results
            self.results.mkdir(parents=True, exist_ok=True)
            self.results = self.results.absolute()
            self._started = self.results / "machine.txt"
            if not self._started.exists():  # the machine of the runs may not be the reader's
                self._started.write_text(self._machine_now())
        else:
            self._started = None

    def file(self, suffix: str) -> Path:
        """Return the path of the output file with the suffix."""
        return self.folder / f"{self.name}.{suffix}"

    @property
    def machine(self) -> str:
        return self._machine_now() if self._started is None else self._started.read_text()

    def measure(self, stages: Iterable[Callable[[], Sequence[Row]]]) -> list[Row]:
        """Call the stages behind a progress bar, and write their rows to the CSV file."""
        rows = [row for stage in tqdm(list(stages), unit="stage") for row in stage()]
        write_rows(self.file("csv"), rows)
        return rows

    def write_page(self, text: str, note: str = "") -> None:
        """Write the Markdown page with the line about the machine, and print it."""
        text = f"{text.rstrip()}\n\n{self.machine}{note}\n"
        self.file("md").write_text(text)
        print(f"{self.file('md')}\n\n{text}")

    def _machine_now(self) -> str:
        return machine() + (f"\n{versions(*self._packages)}" if self._packages else "")


def machine() -> str:
    """Return one line on processor, versions and commit, and whether CUDA was available."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    if subprocess.check_output([*git, "status", "--porcelain", "--", "ppokit", "tutorials"]):
        commit += " with changes"
    packages = ("torch", "torchrl", "tensordict", "gymnasium")
    # A nightly build is a package of another name.
    found = ", ".join(f"{name} {import_module(name).__version__}" for name in packages)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "not run on CUDA"
    return (
        f"{_processor()} ({torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores), "
        f"Python {platform.python_version()}, {found}, commit {commit}; {device}."
    )


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


def optional(module: str) -> ModuleType | None:
    """Return the module, or None if its package is not installed."""
    try:
        return import_module(module)
    except ImportError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
