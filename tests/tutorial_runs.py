"""Run the tutorials, in this process or in a process of their own."""

from __future__ import annotations

import ast
import json
import math
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "tutorials"
ASSEMBLIES = Path(__file__).parent / "benchmarks" / "assemblies"


def script_of(name: str) -> Path:
    """Return the script with options."""
    return ASSEMBLIES / f"{name}.py"


def with_constants(name: str, **constants: Any) -> str:
    """Return the source of a tutorial with other values of variables at its top."""
    source = (TUTORIALS / f"{name}.py").read_text()
    values: dict[str, ast.expr] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=True)]
            found = {x.id: y for x, y in pairs if isinstance(x, ast.Name)}
            values = found | values  # the first assignment of a name
    lines = source.splitlines(keepends=True)
    places = sorted(((values[x].lineno, values[x].col_offset, x) for x in constants), reverse=True)
    for line, column, constant in places:
        value, text = values[constant], lines[line - 1]
        assert value.end_lineno == line, constant
        end = value.end_col_offset
        lines[line - 1] = f"{text[:column]}{constants[constant]!r}{text[end:]}"
    return "".join(lines)


def follow(name: str, folder: Path, **constants: Any) -> dict[str, Any]:
    """Run a tutorial with ``--quick`` in this process and folder; return its global names."""
    script, threads = folder / f"{name}.py", torch.get_num_threads()
    script.write_text(with_constants(name, **constants))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", [str(script), "--quick"])
            return runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def command(name: str, out: Path, *options: str) -> list[str]:
    """Return script and options of a tutorial."""
    return [str(script_of(name)), "--out", str(out), *options]


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, on one thread."""
    environment: Any = os.environ | {"OMP_NUM_THREADS": "1"}
    options: Any = {"capture_output": True, "text": True, "env": environment, "cwd": cwd}
    return subprocess.run([sys.executable, *arguments], check=False, **options)


def play(name: str, out: Path, *options: str) -> dict[str, Any]:
    """Run a tutorial in this process with ``--quick``; return its global names."""
    handler, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    script = str(script_of(name))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [script, "--quick", "--out", str(out), *options])
            return runpy.run_path(script, run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)
        torch.set_num_threads(threads)


def interrupt_after(text: str, name: str, out: Path, *options: str) -> str:
    """Start a tutorial, press Ctrl-C once its stderr holds the text, and return its stdout."""
    process = subprocess.Popen(
        [sys.executable, *command(name, out, *options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    seen = ""
    while text not in seen:
        seen += (character := process.stderr.read(1))
        assert character, seen
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed


def history(out: Path) -> Any:
    """Return the statistics that a tutorial saved."""
    return json.loads((out / "history.json").read_text())


def assert_finite(rows: Iterable[Mapping[str, float]]) -> None:
    """All statistics are finite, but return and length in a batch without the end of an episode."""
    for row in rows:
        unknown = () if row.get("episodes", 1.0) else ("episode_return", "episode_length")
        assert all(math.isfinite(x) for name, x in row.items() if name not in unknown), row


def assert_figure(out: Path) -> None:
    """The tutorial drew its figure, and it is not blank."""
    figure = matplotlib.image.imread(out / "figure.png")
    assert figure.shape[0] > 300
    assert figure.std() > 0.01
