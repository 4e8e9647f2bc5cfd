"""Every argument that a page names is an argument of the class or function that it names.

Four places are read on README and on the pages of the site:

1. calls, in code blocks and in code within a sentence: `PPOUpdate(step, epochs=4)`. Of a code block
   in diff format the removed lines and the added lines are read separately;
2. "`x` of `Y`", and lists of arguments before "of": "`gamma`, `lmbda` of `GAE`";
3. the first column of tables with the heading "option", on pages of blocks, and of tables with the
   heading "argument of `Y`";
4. the column "ppokit" of the tables in "Coming from other systems".

`Y` is a public name of ppokit, torchrl, tensordict.nn, torch.optim or gymnasium. A call of another
name is not checked, such as a function that the page defines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium.wrappers
import pytest
import tensordict.nn
import torch
import torchrl.collectors
import torchrl.data
import torchrl.envs
import torchrl.modules
import torchrl.objectives.value
import torchrl.trainers.algorithms

import ppokit
import ppokit.plotting
import ppokit.testing

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "tutorials" not in page.relative_to(ROOT).parts]
NAMESPACES = (
    *(ppokit, ppokit.networks, ppokit.functional, ppokit.testing, ppokit.plotting),
    *(torchrl.collectors, torchrl.objectives, torchrl.objectives.value, torchrl.modules),
    *(torchrl.envs, torchrl.data, torchrl.trainers, torchrl.trainers.algorithms),
    *(tensordict.nn, torch.optim, gymnasium, gymnasium.wrappers),
)
#: the classes and functions of the tables of options
OPTIONS = {
    "dual_clip_ppo_loss": ["DualClipPPOLoss"],
    "gae": ["GAE"],
    "gym_collector": ["GymCollector"],
    "kl_early_stopper": ["KLEarlyStopper", "AdaptiveKLCoeff", "AdaptiveLearningRate"],
    "networks": ["actor_critic", "evaluate"],
    "ppo_update": ["PPOUpdate"],
    "reward_normalizer": ["RewardNormalizer"],
    "sequence_batcher": ["SequenceBatcher"],
    "training_step": ["TrainingStep"],
}
#: classes that pass `**kwargs` to another class than their base
FORWARDED = {
    ppokit.GymCollector: torchrl.collectors.Collector,
    torchrl.modules.ProbabilisticActor: tensordict.nn.ProbabilisticTensorDictModule,
}
CODE = r"`([^`\n]+)`"
NAME = re.compile(r"[a-z_]+\Z")


def resolve(name: str) -> Callable[..., Any] | None:
    """Return the public class or function of a name, or the method of a class."""
    owner, _, last = name.rpartition(".")
    if re.match(r"[A-Z]", owner.rpartition(".")[2]):
        return getattr(resolve(owner), last, None)
    spaces = [x for x in NAMESPACES if x.__name__.endswith(owner)]  # "optim" of "torch.optim"
    found = (getattr(space, last, None) for space in spaces)
    return next((x for x in found if callable(x)), None)


@cache
def arguments(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments, or None if there are others in `**kwargs`.

    The `**kwargs` of a constructor are the arguments of its base class, or of FORWARDED.
    """
    classes = inspect.getmro(function) if inspect.isclass(function) else [function]
    if function in FORWARDED:
        classes = [function, FORWARDED[function]]
    names: set[str] = set()
    for one in classes:
        if inspect.isclass(one) and "__init__" not in vars(one):
            continue
        found = inspect.signature(one.__init__ if inspect.isclass(one) else one).parameters
        names.update(found)
        takes_more = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in found.values())
        if not takes_more or one is FORWARDED.get(function):
            return names
    return None


def has_argument(function: Callable[..., Any], name: str) -> bool:
    found = arguments(function)
    return found is None or name in found


def calls(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each call and its keywords; the code may be a part of a program."""
    for found in re.finditer(r"([A-Za-z_][\w.]*)\(", code):
        depth, part, parts = 0, "", []
        for character in re.sub(r"\"[^\"\n]*\"|'[^'\n]*'|#.*", "''", code[found.end() :]):
            if character in ")]}" and depth == 0:
                break
            depth += (character in "([{") - (character in ")]}")
            if character == "," and depth == 0:
                parts, part = [*parts, part], ""
            else:
                part += character
        keywords = [re.match(r"\s*(\w+)\s*=(?!=)", part) for part in [*parts, part]]
        yield found[1], [keyword[1] for keyword in keywords if keyword]


def code_of(text: str) -> Iterator[str]:
    """Yield code blocks, and code within sentences, of a page."""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
        if language == "diff":
            lines = block.splitlines()
            yield "\n".join(line[1:] for line in lines if not line.startswith("+"))
            yield "\n".join(line[1:] for line in lines if not line.startswith("-"))
        elif language == "python":
            yield block
    yield from re.findall(CODE, re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def wrong_calls(text: str) -> Iterator[str]:
    own = re.findall(r"^\s*(?:class|def) (\w+)", text, re.M)
    for name, keywords in (call for code in code_of(text) for call in calls(code)):
        function = None if name in own else resolve(name)
        for keyword in keywords if function is not None else ():
            if not has_argument(function, keyword):
                yield f"{name}({keyword}=...)"


def wrong_sentences(text: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for names, owner in re.findall(
        rf"((?:{CODE.replace('(', '(?:')}(?:, | and )?)+) of (?:[a-z]+'s )?`([\w.]+)`", text
    ):
        function = resolve(owner)
        for name in re.findall(CODE, names) if function is not None else ():
            name = name.split("=")[0]
            if NAME.match(name) and not has_argument(function, name):
                yield f"`{name}` of `{owner}`"


def rows_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the head of each row's table, and its cells."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = table.splitlines()
        for row in rows:
            yield head, [cell.strip() for cell in row.strip("| ").split(" | ")]


def wrong_tables(page: Path, text: str) -> Iterator[str]:
    for head, (first, *_) in rows_of(text):
        owner = re.match(rf"\| argument of (?:[a-z]+'s )?{CODE} \|", head)
        owners = (
            [owner[1]]
            if owner
            else OPTIONS.get(page.stem, [])
            if head.startswith("| option |")
            else []
        )
        functions = [resolve(owner) for owner in owners]
        for name in re.findall(CODE, first) if owners else ():
            if not any(has_argument(function, name.split("=")[0]) for function in functions):
                yield f"option `{name}` of {owners}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_arguments_on_pages_exist(page: Path):
    text = page.read_text()
    wrong = [*wrong_calls(text), *wrong_sentences(text), *wrong_tables(page, text)]
    assert wrong == []


#: names in the column "ppokit" that do not belong to ppokit
OF_OTHERS = {
    "actor_critic": ppokit.networks,
    "batch_size": torchrl.envs.EnvBase,
    "distribution_class": torchrl.modules.ProbabilisticActor,
    "lr": torch.optim.Adam,
}


def test_the_column_of_ppokit_names_arguments():
    """Each name in lower case is an argument of a class that the page's program uses."""
    names = ["PPOUpdate", "GymCollector", "DualClipPPOLoss", "GAE", "TrainingStep", "actor_critic"]
    functions = [resolve(name) for name in names]
    page = (ROOT / "docs" / "howto" / "coming_from.md").read_text()
    named = [x for head, cells in rows_of(page) if "| ppokit |" in head for x in [cells[1]]]
    found = {x.split("=")[0] for cell in named for x in re.findall(CODE, cell)}
    found = {name for name in found if NAME.match(name)}
    assert len(found) > 25
    unknown = {name for name in found if not any(has_argument(x, name) for x in functions)}
    assert unknown == set(OF_OTHERS)
    for name, owner in OF_OTHERS.items():
        assert hasattr(owner, name) or has_argument(owner, name)


def test_wrong_arguments_are_found(tmp_path: Path):
    text = """`PPOUpdate(step, batch=[1, f(g=2)], epochs=4)`, `optimizer` of `PPOUpdate`,
`gamma`, `lambda_` of `GAE`, and `seed` of torchrl's `Collector`.

```diff
-loss = torchrl.objectives.ClipPPOLoss(actor, clip_value=True, clip=0.2)
+loss = ppokit.DualClipPPOLoss(
+    actor, clip_value="a, b=(", dual=3.0  # or loss(c=1)
+)
```

| option | default |
|---|---|
| `gamma`, `lmda` | required |

| argument of `Collector` | alternative |
|---|---|
| `max_frames_per_traj`, `max_frames` | |
"""
    assert [*wrong_calls(text)] == [
        "torchrl.objectives.ClipPPOLoss(clip=...)",
        "ppokit.DualClipPPOLoss(dual=...)",
        "PPOUpdate(batch=...)",
    ]
    assert [*wrong_sentences(text)] == [
        *("`optimizer` of `PPOUpdate`", "`lambda_` of `GAE`", "`seed` of `Collector`")
    ]
    assert [*wrong_tables(tmp_path / "gae.md", text)] == [
        *("option `lmda` of ['GAE']", "option `max_frames` of ['Collector']")
    ]
