"""The figures in README and on pages are those of the benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ppokit
from tests.benchmarks.claim_texts import claims, readme
from tests.benchmarks.claims import NUMBER, differences, lines_of, updated, without

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "benchmarks" / "index.md"
CITING = [*DOCS.glob("*.md"), *DOCS.glob("blocks/*.md"), *DOCS.glob("howto/*.md")]
CITING = [ROOT / "README.md", *sorted(CITING)]
CLAIMS = claims()
#: Numbers beside a link to a benchmark that are settings or versions.
SETTINGS = {
    "changelog": ["2.11"],
    "README": ["2.11", "2.12", "3", "64"],
    "dual_clip_ppo_loss": ["64"],
    "gae": ["256"],
    "distributed": ["90"],
    "index": ["0", "1,000,000", "2.11", "2.12"],
    "isaac_lab": ["2.11", "2.12"],
    "training_step": ["2.11", "2.12", "64"],
    "which_kl_stop": ["0.02", "0.001"],
}


@pytest.mark.parametrize("name", CLAIMS)
def test_figures_are_those_of_the_benchmarks(name: str):
    """Otherwise run `python -m tests.benchmarks.claims`."""
    assert [*differences((ROOT / name).read_text(), CLAIMS[name])] == []


def texts_with_figures(page: Path, text: str) -> Iterator[str]:
    """Yield results in the index, and paragraphs that link to a benchmark on another page."""
    text = re.sub(r"^```.*?^```|`[^`]*`|\$[^$]*\$", "", text, flags=re.MULTILINE | re.DOTALL)
    if page == INDEX:
        for row in re.findall(r"^\| \[.*", text, re.MULTILINE):
            yield re.sub(r"\]\([^)]*\)", "]", " ".join(row.split(" | ")[2:]))
        return
    text = re.sub(r"^\d+\. ", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=[-*] )", text)
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if re.search(r"benchmarks/\w+\.md", part):
            table = following if following.startswith("|") else ""
            yield re.sub(r"\]\([^)]*\)", "]", part + table)


@pytest.mark.parametrize("page", [*CITING, INDEX], ids=lambda page: page.stem)
def test_every_figure_beside_a_link_to_a_benchmark_is_a_claim(page: Path):
    text = without(page.read_text(), CLAIMS.get(str(page.relative_to(ROOT)), []))
    found = [x for part in texts_with_figures(page, text) for x in NUMBER.findall(part)]
    assert set(found) - {*SETTINGS.get(page.stem, [])} == set()


def test_a_figure_that_is_not_current_is_found_and_corrected():
    page = "A step takes 0.41 to\n0.49 of 64 frames, 2x64.\n"
    claim = "takes 0.43 to 0.50 of 64 frames, 2x64"
    (found,) = differences(page, [claim])
    assert found == f"'takes 0.41 to 0.49 of 64 frames, 2x64' must be {claim!r}"
    assert updated(page, [claim]) == "A step takes 0.43 to\n0.50 of 64 frames, 2x64.\n"
    assert [*differences(updated(page, [claim]), [claim])] == []
    assert without(page, [claim]) == "A step .\n"
    for wrong in (page * 2, page.replace("takes", "took")):
        with pytest.raises(LookupError, match=r"[02] places with the text of this claim"):
            list(differences(wrong, [claim]))


def test_other_measurements_change_the_claims(monkeypatch: pytest.MonkeyPatch):
    """Of each CSV file that README cites."""
    for name in ("step", "device", "gae", "rewards", "vector_environments", "loop", "mujoco"):
        for line in lines_of(name):
            for column in {"value", "us_per_frame", "median_us", "this_over_bound"} & {*line}:
                number = float(line[column] or 1) * (1.5 if "ppokit" in str(line) else 1.0)
                monkeypatch.setitem(line, column, str(number))
            for column in {"best_peer_over_this"} & {*line}:
                monkeypatch.setitem(line, column, str(float(line[column] or 1) / 1.5))
        assert readme() != CLAIMS["README.md"], name
        monkeypatch.undo()
    assert readme() == CLAIMS["README.md"]


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources():
    sources = "".join(path.read_text() for path in Path(ppokit.__file__).parent.rglob("*.py"))
    texts = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", sources))
    page = (DOCS / "howto" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(.*?)`", page, re.M)
    assert len(rows) > 8
    assert [text for text in rows if text not in texts] == []
