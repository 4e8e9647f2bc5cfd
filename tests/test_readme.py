"""The programs in README run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["torchrl's loop", "PPOUpdate"])
def test_a_program_runs_as_printed(program: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(program, str(README), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 5  # a line for each batch
