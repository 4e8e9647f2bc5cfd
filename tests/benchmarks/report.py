"""What every benchmark says about the machine it ran on, and where it writes."""

from __future__ import annotations

import platform
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def output_folder(quick: bool) -> Path:
    """The docs, or a temporary folder for a quick run."""
    folder = Path(tempfile.mkdtemp(prefix="ppokit-")) if quick else ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine() -> str:
    """One line on processor, versions and commit, and whether CUDA was there."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    if subprocess.check_output([*git, "status", "--porcelain", "--", "ppokit", "tutorials"]):
        commit += " with changes"
    packages = ("torch", "torchrl", "tensordict", "gymnasium")
    # A nightly build is a package of another name.
    versions = ", ".join(f"{name} {import_module(name).__version__}" for name in packages)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "not run on CUDA"
    return (
        f"{_processor()} ({torch.backends.cpu.get_cpu_capability()}), Python "
        f"{platform.python_version()}, {versions}, commit {commit}; {device}."
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
