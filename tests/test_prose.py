"""The text that a person reads avoids patterns of a private voice; see docs/contributing.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "tutorials" not in page.relative_to(ROOT).parts]
TUTORIALS = (ROOT / "tutorials").glob("*.py")
SOURCES = [*sorted((ROOT / "ppokit").rglob("*.py")), *sorted(TUTORIALS)]

PATTERNS = {
    "ours, theirs": r"\b(ours|theirs)\b",
    "one's": r"\bone's\b",
    "nobody, whoever": r"\b(nobody|whoever)\b",
    "refuse": r"\brefus(e|es|ed|ing|als?)\b",
    "are those of": r"\b(is|are|was|were) (that|those) of\b",
    "those of at the start": r"(^|[.;:!?] )those (of|that|which)\b",
    "spread": r"\bspread\b(?! (over|out)\b)",
    "mend": r"\bmend(s|ed|ing)?\b",
    "anew": r"\b(anew|as ever|for ever|once more)\b",
    "otherwise": r"\b((do|does|did) otherwise|otherwise than)\b",
    "says so": r"\bsays? so\b",
    "fragment": r"(^|[.!?] )(What|Of|Who|Whose|Whatever|Where)\b[^.?!]*[.!](?=\s|$)",
    "so is": r"(\band|;|,) so (is|are|do|does|has|have)\b",
    "but for": r"\bbut for\b",
    "go on": r"\b(goes?|went) on\b",
    "whatever": r", whatever\b",
    "at hand": r"\bat hand\b",
    "to the bit": r"\bto the (last )?bit\b",
    "cannot be had": r"\bcannot be had\b",
    "found out": r"\bfound (out|anew)\b",
    "what is done": r"\bwhat (is|are|was|were) (not |to be )?\w+(ed|en)\b",
    "let go of": r"\b(let go of|of no use)\b",
    "affair": r"'s affair\b",
}


def paragraphs(page: str) -> Iterator[str]:
    """Yield the text of a page without code, a table's cell or a list's item at a time."""
    page = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$", "CODE", page, flags=re.DOTALL)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )|(?<=\|)\n", page):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            yield " ".join(cell.lstrip("#-*> ").split())


def strings(source: str) -> Iterator[str]:
    """Yield docstrings, messages and comments of a module."""
    tree = ast.parse(source)
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(x.value) if isinstance(x, ast.Constant) else "CODE" for x in node.values]
            yield "".join(parts)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield node.value
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, text = token.start[0], token.string.lstrip("#:% ")
            if lines and lines[-1][0] == row - 1:
                lines[-1] = row, f"{lines[-1][1]} {text}"
            else:
                lines.append((row, text))
    yield from (text for _, text in lines)


def prose(path: Path) -> Iterator[str]:
    """Yield the pieces of text of a page or a module."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from paragraphs(text)
        return
    for string in strings(text):
        string = re.sub(r"^ *(>>>|\.\.\.) .*$", "", string, flags=re.MULTILINE)
        string = re.sub(r"\.\. (code-block|math)::.*?(\n\n(?=\S)|\Z)", "", string, flags=re.DOTALL)
        yield from paragraphs(string.replace("``", "`"))


def hits(path: Path) -> Iterator[str]:
    """Yield the pattern and the text around each hit."""
    for piece in prose(path):
        for name, pattern in PATTERNS.items():
            flags = 0 if name == "fragment" else re.IGNORECASE
            for found in re.finditer(pattern, piece, flags):
                around = piece[max(0, found.start() - 40) : found.end() + 40]
                yield f"{path.relative_to(ROOT)}: {name}: ...{around}..."


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_text_has_none_of_the_patterns(path: Path):
    assert [*hits(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_on_pages_has_at_most_80_columns(page: Path):
    code = re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in code for line in block.splitlines()]
    too_long = [line for line in lines if len(line) > 80 and not line.startswith("python3 -m venv")]
    assert too_long == []


BLOCKS = [page for page in (ROOT / "docs" / "blocks").glob("*.md") if page.stem != "index"]


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
