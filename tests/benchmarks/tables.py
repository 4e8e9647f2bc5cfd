"""Rows of timings, and the tables and CSV files made of them."""

from __future__ import annotations

import ast
import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.timing import Call, Timing, interleave

Shape = tuple[int, int]  # [B, T]
Line = Mapping[str, Any]


@dataclass
class Row:
    """One contender at one shape. Times in microseconds per call; ratios of medians."""

    part: str
    contender: str
    batch: int
    steps: int
    median_us: float
    lower_quartile_us: float
    upper_quartile_us: float
    samples: int = 1
    best_peer_over_this: float | None = None
    this_over_bound: float | None = None
    max_error: float | None = None
    more: dict[str, Any] = field(default_factory=dict)  #: further columns of this benchmark

    @classmethod
    def of(cls, part: str, contender: str, shape: Shape, timing: Timing, scale: float = 1.0) -> Row:
        """Return the row of a timing, its times multiplied by ``scale``."""
        times = (1e6 * scale * s for s in (timing.median, timing.lower, timing.upper))
        return cls(part, contender, *shape, *times, samples=timing.samples)

    @property
    def shape(self) -> Shape:
        return self.batch, self.steps

    @property
    def median_ms(self) -> float:
        return self.median_us / 1e3

    @property
    def speed(self) -> float:
        return 1e6 * self.batch * self.steps / self.median_us


def compare(
    rows: Sequence[Row], *, peers: Iterable[str] = (), bound: str | None = None
) -> Sequence[Row]:
    """Fill in the ratios to the fastest peer and to the bound, of rows of one shape."""
    medians = {row.contender: row.median_us for row in rows}
    best = min((medians[name] for name in peers if name in medians), default=None)
    for row in rows:
        row.best_peer_over_this = best and best / row.median_us
        row.this_over_bound = None if bound is None else row.median_us / medians[bound]
    return rows


def timed(
    part: str,
    shape: Shape,
    calls: Mapping[str, Call],
    *,
    peers: Iterable[str] = (),
    bound: str | None = None,
    errors: Mapping[str, float] | None = None,
    **options: Any,
) -> list[Row]:
    """Time the calls in turn, and return a row for each; ``options`` are those of interleave."""
    timings = interleave(calls, **options)
    rows = [Row.of(part, name, shape, timing) for name, timing in timings.items()]
    for row in rows:
        row.max_error = (errors or {}).get(row.contender)
    compare(rows, peers=peers, bound=bound)
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write all timings as CSV."""
    write_lines(path, [entry | entry.pop("more") for entry in map(asdict, rows)])


def write_lines(path: Path, lines: Sequence[Line]) -> None:
    """Write dictionaries as the lines of a CSV file, with five significant digits."""
    head = list(dict.fromkeys(name for line in lines for name in line))
    write_csv(path, head, [[_short(line.get(name)) for name in head] for line in lines])


def write_csv(path: Path, head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(lines)


def write_runs(path: Path, runs: Mapping[str, Sequence[Sequence[Line]]]) -> None:
    """Write every row of every run as CSV; ``runs`` are the rows of each arm, seed by seed."""
    numbered = [(arm, *seed) for arm, seeds in runs.items() for seed in enumerate(seeds)]
    write_lines(
        path, [{"arm": arm, "seed": seed, **row} for arm, seed, rows in numbered for row in rows]
    )


def reached(rows: Iterable[Line], score: str, target: float) -> Line | None:
    """Return the first row whose score is the target, or None."""
    return next((row for row in rows if (x := row.get(score)) is not None and x >= target), None)


def when(runs: Sequence[Sequence[Line]], score: str, target: float) -> list[str]:
    """Return the frames and the seconds to the target: the median, and each run."""
    ends = [reached(rows, score, target) or {} for rows in runs]
    styles = {"frames": ",.0f", "seconds": ",.1f"}
    return [each([end.get(unit) for end in ends], style) for unit, style in styles.items()]


def each(values: Sequence[float | None], style: str) -> str:
    """Return the median, and each seed's value in brackets; a missing value is the worst."""
    middle = median(float("inf") if x is None else x for x in values)
    shown = ", ".join("-" if x is None else format(x, style) for x in values)
    return f"{'-' if middle == float('inf') else format(middle, style)} ({shown})"


def with_range(values: Sequence[float], style: str = ",.0f") -> str:
    """Return the median and the range as text."""
    low, middle, high = (f(values) for f in (min, median, max))
    return f"{middle:{style}} ({low:{style}} to {high:{style}})"


def shape_name(shape: Shape) -> str:
    return f"[{shape[0]}, {shape[1]}]"


def pivot(
    rows: Sequence[Row],
    value: str | Callable[[Row], float | None],
    style: str | Callable[[float], str],
    *,
    line: Callable[[Row], str] = lambda row: row.contender,
    column: Callable[[Row], str] = lambda row: shape_name(row.shape),
) -> str:
    """Return a Markdown table of one value, by default contenders by shapes."""
    write = style if callable(style) else f"{{:{style}}}".format
    read = value if callable(value) else lambda row: getattr(row, value)
    cells: dict[tuple[str, str], str] = {}
    for row in rows:
        found = read(row)
        cells[line(row), column(row)] = "" if found is None else write(found)
    columns = list(dict.fromkeys(name for _, name in cells))
    body = [
        [name, *(cells.get((name, other), "") for other in columns)]
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    return markdown(["", *columns], [entries for entries in body if any(entries[1:])])


def multiples(rows: Sequence[Row], bound: str, name: str) -> str:
    """Return a table for each size of a minibatch, of the times as multiples of the bound's."""
    text = ""
    for frames in dict.fromkeys(row.batch for row in rows):
        own = [row for row in rows if row.batch == frames and row.contender != bound]
        table = pivot(own, "this_over_bound", ".2f", column=lambda row: row.part)
        text += f"Minibatches of {frames:,} frames, multiple of the {name}:\n\n{table}\n\n"
    return text


def speeds(rows: Iterable[Row]) -> dict[str, float]:
    """Return the frames per second of each contender."""
    return {row.contender: row.speed for row in rows}


def multiples_of(
    rows: Iterable[Row], group: Callable[[Row], str] = lambda row: row.part
) -> dict[str, dict[str, float]]:
    """Return the times of each group as multiples of the bound's."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(group(row), {})[row.contender] = row.this_over_bound or 0.0
    return found


def speed_table(
    rows: Sequence[Row], name: Callable[[Row], str], ratios: Mapping[str, Callable[[Row], str]]
) -> str:
    """Return a Markdown table of frames per second, with quartiles and further columns."""
    lines = []
    for row in rows:
        frames = 1e6 * row.batch * row.steps
        slow, fast = frames / row.upper_quartile_us, frames / row.lower_quartile_us
        cells = [f"{row.speed:,.0f}", f"{slow:,.0f} to {fast:,.0f}"]
        lines.append([name(row), *cells, *(ratio(row) for ratio in ratios.values())])
    return markdown(["", "frames a second", "quartiles", *ratios], lines)


def settings_of(names: Sequence[str], text: str) -> dict[str, SimpleNamespace]:
    """Return the settings of each name from a table: a line for a setting, a column for a name.

    Values are Python literals without spaces; "-" is NaN.
    """
    lines = [line.split() for line in text.strip().splitlines()]
    found: dict[str, SimpleNamespace] = {name: SimpleNamespace() for name in names}
    for setting, *values in lines:
        for name, value in zip(names, values, strict=True):
            read = math.nan if value == "-" else ast.literal_eval(value)
            setattr(found[name], setting, read)
    return found


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], rest: str = "---:") -> str:
    """Return a Markdown table; the columns after the first are figures, aligned to the right."""
    rule = ["---", *[rest] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def bullets(about: Mapping[str, str]) -> str:
    """Return a Markdown list of names and their descriptions."""
    return "\n".join(f"- **{name}**: {text}." for name, text in about.items())


def ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value
