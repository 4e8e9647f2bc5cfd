"""Scripts of ours, each in a process of its own, and the JSON files that runs leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.report import ROOT

Row = dict[str, Any]


def read_json(file: Path) -> Any:
    """Return what the file holds.

    Raises:
        ValueError: it holds no JSON, as where a process was killed while it wrote.
    """
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged; delete it, and run again: {error}") from error


def write_json(file: Path, value: Any) -> None:
    """Write the file, all of it or nothing."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(file)


def run_script(arguments: Sequence[str]) -> None:
    """Run Python with the arguments, on one thread.

    Raises:
        RuntimeError: it failed; with the last that it printed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def run_tutorial(
    name: str, options: Sequence[str], out: Path, is_done: Callable[[list[Row]], bool]
) -> list[Row]:
    """Run ``tutorials/{name}.py`` to its end, unless it is in ``out``; return its history.

    A tutorial saves as it goes, and ends politely when it is interrupted: it runs in a folder
    beside ``out``, which is renamed once ``is_done`` says so of the history.

    Raises:
        RuntimeError: it failed, or ended early.
    """
    file = out / "history.json"
    if not file.exists() or not is_done(read_json(file)):
        part = out.with_name(f"{out.name}.part")
        for folder in (part, out):
            shutil.rmtree(folder, ignore_errors=True)
        script = str(ROOT / "tutorials" / f"{name}.py")
        run_script([script, *options, "--out", str(part.absolute())])
        if not is_done(read_json(part / "history.json")):
            raise RuntimeError(f"{name}.py was interrupted; what there is of it is in {part}.")
        part.rename(out)
    return read_json(file)
