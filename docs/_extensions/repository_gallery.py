"""How the tutorials are run for the gallery: their arguments, their figures, their order.

Where they are not run, their pictures in the gallery are those of the benchmarks that run them. The
notebooks that pages offer are those of ``tutorials/notebooks``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst
from sphinx_gallery.utils import scale_image

FIGURES = {
    "coding_ppo": "coding_ppo",
    "mujoco_ppo": "mujoco",
    "recurrent_ppo": "memory_tasks",
    "rl8_vectorized": "rl8",
    "rllib_ppo": "rllib",
    "agilerl_ppo": "agilerl",
}

ORDER = [
    *("coding_ppo", "mujoco_ppo", "training_step", "checkpoints_and_resume"),
    *("custom_algorithm", "recurrent_ppo", "multi_agent_ppo"),
    *(
        "distributed_ppo",
        "population",
        "rl8_vectorized",
        "rllib_ppo",
        "agilerl_ppo",
    ),
]


def arguments(
    gallery_conf: dict[str, Any], script_vars: dict[str, Any]
) -> list[str]:
    """Return the command line of a tutorial: that of a quick run, or of an ordinary one.

    It runs in its own folder, where an earlier run for the gallery has left its results.
    """
    script = Path(script_vars["src_file"])
    shutil.rmtree(script.parent / "outputs" / script.stem, ignore_errors=True)
    return ["--quick"] if os.environ.get("PPOKIT_GALLERY") == "quick" else []


def figure(
    block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]
) -> str:
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
    return (ORDER.index(stem) if stem in ORDER else len(ORDER), stem)


def show_benchmarks(app: Sphinx) -> None:
    """Write the pictures of the tutorials that have a benchmark, unless they are run."""
    if app.config.sphinx_gallery_conf["plot_gallery"]:
        return
    docs = Path(app.srcdir)
    for tutorial, benchmark in FIGURES.items():
        thumbnail = (
            docs
            / "tutorials"
            / "images"
            / "thumb"
            / f"sphx_glr_{tutorial}_thumb.png"
        )
        scale_image(
            str(docs / "benchmarks" / f"{benchmark}.png"),
            str(thumbnail),
            400,
            280,
        )


def offer_notebooks(app: Sphinx) -> None:
    """Put the notebooks of the tutorials in the place of those of sphinx-gallery."""
    tutorials = Path(app.srcdir) / "tutorials"
    for notebook in (Path(app.srcdir).parent / "tutorials" / "notebooks").glob(
        "*.ipynb"
    ):
        shutil.copy(notebook, tutorials)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write pictures and notebooks after those of sphinx-gallery."""
    app.connect("builder-inited", show_benchmarks, priority=900)
    app.connect("builder-inited", offer_notebooks, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
