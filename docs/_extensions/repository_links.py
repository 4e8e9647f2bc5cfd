"""Links to files of the repository, as the pages have them for a reader of the sources.

A page links to a tutorial as ``../../tutorials/x.py`` and to a module as ``../../ppokit/x/y.py``,
which is right where the sources are read. On the site the former is the tutorial's page in the
gallery, and the latter the module's page of viewcode; other files are downloads.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
MODULES = "_modules"
logger = logging.getLogger(__name__)


class RepositoryLinks(SphinxTransform):
    """Replaces downloads of tutorials and modules by links to their pages."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Look at each download of the document."""
        for node in list(self.document.findall(addnodes.download_reference)):
            path = self._path_in_repository(node["reftarget"])
            if path is None or path.suffix != ".py":
                continue
            if path.parts[0] in ("tutorials", "docs") and path.parts[-2] == "tutorials":
                link = addnodes.pending_xref(
                    refdomain="std",
                    reftype="doc",
                    reftarget=f"/tutorials/{path.stem}",
                    refexplicit=True,
                    refdoc=self.env.docname,
                    refwarn=True,
                )
            elif path.parts[0] == "ppokit":
                link = nodes.reference(refuri="", internal=True, module=str(path.with_suffix("")))
            else:
                continue
            link.source, link.line = node.source, node.line
            link += node.children
            node.replace_self(link)

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
        name = module.replace("/", ".").removesuffix(".__init__")
        if name not in getattr(app.env, "_viewcode_modules", {}):
            logger.warning("%s has no page of its source: nothing of it is documented", name)
        target = f"{MODULES}/{name.replace('.', '/')}"
        node["refuri"] = app.builder.get_relative_uri(docname, target)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_transform(RepositoryLinks)
    app.connect("doctree-resolved", resolve_modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
