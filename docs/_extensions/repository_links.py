"""Links to files of the repository, as the pages have them for a reader of the sources.

A page links to a tutorial as ``../../tutorials/x.py``, to all of them as ``../../tutorials`` and to
a module as ``../../ppokit/x/y.py``, which is right where the sources are read. On the site that is
the tutorial's page in the gallery, the gallery, and the module's page of viewcode; other files are
downloads. In pages about the blocks, a public name in code is a link to the reference.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import ppokit

ROOT = Path(__file__).resolve().parents[2]
MODULES = "_modules"
PAGES_OF_BLOCKS = ("blocks/", "getting_started")
PUBLIC = (
    *ppokit.__all__,
    *(f"functional.{name}" for name in ppokit.functional.__all__),
    *("kernels.available", "kernels.use", "plotting.plot_run", "plotting.plot_frames"),
    "plotting.record_episode",
)
logger = logging.getLogger(__name__)


class RepositoryLinks(SphinxTransform):
    """Replaces links to tutorials and modules by links to their pages."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Look at each link to a file of the document."""
        # MyST makes a download of a link to a file, and a reference of unknown kind of any other.
        kinds = addnodes.download_reference, addnodes.pending_xref
        for node in [n for kind in kinds for n in self.document.findall(kind)]:
            if node.get("reftype") != "myst" or node.get("refdomain") is not None:
                continue
            link = self._link(self._path_in_repository(node["reftarget"]))
            if link is not None:
                link.source, link.line = node.source, node.line
                link += node.children
                node.replace_self(link)

    def _link(self, path: PurePosixPath | None) -> nodes.Element | None:
        parts = () if path is None else path.with_suffix("").parts
        if parts[:1] == ("tutorials",):
            page = "/".join(parts if len(parts) > 1 else ("tutorials", "index"))
            return addnodes.pending_xref(
                refdomain="std",
                reftype="doc",
                reftarget=f"/{page}",
                refexplicit=True,
                refdoc=self.env.docname,
                refwarn=True,
            )
        if parts[:1] == ("ppokit",):
            return nodes.reference(refuri="", internal=True, module=".".join(parts))
        return None

    def _path_in_repository(self, target: str) -> PurePosixPath | None:
        _, path = self.env.relfn2path(target, self.env.docname)
        path = Path(path).resolve()
        return PurePosixPath(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def resolve_modules(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Give the links to modules their address, which depends on the page and on the builder."""
    for node in list(doctree.findall(nodes.reference)):
        module = node.get("module")
        if module is None:
            continue
        name = module.removesuffix(".__init__")
        if name not in getattr(app.env, "_viewcode_modules", {}):
            logger.warning("%s has no page of its source: nothing of it is documented", name)
        target = f"{MODULES}/{name.replace('.', '/')}"
        node["refuri"] = app.builder.get_relative_uri(docname, target)


class LinkedNames(SphinxTransform):
    """Makes links of the public names in code, in the pages that are about them."""

    default_priority = 6

    def apply(self, **_: Any) -> None:
        """Look at each name in code of the document."""
        if not self.env.docname.startswith(PAGES_OF_BLOCKS):
            return
        for node in list(self.document.findall(nodes.literal)):
            name = node.astext().removeprefix("ppokit.")
            if name not in PUBLIC or isinstance(node.parent, nodes.reference | nodes.title):
                continue
            if isinstance(node.parent, addnodes.pending_xref | nodes.inline):
                continue
            link = addnodes.pending_xref(
                refdomain="py",
                reftype="obj",
                reftarget=f"ppokit.{name}",
                refexplicit=True,
                refdoc=self.env.docname,
                refwarn=True,
            )
            node.replace_self(link)
            link += node


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transforms."""
    app.add_transform(RepositoryLinks)
    app.add_transform(LinkedNames)
    app.connect("doctree-resolved", resolve_modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
