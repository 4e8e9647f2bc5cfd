"""The code in README and in the pages of the site runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import gymnasium.wrappers
import pytest
import torchrl.envs
import torchrl.record
from tensordict.nn import composite_lp_aggregate, set_composite_lp_aggregate

import ppokit

DOCS = Path(__file__).parents[1] / "docs"
WITH_CODE = [DOCS / "getting_started.md", *DOCS.glob("blocks/*.md"), *DOCS.glob("howto/*.md")]
PAGES = sorted(page for page in WITH_CODE if "```python" in page.read_text())


README = DOCS.parent / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_complete_program_is_short_and_learns():
    """The one of README, which the page of networks has, too."""
    program = PROGRAMS[0]
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 80
    assert f"```python\n{program}```" in (DOCS / "blocks" / "networks.md").read_text()
    names: dict[str, Any] = {}
    exec(compile(program, str(README), "exec"), names)
    assert len(names["returns"]) == 20
    assert names["returns"].mean() >= 400


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where pickle looks for classes of the page
    with set_composite_lp_aggregate(composite_lp_aggregate()):  # a page may set another
        exec(compile("\n".join(blocks), str(page), "exec"), vars(module))


SCRIPTS = sorted((DOCS.parent / "tutorials").glob("*.py"))


@pytest.mark.parametrize("path", [README, *PAGES, *SCRIPTS], ids=lambda path: path.stem)
def test_a_program_that_trains_uses_one_thread(path: Path):
    """With the default, the threads of torch wait actively and take the time of all cores."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    trains = re.search(r"\b(PPOUpdate|TrainingStep|\w*Trainer)\(", text)
    if trains and "ollector(" in text and path.stem != "isaac_lab":  # that loop is for a device
        assert "torch.set_num_threads(1)" in text[: trains.start()]


def test_every_installation_of_the_checkout_is_editable():
    """A script in the checkout imports its folder `ppokit`, where an installed kernel is not."""
    root = DOCS.parent
    paths = [README, *DOCS.rglob("*.md"), *root.glob(".github/workflows/*"), root / ".ci" / "run"]
    commands = re.compile(r"pip install ([^`&\n]*)")
    found = [x for path in paths for x in commands.findall(path.read_text())]
    of_checkout = [x for x in found if re.search(r"(^|\s|\")\.(\[|\s|\"|$)", x)]
    assert len(of_checkout) > 10
    assert [x for x in of_checkout if "-e" not in x.split()] == []


def test_the_table_of_transforms_names_existing_classes():
    (page,) = (page for page in PAGES if page.stem == "in_torchrl")
    _, table = page.read_text().split("### torchrl transform", 1)
    table, *_ = table.split("\n## ", 1)
    rows = re.findall(r"^\| `(.*?)\|(.*)\|$", table, re.MULTILINE)
    assert len(rows) > 20
    modules = torchrl.envs, torchrl.envs.transforms, torchrl.record
    for transforms, instead in rows:
        for name in re.findall(r"\b[A-Z]\w+", transforms):
            assert any(hasattr(module, name) for module in modules), name
        for name in re.findall(
            r"`([A-Z][A-Za-z]+(?:Observation|Reward|Action|Limit|Video))`", instead
        ):
            assert hasattr(gym.wrappers, name) or hasattr(gym, name), name


def test_the_files_that_the_contributing_page_names_exist():
    """The page describes how an entry flows through the package, in at most five or six files."""
    page = (DOCS / "contributing.md").read_text()
    architecture, flow = page.split("## Data flow")
    flow = flow.split("\n## ")[0]
    package = Path(ppokit.__file__).parent
    entries = re.split(r"\n- \*\*", flow)[1:]
    assert [entry.split("**")[0].strip("`") for entry in entries] == [
        "Observation",
        "reward",
        "log_prob",
        "done",
        "Recurrent state",
        "Minibatch, eager",
        "Minibatch, compiled",
    ]
    for entry in entries:
        files = re.findall(r"`([\w/]+\.py)`", entry)
        assert 2 < len(set(files)) <= (6 if entry.startswith(("`reward", "Minibatch, c")) else 5)
        assert all((package / file).exists() for file in files), files
    for folder, text in re.findall(
        r"- \*\*`(\w+)/`\*\*:(.*?)(?=\n- \*\*|\n\n)", architecture, re.S
    ):
        modules = {path.stem for path in (package / folder).glob("*.py")}
        lower = {x for x in re.findall(r"`(\w+)`", text) if x.islower()}
        assert lower - modules - {"native", "diagnose"} == set(), folder
