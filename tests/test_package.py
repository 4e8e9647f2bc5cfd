"""The package as it is installed: its version, and an editable install beside a script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import ppokit

ROOT = Path(__file__).parents[1]


def test_the_version_is_that_of_the_installed_package():
    assert ppokit.__version__ == version("ppokit")


@pytest.mark.slow
def test_a_script_beside_the_checkout_imports_the_package(tmp_path: Path):
    """The folder of the script holds the checkout, which is called "ppokit", too."""
    pytest.importorskip("pip")
    checkout, built = tmp_path / "ppokit", shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(Path(ppokit.__file__).parent, checkout / "ppokit", ignore=built)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    venv.create(tmp_path / "venv", symlinks=True)
    folders = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", folders))
    python = Path(sysconfig.get_path("scripts", "posix_prefix", folders)) / "python"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CC": "false"}
    install = ["-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, *install, "--target", site, "-e", checkout)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "script.py").write_text("from ppokit import GAE\nprint(GAE.__module__)")
    assert run(python, tmp_path / "script.py") == "ppokit.advantages.gae\n"


def test_names_are_imported_on_first_use():
    code = """
import sys
import ppokit
assert not {"torch", "gymnasium", "matplotlib"} & sys.modules.keys()
from ppokit import GAE
assert not {"gymnasium", "matplotlib", "ppokit.update"} & sys.modules.keys()
assert set(ppokit.__all__) <= set(dir(ppokit))
for name in ppokit.__all__:
    assert getattr(ppokit, name) is not None
try:
    ppokit.missing
except AttributeError as error:
    assert "no attribute 'missing'" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tests_that_ci_names_exist():
    """A file that is renamed is renamed there too."""
    lists = re.findall(r"^(?:slow|too_slow|others)\+?=.*$", (ROOT / ".ci/run").read_text(), re.M)
    script = "\n".join([*lists, 'printf "%s\n" "${slow[@]}" "${too_slow[@]}" "${others[@]}"'])
    names = subprocess.run(
        ["bash", "-c", script], cwd=ROOT / "tests", capture_output=True, text=True
    )
    files = {name.partition("::")[0] for name in names.stdout.split()}
    assert len(files) > 20
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []
