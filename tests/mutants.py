"""Mutants of the package: whether the tests notice a wrong sign, mask, axis or missing check.

    python -m pytest -p tests.mutants -n 2              # writes which tests execute which functions
    python -m tests.mutants --seed COMMIT --count 120   # draws mutants, and runs the tests on each

Each mutant changes one expression of another function; functions are drawn by their lines. The
tests that execute the function run on a copy of the project, the fastest first, and then the whole
default suite. There is one file of results for each mutant in the folder ``--out``; those that
exist are skipped, and a table is printed at the end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ppokit"
MAP = Path(tempfile.gettempdir()) / "ppokit-mutants"
COPIED = (
    "ppokit",
    "tests",
    "docs",
    "tutorials",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".github",
    ".ci",
)
SECONDS, SECONDS_OF_SUITE = 120, 600

# -- which tests execute which functions: a plugin of pytest ---------------------------

_seen: dict[str, dict[str, Any]] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the functions of the package that a test executes, and its duration."""
    found, start, prefix = set[str](), time.perf_counter(), f"{PACKAGE}{os.sep}"

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            found.add(f"{code.co_filename.removeprefix(prefix)}:{code.co_firstlineno}")

    sys.setprofile(note)
    yield
    sys.setprofile(None)
    _seen[item.nodeid] = {"seconds": time.perf_counter() - start, "functions": sorted(found)}


def pytest_sessionfinish() -> None:
    """Write what the tests of this process have executed."""
    MAP.mkdir(exist_ok=True)
    if _seen:
        (MAP / f"map-{os.getpid()}.json").write_text(json.dumps(_seen))


def tests_of_functions() -> dict[str, list[tuple[float, str]]]:
    """Return duration and name of the tests that execute each function, the fastest first."""
    found = defaultdict[str, list[tuple[float, str]]](list)
    for file in MAP.glob("map-*.json"):
        for name, facts in json.loads(file.read_text()).items():
            for function in facts["functions"]:
                found[function].append((facts["seconds"], name))
    return {function: sorted(tests) for function, tests in found.items()}


# -- mutants ---------------------------------------------------------------------------

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
REMOVED = {"detach", "clamp", "clamp_", "clamp_min", "clamp_max", "clone", "abs", "square", "sqrt"}


class Mutant(NamedTuple):
    """A change of one expression."""

    file: str
    line: int
    before: str
    after: str
    function: str
    source: str  #: of the whole file


def variants(node: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that may take the place of a node."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        new.op = OPERATORS[type(node.op)]()
        yield new
    if isinstance(node, ast.BoolOp):  # a dropped term
        yield node.values[0]
        yield node.values[-1]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        yield node.left
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        new.ops[0] = OPERATORS[type(node.ops[0])]()
        yield new
    if isinstance(node, ast.UnaryOp):  # a sign or a negation
        yield node.operand
    if isinstance(node, ast.IfExp):
        new.body, new.orelse = node.orelse, node.body
        yield new
    if isinstance(node, ast.Constant) and type(node.value) is int:  # also an axis
        yield ast.Constant(node.value + 1)
    of_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if of_method and node.func.attr in REMOVED:
        yield node.func.value
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
        yield ast.Constant(False)  # a removed check


def mutants_of(path: Path, function: ast.FunctionDef, source: str, name: str) -> list[Mutant]:
    """Return all mutants of a function, without those of functions within it."""
    lines, found = source.splitlines(keepends=True), []
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        is_string = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if is_string or isinstance(node, ast.FunctionDef | ast.Raise):
            continue
        todo += ast.iter_child_nodes(node)
        place: Any = node.test if isinstance(node, ast.If) else node
        for other in variants(node):
            column = lambda n, at: len(lines[n - 1].encode()[:at].decode())  # noqa: E731
            start = starts[place.lineno - 1] + column(place.lineno, place.col_offset)
            end = starts[place.end_lineno - 1] + column(place.end_lineno, place.end_col_offset)
            before, after = source[start:end], f"({ast.unparse(other)})"
            changed = source[:start] + after + source[end:]
            try:
                ast.parse(changed)
            except SyntaxError:  # as in a pattern or a slice
                continue
            at = str(path.relative_to(PACKAGE))
            found.append(Mutant(at, place.lineno, before, after, name, changed))
    return found


def draw(seed: str, count: int, known: dict[str, Any]) -> list[Mutant]:
    """Return mutants of functions that tests execute, each of another function."""
    generator, groups = random.Random(seed), []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                name = f"{path.relative_to(PACKAGE)}:{first}"
                group = mutants_of(path, node, source, name) if name in known else []
                if group:
                    groups.append(((node.end_lineno or node.lineno) - node.lineno + 1, group))
    drawn = []
    while groups and len(drawn) < count:
        (index,) = generator.choices(range(len(groups)), [lines for lines, _ in groups])
        drawn.append(generator.choice(groups.pop(index)[1]))
    return drawn


# -- runs ------------------------------------------------------------------------------


def run_tests(folder: Path, arguments: list[str], seconds: int) -> str:
    """Return "passed", "timeout", or the test that fails first."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return "passed" if done.returncode in (0, 5) else (failed or [done.stdout[-300:]])[0]


def judge(mutant: Mutant, tests: list[tuple[float, str]], folder: Path) -> dict[str, Any]:
    """Return how the suite judges a mutant."""
    target = folder / "ppokit" / mutant.file
    original = target.read_text()
    target.write_text(mutant.source)
    try:
        (folder / "chosen.txt").write_text("\n".join(name for _, name in tests))
        by = run_tests(folder, ["-n", "0", "@chosen.txt"], SECONDS) if tests else "passed"
        if by == "passed":
            by = run_tests(folder, [], SECONDS_OF_SUITE)
    finally:
        target.write_text(original)
    return {**mutant._asdict(), "source": None, "by": by, "killed": by != "passed"}


def main() -> None:
    """Draw mutants, run the tests on each, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", required=True, help="such as the hash of a commit")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--out", type=Path, default=MAP / "results")
    options = parser.parse_args()
    known = tests_of_functions()
    if not known:
        raise SystemExit(f"{MAP} holds no map: run python -m pytest -p tests.mutants -n 2 first.")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for part in COPIED:
            source = ROOT / part
            copy_of = shutil.copytree if source.is_dir() else shutil.copy
            copy_of(source, Path(name) / part)
        for number, mutant in enumerate(draw(options.seed, options.count, known)):
            file = options.out / f"{options.seed}-{number:03}.json"
            if not file.exists():
                file.write_text(json.dumps(judge(mutant, known[mutant.function], Path(name))))
            rows.append(json.loads(file.read_text()))
            verdict = rows[-1]["by"] if rows[-1]["killed"] else "SURVIVED"
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(f"{number:3} {mutant.file}:{mutant.line} {change}: {verdict}", flush=True)
    print(f"killed: {sum(row['killed'] for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
