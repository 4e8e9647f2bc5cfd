"""Notebooks of the tutorials: they are up to date, and their text is Markdown."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("ipykernel", "nbclient", "sphinx_gallery")
if missing := [name for name in NEEDED if find_spec(name) is None]:
    pytest.skip(
        f"{', '.join(missing)} not installed; they come with ppokit[docs]", allow_module_level=True
    )

from tests import notebooks  # noqa: E402

SCRIPT = '''"""
A title
=======

About :class:`~ppokit.GAE`, :doc:`other_one` and :doc:`../howto/recurrent`.

.. list-table::
   :header-rows: 1

   * -
     - rl8
   * - seconds, of
       three
     - 7.9

The end.
"""

# %%
# Options
# -------
import sys

QUICK = "--quick" in sys.argv
print("quick:", QUICK)
'''


def test_the_notebooks_are_what_the_scripts_give():
    assert notebooks.stale(notebooks.names()) == []


@pytest.mark.parametrize("name", notebooks.names())
def test_each_script_can_be_a_notebook(name: str):
    source = (notebooks.TUTORIALS / f"{name}.py").read_text()
    assert source.count(notebooks.QUICK_LINE) == 1
    assert "argparse" not in source
    assert len(source.splitlines()) <= 200
    assert not re.search(r"matplotlib\.use|plt\.close", source), "a figure would be hidden"
    text = "".join(
        "".join(cell["source"])
        for cell in notebooks.notebook_of(name)["cells"]
        if cell["cell_type"] == "markdown"
    )
    assert not re.search(r":\w+:`|^\.\. ", text, re.M), "left of reStructuredText"
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            path = notebooks.NOTEBOOKS / target
            assert path.exists() or (notebooks.TUTORIALS / f"{path.stem}.py").exists(), target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tutorials with one script."""
    tutorials = tmp_path / "tutorials"
    tutorials.mkdir()
    (tutorials / "one.py").write_text(SCRIPT)
    monkeypatch.setattr(notebooks, "TUTORIALS", tutorials)
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tutorials / "notebooks")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    return tutorials


def test_roles_links_and_tables_become_markdown(folder: Path):
    install, title, _, _ = notebooks.notebook_of("one")["cells"]
    assert '"../..[tutorials,atari]"' in "".join(install["source"])
    text = "".join(title["source"])
    assert "``ppokit.GAE``, [other_one](other_one.ipynb)" in text
    assert "[howto/recurrent](../../docs/howto/recurrent.md)" in text
    assert "|  | rl8 |\n|---|---|\n| seconds, of three | 7.9 |" in text


@pytest.mark.slow
def test_a_notebook_without_a_figure_or_with_an_error_fails(folder: Path, tmp_path: Path):
    with pytest.raises(RuntimeError, match="one: no cell shows a figure"):
        notebooks.run("one", quick=True)
    drawn = "\nimport matplotlib.pyplot as plt\nfigure, _ = plt.subplots()\n"
    (folder / "one.py").write_text(SCRIPT + drawn)
    notebooks.run("one", quick=True, kept=tmp_path, stores=True)
    assert "quick: True" in (tmp_path / "one.ipynb").read_text()
    stored = (notebooks.NOTEBOOKS / "one.ipynb").read_text()
    assert "quick: True" in stored
    assert "image/png" in stored
    assert notebooks.stale(["one"]) == []
    (folder / "one.py").write_text(f"{SCRIPT}{drawn}print(1)\n")
    assert notebooks.stale(["one"]) == ["one"]
    notebooks.write(["one"])
    assert notebooks.stale(["one"]) == []
    assert (notebooks.NOTEBOOKS / "one.ipynb").read_text().count("image/png") == 0
    (folder / "one.py").write_text(SCRIPT + drawn)
    (folder / "one.py").write_text(SCRIPT + "\nraise ValueError('broken')\n")
    with pytest.raises(RuntimeError, match="ValueError: broken"):
        notebooks.run("one", quick=False)
