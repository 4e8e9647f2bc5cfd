"""The examples of docstrings run when they are pasted into a new process."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import ppokit
from tests.marks import nightly


def examples() -> Iterator[doctest.DocTest]:
    """Yield all examples of the package, with no name of their module."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for found in pkgutil.walk_packages(ppokit.__path__, "ppokit."):
        if found.name.rsplit(".")[-1] in ("native", "triton"):
            continue
        module = importlib.import_module(found.name)
        for test in finder.find(module, module=module, globs={}):
            if test.examples:
                yield test


EXAMPLES = {example.name: example for example in examples()}


NEEDS_NIGHTLY = "ppokit.recurrent.TransformerModule"
NAMES = [pytest.param(name, marks=nightly) if name == NEEDS_NIGHTLY else name for name in EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_needs_no_other_names(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=options).run(EXAMPLES[name], out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted > 0
