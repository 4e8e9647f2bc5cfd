"""Rows of results, and how they are written down."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.benchmarks.timing import Timing

Shape = tuple[int, int]  # [B, T]


@dataclass
class Row:
    """One contender at one shape. Times in microseconds a call; ratios of medians."""

    part: str
    contender: str
    batch: int
    steps: int
    median_us: float
    lower_quartile_us: float | None = None
    upper_quartile_us: float | None = None
    samples: int | None = None
    best_peer_over_this: float | None = None
    this_over_bound: float | None = None
    extra_kib: float | None = None
    max_error: float | None = None

    @classmethod
    def of(cls, part: str, contender: str, shape: Shape, timing: Timing) -> Row:
        """Return the row of a timing."""
        microseconds = (1e6 * s for s in (timing.median, timing.lower, timing.upper))
        return cls(part, contender, *shape, *microseconds, samples=timing.samples)

    @property
    def shape(self) -> Shape:
        """Rows and steps."""
        return self.batch, self.steps

    @property
    def median_ms(self) -> float:
        """Milliseconds a call."""
        return self.median_us / 1e3

    @property
    def extra_mib(self) -> float | None:
        """MiB beyond the results."""
        return None if self.extra_kib is None else self.extra_kib / 1024


def compare(rows: Sequence[Row], *, peers: Iterable[str], bound: str) -> None:
    """Fill in the ratios of rows of one part and shape: to the fastest peer, and to the bound."""
    medians = {row.contender: row.median_us for row in rows}
    best = min((medians[name] for name in peers if name in medians), default=None)
    for row in rows:
        row.best_peer_over_this = best and best / row.median_us
        row.this_over_bound = row.median_us / medians[bound]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows, four significant digits of each figure."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _short(value) for name, value in asdict(row).items()})


def grid(rows: Sequence[Row], field: str, style: str | Callable[[float], str]) -> str:
    """Return a Markdown table of one field: a line per contender, a column per shape."""
    write = style if callable(style) else f"{{:{style}}}".format
    shapes = list(dict.fromkeys(row.shape for row in rows))
    cells = {(row.contender, row.shape): getattr(row, field) for row in rows}
    lines = [[name] for name in dict.fromkeys(row.contender for row in rows)]
    for line in lines:
        values = [cells.get((line[0], shape)) for shape in shapes]
        line += ["" if value is None else write(value) for value in values]
    lines = [line for line in lines if any(line[1:])]
    return markdown(["", *map(shape_name, shapes)], lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, figures to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def ratio(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shape_name(shape: Shape) -> str:
    """Rows and steps, as torch writes them."""
    return f"[{shape[0]}, {shape[1]}]"


def versions(*packages: str) -> str:
    """One sentence on which of these optional packages took part, and which are not installed."""
    there, absent = [], []
    for package in packages:
        try:
            there.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            absent.append(package)
    text = f"Besides those: {', '.join(there) or 'none'}."
    return text + (f" Not installed, and left out: {', '.join(absent)}." if absent else "")


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
