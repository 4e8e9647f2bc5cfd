"""The tag of a wheel: that of its platform where the C kernel is in it, and of none where not.

``pyproject.toml`` names this class; nothing imports it but the build. The kernel is optional, so a
wheel that was built without a compiler holds Python alone, and says so.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel


class KernelWheel(bdist_wheel):
    """A wheel for all Pythons from 3.10 on, whether or not the kernel is in it."""

    def initialize_options(self) -> None:
        """Use the limited API of Python 3.10, as the kernel does."""
        super().initialize_options()
        self.py_limited_api = "cp310"

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform, once all is built."""
        built = Path(self.get_finalized_command("build").build_lib)
        kernels = built / "ppokit" / "kernels"
        if [*kernels.glob("native*.so"), *kernels.glob("native*.pyd")]:
            return super().get_tag()
        self.root_is_pure = True
        return "py3", "none", "any"
