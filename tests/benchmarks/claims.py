"""The figures that README, the index of the benchmarks and other pages cite.

A claim is a piece of a page's text. ``tests/benchmarks/claim_texts.py`` has the claims, with
figures that are computed from the CSV files and tables of ``docs/benchmarks``. Each claim must be
on its page word for word. ``python -m tests.benchmarks.claims`` writes the present figures into the
pages. With ``--check`` it writes nothing, and fails where a page has others.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")  # not that of "2x64"

# -- figures -----------------------------------------------------------------------------


@cache
def lines_of(name: str) -> list[dict[str, str]]:
    """Return the lines of the CSV file of a benchmark."""
    with (ROOT / "docs" / "benchmarks" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def lines(name: str, **where: object) -> list[dict[str, str]]:
    """Return the lines whose columns match these patterns, such as ``part="2x64*"``.

    Raises:
        LookupError: there is none.
    """
    found = lines_of(name)
    for column, given in where.items():
        pattern = str(given)
        if "*" in pattern:
            found = [line for line in found if fnmatchcase(line[column], pattern)]
        else:
            found = [line for line in found if line[column] == pattern]
    if not found:
        raise LookupError(f"No line of {name}.csv has {where}.")
    return found


def column(name: str, value: str, **where: object) -> list[float]:
    """Return a column of these lines."""
    return [float(line[value]) for line in lines(name, **where)]


def one(name: str, value: str, **where: object) -> float:
    """Return the value of the only line, or the median of the lines of several rounds."""
    return median(column(name, value, **where))


def groups(name: str, by: str, **where: object) -> list[str]:
    """Return the different values of a column, in the order of the file."""
    return list(dict.fromkeys(line[by] for line in lines(name, **where)))


def ratios(
    name: str, value: str, by: str, above: Sequence[Mapping[str, str]], below: Mapping[str, str]
) -> list[float]:
    """Return the smallest value of the lines ``above`` over that of ``below``, group by group."""
    common = set.intersection(*({*groups(name, by, **x)} for x in (*above, below)))
    return [
        min(one(name, value, **{by: group}, **x) for x in above)
        / one(name, value, **{by: group}, **below)
        for group in groups(name, by)
        if group in common
    ]


def reached(
    name: str, score: str, target: float, wanted: str, by: str = "seed", **where: object
) -> list[float]:
    """Return the frames or seconds after which each seed has the score; infinite if never."""
    found = []
    for seed in groups(name, by, **where):
        own = lines(name, **where, **{by: seed})
        ends = [float(x[wanted]) for x in own if x[score] and float(x[score]) >= target]
        found.append(min(ends, default=float("inf")))
    return found


def last(name: str, value: str, by: str = "seed", **where: object) -> list[float]:
    """Return the last value of each seed."""
    seeds = groups(name, by, **where)
    return [column(name, value, **where, **{by: seed})[-1] for seed in seeds]


@cache
def page_of(name: str) -> str:
    return (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text()


def cell(name: str, row: str, head: str, *, after: str = "") -> float:
    """Return the first number in a cell of a page's table, for figures that no CSV file has.

    Args:
        name: the page.
        row: how the first cell of the row begins.
        head: the head of the column.
        after: a text on the page before the table.

    Raises:
        LookupError: there is no such cell.
    """
    _, _, text = page_of(name).partition(after) if after else ("", "", page_of(name))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        titles, _, *rows = ([x.strip() for x in y[1:-1].split(" |")] for y in table.splitlines())
        for cells in rows:
            if head in titles and cells[0].startswith(row):
                return number(cells[titles.index(head)])
    raise LookupError(f"{name}.md has no cell {row!r}, {head!r}.")


def number(text: str) -> float:
    """Return the first number of a text."""
    found = NUMBER.search(text)
    if found is None:
        raise LookupError(f"{text!r} has no number.")
    return float(found[0].replace(",", ""))


def span(values: Iterable[float], style: str = ".1f") -> str:
    """Return the lowest and the highest value as text."""
    found = list(values)
    return f"{min(found):{style}} to {max(found):{style}}"


def wide_span(values: Iterable[float], style: str = ".1f") -> str:
    """Return the lowest and the highest value as text; from 10 on the highest has no decimals."""
    found = list(values)
    return f"{min(found):{style}} to {max(found):{'.0f' if max(found) >= 10 else style}}"


def rounded(value: float) -> float:
    """Return a large number with three significant digits: CSV files have four or five."""
    return float(f"{value:.3g}")


# -- pages -------------------------------------------------------------------------------


def pattern_of(claim: str) -> re.Pattern[str]:
    """Return the claim with other numbers, and with line breaks at other places."""
    texts = (re.sub(r"(\\\s)+", r"\\s+", re.escape(text)) for text in NUMBER.split(claim))
    return re.compile(f"({NUMBER.pattern})".join(texts))


def places(text: str, claim: str) -> re.Match[str]:
    """Return where the claim is on the page.

    Raises:
        LookupError: the text is not on the page, or more than once.
    """
    found = list(pattern_of(claim).finditer(text))
    if len(found) != 1:
        raise LookupError(f"{len(found)} places with the text of this claim: {claim}")
    return found[0]


def updated(text: str, claims: Iterable[str]) -> str:
    """Return the page with the present figures."""
    for claim in claims:
        place = places(text, claim)
        figures = NUMBER.findall(claim)
        for group, figure in reversed([*enumerate(figures, start=1)]):
            begin, end = place.span(group)
            text = text[:begin] + figure + text[end:]
    return text


def without(text: str, claims: Iterable[str]) -> str:
    """Return the page without its claims."""
    for claim in claims:
        place = places(text, claim)
        text = text[: place.start()] + text[place.end() :]
    return text


def differences(text: str, claims: Iterable[str]) -> Iterator[str]:
    """Yield what is on the page in place of each claim that is not current."""
    for claim in claims:
        found = " ".join(places(text, claim)[0].split())
        if found != " ".join(claim.split()):
            yield f"{found!r} must be {claim!r}"


def main() -> None:
    from tests.benchmarks.claim_texts import claims

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    check, stale = parser.parse_args().check, []
    for name, found in claims().items():
        path = ROOT / name
        text = path.read_text()
        stale += [f"{name}: {difference}" for difference in differences(text, found)]
        if not check:
            path.write_text(updated(text, found))
    print("\n".join(stale))
    if check and stale:
        sys.exit("Not the figures of the benchmarks: run python -m tests.benchmarks.claims")


if __name__ == "__main__":
    main()
