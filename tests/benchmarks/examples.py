"""Another system's example, run by that system and by its assembly from ppokit's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from tests.benchmarks import peers
from tests.benchmarks.figures import draw_runs
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import file_name, run_script
from tests.benchmarks.tables import markdown, when, write_runs

Run = dict[str, Any]
"""A row of a history."""
Result = dict[str, Any]
"""Of a run: ``"rows"`` with ``"frames"``, ``"seconds"`` and more, or ``"error"`` and no rows."""
Results = dict[str, list[Result]]
"""The results of each arm, seed by seed."""


class Example(Benchmark):
    """A benchmark of an example: arms of another system, and ppokit's.

    A run ends at the target of the score, or after so many frames.
    """

    peer: str  #: in :mod:`tests.benchmarks.peers`
    script: str  #: in ``assemblies``
    theirs: Mapping[str, Mapping[str, Any]]  #: the arguments of the peer's script for each arm
    ours: Mapping[str, Sequence[str]]  #: the options of the script for each arm
    columns: Mapping[str, str]  #: the entries of a row, and their names in the script's history
    score: str
    target: float
    frames: int
    quick_frames: int

    def __init__(self) -> None:
        super().__init__(self.peer, keeps_results=True)
        self.seeds = 1 if self.quick else 3
        self.frames = self.quick_frames if self.quick else self.frames

    def train(
        self,
        arms: Iterable[str],
        *,
        frames: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        options: Sequence[object] = (),
    ) -> Results:
        """Run the arms in turn, a seed at a time.

        A run ends at the target, or with ``frames`` given after so many frames. ``arguments`` are
        of the other system's script, ``options`` of the script.
        """
        target = self.target if frames is None else None
        prefix = [] if frames is None else ["speed"]
        frames = frames or self.frames
        results: Results = {arm: [] for arm in arms}
        cells = [(seed, arm) for seed in range(self.seeds) for arm in results]
        for seed, arm in tqdm(cells, unit="run"):
            file = self.results / file_name(*prefix, arm, seed)
            if arm in self.theirs:
                given = {"seed": seed, "total_frames": frames, "target": target}
                result = self._run_peer({**self.theirs[arm], **(arguments or {}), **given}, file)
            else:
                line = [*self.ours[arm], *options, "--seed", seed, "--total-frames", frames]
                line += [] if target is None else ["--target", target]
                history = run_script(self.script, line, file.with_suffix(""))
                rows = [{x: row.get(key) for x, key in self.columns.items()} for row in history]
                result = {"rows": rows}
            results[arm].append(result)
        return results

    def _run_peer(self, arguments: Mapping[str, Any], file: Path) -> Result:
        if self.quick and not peers.is_installed(self.name):
            return {"error": "not installed, which a quick run does not do", "rows": []}
        try:
            return peers.run(self.name, arguments, file)
        except RuntimeError as error:
            return {"error": " ".join(str(error).split())[-300:], "rows": []}

    def when(self, results: Iterable[Result], score: str | None = None) -> list[str]:
        """Return the frames and the seconds to the target: the median, and each seed."""
        return when([result["rows"] for result in results], score or self.score, self.target)

    def speed_cells(self, rounds: Results, warm_up: int) -> dict[str, list[str]]:
        """Return frames per second of each arm, and their ratio to the fastest peer's."""
        speeds = {
            arm: [_speed(result["rows"], warm_up) for result in results if result["rows"]]
            for arm, results in rounds.items()
        }
        best = max((median(speeds[arm]) for arm in self.theirs if speeds.get(arm)), default=None)
        cells = {}
        for arm, found in speeds.items():
            if found:
                speed = f"{median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
                cells[arm] = [speed, "" if best is None else f"{median(found) / best:.2f}"]
        return cells

    def table(
        self, results: Results, head: Sequence[str], cells: Callable[[str], Sequence[str]]
    ) -> str:
        """Return a table with a line for each arm; an arm that failed has its error."""
        lines = []
        for arm, runs in results.items():
            error = next((run["error"] for run in runs if "error" in run), None)
            line = cells(arm) if error is None else [f"{arm}: `{error}`", *[""] * (len(head) - 1)]
            lines.append(line)
        return markdown(head, lines)

    def write(self, runs: Results, title: str, label: str) -> None:
        """Write every row of every run, and draw the score."""
        rows = {arm: [result["rows"] for result in results] for arm, results in runs.items()}
        write_runs(self.file("csv"), rows)
        draw_runs(self.file("png"), rows, self.score, self.target, title, label)


def versions_of(runs: Results) -> str:
    """Return the versions of the peer that ran."""
    found = {result.get("version") for results in runs.values() for result in results} - {None}
    return ", ".join(sorted(map(str, found))) or "(not run)"


def _speed(rows: Sequence[Run], warm_up: int) -> float:
    first, last = next(row for row in rows if row["frames"] >= warm_up), rows[-1]
    return (last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"])
