"""The page "Coming from other systems" has a row for each argument of each system."""

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torchrl.modules

import ppokit
from tests.benchmarks.peers import folder_of

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
        assert any(hasattr(m, name) for m in modules) or name == "DistributedDataParallel", name


READ = """
import dataclasses, inspect, json, sys
from importlib import import_module
names = set()
for path in sys.argv[1:]:
    module, *attributes = path.split(":")
    found = import_module(module)
    for attribute in attributes:
        found = getattr(found, attribute)
    if dataclasses.is_dataclass(found):
        names |= {field.name for field in dataclasses.fields(found)}
    else:
        parameters = inspect.signature(found).parameters.items()
        names |= {name for name, x in parameters if name != "self" and x.kind != x.VAR_KEYWORD}
print("names", json.dumps(sorted(names)))
"""
WHERE = {
    "rl8": ["rl8:AlgorithmConfig", "rl8:RecurrentAlgorithmConfig"],
    "rllib": [
        "ray.rllib.algorithms.ppo:PPOConfig:training",
        "ray.rllib.algorithms.algorithm_config:AlgorithmConfig:training",
    ],
    "agilerl": ["agilerl.algorithms:PPO:__init__"],
    "stable_baselines3": ["stable_baselines3:PPO:__init__"],
}


@pytest.mark.slow
@pytest.mark.parametrize("system", WHERE)
def test_the_list_of_names_is_that_of_the_package(system: str):
    python = folder_of(system) / "bin" / "python"  # made by the benchmarks
    if find_spec(system):
        python = Path(sys.executable)
    elif not python.exists():
        pytest.skip(f"{SECTIONS[system]} is not installed")
    command = [str(python), "-c", READ, *WHERE[system]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("names "))
    kept = (set(names) for kind, names in NAMES[system].items() if kind != "version")
    assert set(json.loads(line.removeprefix("names "))) == set().union(*kept)
