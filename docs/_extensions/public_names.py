"""Ends the build where a public name is missing from the reference."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

PACKAGES = ("ppokit", "ppokit.functional", "ppokit.kernels")


def check(_: Sphinx, env: BuildEnvironment) -> None:
    """Raise an ExtensionError that names what is missing."""
    described: Any = env.get_domain("py").data["objects"]
    public = {
        f"{package}.{name}"
        for package in PACKAGES
        for name in getattr(import_module(package), "__all__", ())
    }
    if missing := sorted(public - set(described)):
        raise ExtensionError(
            f"Not in the reference: {', '.join(missing)}. Add them to docs/reference/index.md."
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
