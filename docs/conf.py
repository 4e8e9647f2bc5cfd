"""The site: ``sphinx-build -W --keep-going -b html docs docs/_build/html``.

Read from the environment:

- ``PPOKIT_GALLERY``: ``quick`` runs each tutorial with ``--quick``, ``full`` as it is; otherwise
  they are shown and not run.
- ``PPOKIT_INTERSPHINX=1`` links to the manuals of Python, torch, TorchRL and gymnasium.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_extensions")]
os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")

import ppokit  # noqa: E402

project, author, language = "ppokit", "ppokit", "en"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "myst_parser",
    "repository_links",
    "public_interface",
    "repository_gallery",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = False

# -- Markdown and mathematics

myst_enable_extensions = [
    "dollarmath",
    "colon_fence",
    "attrs_block",
    "substitution",
]
myst_substitutions = {"version": ppokit.__version__}
myst_heading_anchors = 4
mathjax3_config = {"chtml": {"displayAlign": "left", "displayIndent": "2em"}}

# -- the reference

autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
maximum_signature_line_length = 90
# Inherited members are documented by torch and torchrl; these are ppokit's own base classes.
_PARENTS = (
    "Module TensorDictModuleBase TensorDictModule Transform LossModule ClipPPOLoss PPOLoss "
    "ValueEstimatorBase GAE LSTMModule GRUModule BaseCollector WholeState"
)
_NOT_SHOWN = (
    "check_state loaded_name get_extra_state set_extra_state extra_repr transform_reward_spec "
    "register_buffer requires_shared_write_state moments policy_keys entries coefficients"
)
autosummary_context = {
    "parents": ", ".join(_PARENTS.split()),
    "not_shown": ", ".join(_NOT_SHOWN.split()),
}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
if os.environ.get("PPOKIT_INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "torchrl": ("https://docs.pytorch.org/rl/stable", None),
        "tensordict": ("https://docs.pytorch.org/tensordict/stable", None),
        "gymnasium": ("https://gymnasium.farama.org", None),
    }

# -- the tutorials

gallery = os.environ.get("PPOKIT_GALLERY", "")
if gallery not in ("", "quick", "full"):
    raise ValueError(
        f"PPOKIT_GALLERY is {gallery!r}; it may be 'quick', 'full', or not set."
    )
sphinx_gallery_conf = {
    "examples_dirs": ["../tutorials"],
    "gallery_dirs": ["tutorials"],
    "plot_gallery": bool(gallery),
    "filename_pattern": r"[\\/]\w+\.py$",
    "abort_on_example_error": True,
    "reset_argv": "repository_gallery.arguments",
    "image_scrapers": ["repository_gallery.figure"],
    "within_subsection_order": "repository_gallery.order",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1_000_000,
    "remove_config_comments": True,
}
suppress_warnings = ["config.cache"]

# -- the pages

html_theme = "pydata_sphinx_theme"
html_title = "ppokit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"changelog": [], "contributing": [], "getting_started": []}
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_prev_next": True,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": [],
    "footer_end": ["theme-version"],
    "secondary_sidebar_items": ["page-toc"],
}
