"""How the tutorials are run for the gallery: their arguments, their figures, their order.

Their pictures in the gallery are titles. Pages offer the notebooks of ``tutorials/notebooks``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst

#: of the pictures, in the order of the gallery
TITLES = {
    "coding_ppo": "5 blocks in\na TorchRL loop",
    "mujoco_ppo": "MuJoCo\n1 setting",
    "atari_ppo": "images:\nMinAtar, Atari",
    "training_step": "loss + Adam\n= 1 graph",
    "checkpoints_and_resume": "save, stop,\nresume",
    "custom_algorithm": "your own\nloss",
    "recurrent_ppo": "LSTM,\nmemory",
    "multi_agent_ppo": "a team of\n3 agents",
    "distributed_ppo": "2 ranks,\n1 policy",
    "population": "a population\ntunes itself",
    "rl8_vectorized": "256 carts\nin 1 tensor",
    "rllib_ppo": "RLlib's\nsettings",
    "agilerl_ppo": "AgileRL's\nsettings",
}


def arguments(gallery_conf: dict[str, Any], script_vars: dict[str, Any]) -> list[str]:
    """Return the command line of a tutorial: that of a quick run, or of an ordinary one.

    It runs in its own folder, where an earlier run for the gallery has left its results.
    """
    script = Path(script_vars["src_file"])
    shutil.rmtree(script.parent / "outputs" / script.stem, ignore_errors=True)
    return ["--quick"] if os.environ.get("PPOKIT_GALLERY") == "quick" else []


def figure(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Return the figures that a tutorial wrote to its folder, each once, where it was written."""
    names = block_vars["example_globals"]
    out = names.get("OUT")
    targets = []
    for source in [] if out is None else sorted(Path(out).glob("*.png")):
        targets.append(next(block_vars["image_path_iterator"]))
        shutil.move(source, targets[-1])
    return figure_rst(targets, gallery_conf["src_dir"])


def order(filename: str) -> tuple[int, str]:
    """Return the place of a tutorial in the gallery; new ones come last."""
    stem = Path(filename).stem
    order = [*TITLES]
    return (order.index(stem) if stem in order else len(order), stem)


def draw_thumbnails(app: Sphinx) -> None:
    """Write the pictures of the gallery: a figure would be too small to read."""
    folder = Path(app.srcdir) / "tutorials" / "images" / "thumb"
    for tutorial, title in TITLES.items():
        picture = Figure(figsize=(4, 2.8), facecolor="#e8f1fa")
        style: Any = {"ha": "center", "va": "center", "fontsize": 34}
        picture.text(0.5, 0.5, title, color="#08306b", weight="bold", **style)
        picture.savefig(folder / f"sphx_glr_{tutorial}_thumb.png", dpi=100)


def offer_notebooks(app: Sphinx) -> None:
    """Put the notebooks of the tutorials in the place of those of sphinx-gallery."""
    tutorials = Path(app.srcdir) / "tutorials"
    for notebook in (Path(app.srcdir).parent / "tutorials" / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, tutorials)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write pictures and notebooks after those of sphinx-gallery."""
    app.connect("builder-inited", draw_thumbnails, priority=900)
    app.connect("builder-inited", offer_notebooks, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
