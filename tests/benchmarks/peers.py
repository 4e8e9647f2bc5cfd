"""Other systems in virtual environments of their own, because their pins conflict with ppokit's.

An environment takes 1 to 2 GB and some minutes. It is made on first use in the user's cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.benchmarks.runs import run_python

REQUIREMENTS = {
    "rl8": ["rl8==1.0.0"],
    "rllib": ["ray[rllib]"],
    "agilerl": ["agilerl[box2d]", "peft==0.21.0"],  # 2.58.0 imports peft, and does not require it
}
"""Requirements of each peer, besides the torch version of this environment."""


def folder_of(peer: str) -> Path:
    """Return the folder of the peer's environment."""
    return Path.home() / ".cache" / "ppokit" / "peers" / peer


def is_installed(peer: str) -> bool:
    """Whether the peer's environment is complete."""
    return (folder_of(peer) / "installed").exists()


def install(peer: str) -> Path:
    """Make the peer's environment, unless it exists, and return its interpreter.

    Raises:
        RuntimeError: it cannot be installed; with pip's text.
    """
    folder = folder_of(peer)
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    wanted = REQUIREMENTS[peer]
    print(f"Installing {', '.join(wanted)} in {folder}: some minutes, once.", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run_python(["-m", "venv", folder])
    torch = f"torch=={version('torch').split('+')[0]}"
    for requirements in ([torch], wanted):
        run_python(["-m", "pip", "install", "-q", *requirements], python)
    done.touch()
    return python


def run(peer: str, arguments: Mapping[str, Any], result: Path) -> dict[str, Any]:
    """Run ``originals/{peer}.py`` in the peer's environment and return what it wrote.

    The script gets ``arguments`` as JSON and the path of its JSON file. An existing result is read.

    Raises:
        RuntimeError: with the last lines of what the script printed.
    """
    if not result.exists():
        script = Path(__file__).parent / "originals" / f"{peer}.py"
        python = install(peer)
        written = result.with_suffix(".part")
        given = ["-P", script, json.dumps(arguments), written.absolute()]
        run_python(given, python, PYTHONPATH="", PYTHONNOUSERSITE="1")
        written.replace(result)
    return json.loads(result.read_text())
