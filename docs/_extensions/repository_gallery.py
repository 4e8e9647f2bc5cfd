"""How the tutorials are run for the gallery: their arguments, their figures, their order."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import figure_rst

ORDER = [
    *("coding_ppo", "custom_algorithm", "recurrent_ppo", "multi_agent_ppo", "distributed_ppo"),
    *("population", "rl8_vectorized", "rllib_ppo", "agilerl_ppo"),
]


def arguments(gallery_conf: dict[str, Any], script_vars: dict[str, Any]) -> list[str]:
    """Return the command line of a tutorial: that of a quick run, or of an ordinary one."""
    if os.environ.get("PPOKIT_GALLERY") == "full":
        return []
    out = Path(tempfile.mkdtemp()) / Path(script_vars["src_file"]).stem
    return ["--quick", "--out", str(out)]


def figure(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Return the figure that a tutorial wrote to ``--out``, once, where it was written."""
    args = block_vars["example_globals"].get("args")
    source = None if args is None else Path(args.out) / "figure.png"
    if source is None or not source.exists():
        return ""
    target = next(block_vars["image_path_iterator"])
    shutil.move(source, target)
    return figure_rst([target], gallery_conf["src_dir"])


def order(filename: str) -> tuple[int, str]:
    """Return the place of a tutorial in the gallery; new ones come last."""
    stem = Path(filename).stem
    return (ORDER.index(stem) if stem in ORDER else len(ORDER), stem)
