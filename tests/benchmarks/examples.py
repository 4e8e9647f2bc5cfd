"""Another system's example, run by that system and by its assembly from ppokit's blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from tests.benchmarks import peers
from tests.benchmarks.figures import draw_runs
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import Row, kept, run_tutorial
from tests.benchmarks.tables import write_csv

Result = dict[str, Any]
"""Of a run: ``"rows"`` with ``"frames"``, ``"seconds"`` and more, or ``"error"`` and no rows."""
Results = dict[str, list[Result]]
"""The results of each arm, seed by seed."""
Train = Callable[[str, int, Path], Result]
"""A function of an arm, a seed and the file of the result."""


class Example(Benchmark):
    """A benchmark of an example: arms of another system, and ppokit's.

    The first of ``theirs`` has several processes; a quick run leaves it out.
    """

    def __init__(
        self,
        peer: str,
        name: str,
        about: str | None,
        theirs: Iterable[str],
        ours: Iterable[str],
        quick: int,
    ) -> None:
        super().__init__(peer, about, keeps_results=True, seeds=3, total_frames=1_000_000)
        theirs, self.note = list(theirs), ""
        self.seeds, self.frames = self.options.seeds, self.options.total_frames
        if self.quick:
            self.seeds, self.frames = 1, quick
            del theirs[0]
            if not peers.is_installed(peer):
                theirs.clear()
                self.note = f"{name} is not installed and left out of this quick run.\n\n"
        self.arms = [*theirs, *ours]

    def run_all(self, to_target: Train, for_speed: Train) -> tuple[Results, Results]:
        """Run the arms in turn, first to the target and then for speed; return both.

        In a quick run, the runs to the target also serve for speed.
        """
        runs: Results = {arm: [] for arm in self.arms}
        rounds: Results = {arm: [] for arm in self.arms}
        cells = [(seed, arm) for seed in range(self.seeds) for arm in self.arms]
        for seed, arm in tqdm(cells if self.quick else cells * 2, unit="run"):
            name = f"{'-'.join(re.findall(r'[a-zA-Z]+', arm))}-{seed}.json"
            if len(runs[arm]) < self.seeds:
                runs[arm].append(to_target(arm, seed, self.results / name))
            else:
                rounds[arm].append(for_speed(arm, seed, self.results / f"speed-{name}"))
        return runs, runs if self.quick else rounds

    def write(
        self, runs: Results, names: Sequence[str], score: str, target: float, *texts: str
    ) -> None:
        """Write every row of every run, and draw the score; ``texts``: title and label."""
        lines = [
            [arm, seed, *("" if row.get(x) is None else f"{row[x]:.5g}" for x in names)]
            for arm, results in runs.items()
            for seed, result in enumerate(results)
            for row in result["rows"]
        ]
        write_csv(self.file("csv"), ["arm", "seed", *names], lines)
        rows = {arm: [result["rows"] for result in results] for arm, results in runs.items()}
        draw_runs(self.file("png"), rows, score, target, *texts)


def run_peer(peer: str, arguments: Mapping[str, Any], result: Path) -> Result:
    """Run the peer, unless its result is kept, and return the result."""
    try:
        return peers.run(peer, arguments, result)
    except peers.PeerError as error:
        return {"error": str(error), "rows": []}


def run_ours(
    name: str,
    options: Sequence[str],
    columns: Mapping[str, str],
    result: Path,
    is_done: Callable[[list[Row]], bool],
) -> Result:
    """Run ``tutorials/{name}.py``, unless its result is kept, and return the result.

    Args:
        name: of the tutorial.
        options: of the tutorial.
        columns: the names of a row's entries, and their names in the tutorial's history.
        result: the JSON file to write.
        is_done: whether a history belongs to a finished run.
    """

    def make() -> Result:
        history = run_tutorial(name, options, result.with_suffix(""), is_done)
        return {"rows": [{name: row.get(key) for name, key in columns.items()} for row in history]}

    return kept(result, make)


def versions_of(runs: Results) -> str:
    """Return the versions of the peer that ran."""
    found = {result.get("version") for results in runs.values() for result in results} - {None}
    return ", ".join(sorted(map(str, found))) or "was not run"


def speed_cells(rounds: Results, theirs: Iterable[str], warm_up: int) -> dict[str, list[str]]:
    """Return each arm's median and range of frames per second, and the ratio to the best peer."""
    speeds = {
        arm: [_speed(result["rows"], warm_up) for result in results if result["rows"]]
        for arm, results in rounds.items()
    }
    best = max((median(speeds[arm]) for arm in theirs if speeds.get(arm)), default=None)
    cells = {}
    for arm, found in speeds.items():
        if found:
            speed = f"{median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
            cells[arm] = [speed, "" if best is None else f"{median(found) / best:.1f}"]
    return cells


def _speed(rows: Sequence[Row], warm_up: int) -> float:
    first, last = next(row for row in rows if row["frames"] >= warm_up), rows[-1]
    return (last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"])


def failure(results: Iterable[Result]) -> str | None:
    """Return the end of the first error, or None."""
    error = next((result["error"] for result in results if "error" in result), None)
    return None if error is None else " ".join(error.split())[-300:]


def each(values: Sequence[float | None], style: str) -> str:
    """Return the median, and each seed's value in brackets; a missing value is the worst."""
    middle = median(float("inf") if x is None else x for x in values)
    shown = ", ".join("-" if x is None else format(x, style) for x in values)
    return f"{'-' if middle == float('inf') else format(middle, style)} ({shown})"


def when(ends: Iterable[Mapping[str, float] | None]) -> list[str]:
    """Return the frames and the seconds to the target, seed by seed."""
    found = [end or {} for end in ends]
    styles = {"frames": ",.0f", "seconds": ",.1f"}
    return [each([end.get(unit) for end in found], style) for unit, style in styles.items()]
