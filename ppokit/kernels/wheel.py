"""How distributions are built: the tag of a wheel, and what is in an archive of the sources.

``pyproject.toml`` names these classes; nothing imports them but the build. They import nothing of
the package, whose dependencies an isolated build does not have.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist


class KernelWheel(bdist_wheel):
    """A wheel for all Pythons from 3.10 on, whether or not the kernel is in it.

    The kernel is optional: a wheel that was built without a compiler holds Python alone, and its
    tag says so.
    """

    def initialize_options(self) -> None:
        """Use the limited API of Python 3.10, as the kernel does."""
        super().initialize_options()
        self.py_limited_api = "cp310"

    def run(self) -> None:
        """Delete the kernel of an earlier build first: compiling may fail now."""
        for kernel in self._kernels():
            kernel.unlink()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform, once all is built."""
        if self._kernels():
            return super().get_tag()
        self.root_is_pure = True
        return "py3", "none", "any"

    def _kernels(self) -> list[Path]:
        folder = Path(self.get_finalized_command("build").build_lib) / "ppokit" / "kernels"
        return [*folder.glob("native*.so"), *folder.glob("native*.pyd")]


class Sources(sdist):
    """Leaves the tests out, of which setuptools would take a part that does not run by itself."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy all files but those of the tests."""
        super().make_release_tree(base_dir, [x for x in files if Path(x).parts[0] != "tests"])
