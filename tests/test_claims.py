"""The numbers in README and on pages are those of the benchmarks."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import ppokit

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())


def rows(name: str) -> list[dict[str, str]]:
    """Return the lines of a benchmark."""
    with (ROOT / "docs" / "benchmarks" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def between(values: list[float], style: str) -> str:
    return f"{min(values):{style}} to {max(values):{style}} times"


def test_the_step():
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows("step"):
        if row["batch"] == "64":
            medians[row["part"]][row["contender"]] = float(row["median_us"])
    own, peer = "ppokit's loss, compiled, in an update", "torchrl's loss, loop"
    ratios = {part: x[peer] / x[own] for part, x in medians.items()}
    small = between([x for part, x in ratios.items() if "2x64" in part], ".1f")
    large = between([x for part, x in ratios.items() if "3x256" in part], ".1f")
    assert f"{small} TorchRL's loss in a loop (2x64 units), {large} (3x256)" in README


def test_the_step_on_a_gpu():
    found = {
        row["contender"]: float(row["median_us"])
        for row in rows("device")
        if row["part"].startswith("2x64") and row["batch"] == "64"
    }
    ratio = found["torchrl's loss, loop"] / found["ppokit's loss, CUDA graph, in an update"]
    page = (ROOT / "docs" / "benchmarks" / "device.md").read_text()
    (update,) = re.findall(r"\[4096, 24\].*?\n\| graph \| [\d.]+ \| ([\d.]+) ", page, re.DOTALL)
    assert f"is {ratio:.0f} times as fast as TorchRL's loss" in README
    assert f"4,096 x 24 frames {float(update):.1f} times as fast as Isaac Lab's loop" in README


def test_gae_and_rewards():
    for name, part, contender, style in (
        ("gae", "function", "ppokit, native", ".1f"),
        ("rewards", "rewards", "ppokit", ".1f"),
    ):
        found = [
            float(row["best_peer_over_this"])
            for row in rows(name)
            if (row["part"], row["contender"]) == (part, contender)
        ]
        least, most = f"{min(found):{style}}", f"{max(found):.0f}"
        assert f"{least} to {most} times" in README


def test_native_environments():
    (row,) = (
        row
        for row in rows("vector_environments")
        if (row["contender"], row["batch"]) == ("ppokit, native", "64")
    )
    ratio = float(row["best_peer_over_this"])
    assert f"{ratio:.1f} times Stable-Baselines3's frames a second" in README


def test_whole_loops():
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows("loop"):
        if row["part"] == "whole":
            times[row["task"]][row["contender"]].append(float(row["us_per_frame"]))
    compiled, eager = [], []
    for of_task in times.values():
        peer = min(median(of_task[name]) for name in ("Stable-Baselines3", "CleanRL-style"))
        compiled.append(peer / median(of_task["ppokit, compiled"]))
        eager.append(peer / median(of_task["ppokit"]))
    assert f"{between(compiled, '.1f')} the frames a second" in README
    assert f"Eager loops make {between(eager, '.1f')}" in README


def test_the_page_of_isaac_lab():
    page = (ROOT / "docs" / "howto" / "isaac_lab.md").read_text()
    table = (ROOT / "docs" / "benchmarks" / "isaac_lab.md").read_text()
    for name in ("ppokit, compiled", "ppokit, eager"):
        (found,) = (x for x in table.splitlines() if x.startswith(f"| {name}"))
        cells = [cell.split("(")[0].strip() for cell in found.strip("| ").split("|")]
        assert f"| {' | '.join(cells)} |" in page


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources():
    sources = "".join(path.read_text() for path in Path(ppokit.__file__).parent.rglob("*.py"))
    texts = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", sources))
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(.*?)`", page, re.M)
    assert len(rows) > 8
    assert [text for text in rows if text not in texts] == []


NUMBER = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])"


def rounds_to(value: float, claim: str) -> bool:
    """Return whether the value, rounded as the claim is, equals it."""
    digits = claim.replace(",", "")
    decimals = len(digits.partition(".")[2])
    if digits.endswith("000"):
        decimals = -3
    return round(value, decimals) == float(digits)


def paragraphs_with_benchmarks(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the text of paragraphs that link to benchmarks, and the names of these."""
    page = re.sub(r"^```.*?^```|`[^`]*`|\$[^$]*\$", "", page, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(
        r"\n\s*\n|\n(?=[-*] |\d+\. )", re.sub(r"^\d+\. ", "", page, flags=re.MULTILINE)
    )
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if names := re.findall(r"benchmarks/(\w+)\.md", part):
            table = following if following.startswith("|") else ""
            yield re.sub(r"\]\([^)]*\)", "]", part + table), names


PAGES = sorted([*(ROOT / "docs" / "blocks").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_beside_a_link_to_a_benchmark_are_on_its_page(page: Path):
    for text, names in paragraphs_with_benchmarks(page.read_text()):
        tables = " ".join((ROOT / "docs/benchmarks" / f"{name}.md").read_text() for name in names)
        found = [float(number.replace(",", "")) for number in re.findall(NUMBER, tables)]
        claims = re.findall(NUMBER, text)
        missing = [x for x in claims if not any(rounds_to(value, x) for value in found)]
        assert missing == [], text
