"""The page "Coming from other systems" has a row for each argument of each system."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torchrl.modules

import ppokit

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "howto" / "coming_from.md").read_text()
NAMES = json.loads((ROOT / "tests" / "data" / "coming_from.json").read_text())
SECTIONS = {
    "rl8": "rl8",
    "rllib": "RLlib",
    "agilerl": "AgileRL",
    "stable_baselines3": "Stable-Baselines3",
    "cleanrl": "CleanRL",
}


def rows_of(section: str) -> list[tuple[list[str], str]]:
    """Return the rows of a section's table: their arguments, and the rest."""
    _, text = PAGE.split(f"\n## {section}\n", 1)
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]
    rows = (line.strip("| ").split(" | ", 1) for line in lines)
    return [(re.findall(r"`([^`]+)`", names), rest) for names, rest in rows]


@pytest.mark.parametrize("system", SECTIONS)
def test_every_argument_has_its_row(system: str):
    rows = rows_of(SECTIONS[system])
    named = [name for names, _ in rows for name in names]
    assert len(set(named)) == len(named)
    kept = {k: set(v) for k, v in NAMES[system].items() if k != "version"}
    assert set(named) == set().union(*kept.values())
    assert all(rest.strip("| ") for _, rest in rows)


def test_classes_of_the_page_exist():
    for name in set(re.findall(r"`([A-Z][A-Za-z0-9]+)\(", PAGE)):
        modules = ppokit, torchrl.modules, import_module("tensordict.nn"), torchrl
        assert any(hasattr(m, name) for m in modules), name
