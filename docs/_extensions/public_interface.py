"""The reference shows what is public: all names, constructors' own arguments, public bases.

The build ends where a public name is missing from it.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util.inspect import stringify_signature

NAMES = ("functional", "kernels", "networks", "plotting", "testing")
PACKAGES = ("ppokit", *(f"ppokit.{name}" for name in NAMES))


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


def show_arguments(
    _: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, None] | None:
    """Return the arguments of ``__init__`` where torchrl's metaclass hides them."""
    if what != "class" or signature is None or not signature.startswith("(*args"):
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    return stringify_signature(inspect.Signature(parameters), show_annotation=False), None


def show_public_bases(_: Sphinx, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Replace bases that are details of ppokit by those that they stand for."""

    def public(base: Any) -> list[Any]:
        is_ours = getattr(base, "__module__", "").startswith("ppokit")
        if not is_ours:
            return [base]
        return [x for parent in base.__bases__ if parent is not object for x in public(parent)]

    bases[:] = list(dict.fromkeys(x for base in bases for x in public(base))) or [object]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check, and what autodoc shows."""
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
