"""The pages have the parts that they promise; the site builds, and no link within it is dead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "tutorials" not in page.relative_to(ROOT).parts]
BLOCKS = [page for page in (ROOT / "docs" / "blocks").glob("*.md") if page.stem != "index"]
NEEDED = ("myst_parser", "pydata_sphinx_theme", "sphinx", "sphinx_copybutton", "sphinx_gallery")


class Links(HTMLParser):
    """The addresses that a page points to, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def dead_links(site: Path) -> Iterator[str]:
    """Yield page and address of each link within the site that leads nowhere."""
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    pages = {page: links for page, links in pages.items() if "_static" not in page.parts}
    for page, links in pages.items():
        for target in links.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                continue
            path = (page.parent / unquote(address.path)).resolve() if address.path else page
            anchors = pages[path].anchors if path in pages else None
            is_dead = not path.exists() or path.is_dir()
            if address.fragment and anchors is not None:
                is_dead |= unquote(address.fragment) not in anchors
            if is_dead:
                yield f"{page.relative_to(site.resolve())}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_on_pages_has_at_most_80_columns(page: Path):
    code = re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in code for line in block.splitlines()]
    too_long = [line for line in lines if len(line) > 80 and not line.startswith("python3 -m venv")]
    assert too_long == []


@pytest.mark.parametrize("page", BLOCKS, ids=lambda path: path.stem)
def test_a_block_page_has_all_its_parts(page: Path):
    text = page.read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:2] == ["Problem", "Before and after"]
    assert [name for name in headings if name in ("Figure", "Pitfalls", "Cost")] == [
        "Figure",
        "Pitfalls",
        "Cost",
    ]
    assert any(name.startswith("Options") for name in headings)
    assert "```diff\n" in text
    assert re.search(r"^!\[.+\]\(.+\.png\)$", text, re.MULTILINE)


def test_files_that_a_page_names_exist():
    named = re.compile(r"`((?:tests|ppokit|tutorials|docs)/[\w/.-]+\.\w+)`")
    found = [(page, name) for page in PAGES for name in named.findall(page.read_text())]
    assert len(found) > 10
    assert [(page, name) for page, name in found if not (ROOT / name).exists()] == []


def test_dead_links_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there"></a><a href="#here"></a><a href="https://c.d/e"></a>'
        '<a href="b.html#nowhere"></a><img src="f.png"></p>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    assert list(dead_links(tmp_path)) == ["a.html: b.html#nowhere", "a.html: f.png"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_no_dead_links(tmp_path: Path):
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed; they come with ppokit[docs]")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "doctrees"), "docs", str(tmp_path / "html")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PPOKIT_")}
    built = subprocess.run(
        [*command, *folders], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert list(dead_links(tmp_path / "html")) == []
