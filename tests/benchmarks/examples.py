"""Another system's example, run by that system and by its assembly from ppokit's blocks.

Other systems have virtual environments of their own, because their pins conflict with ppokit's. An
environment takes 1 to 2 GB and some minutes. It is made on first use in the user's cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from tests.benchmarks.figures import draw_runs
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import Row, file_name, run_python, run_script
from tests.benchmarks.tables import markdown, when, with_range, write_runs

REQUIREMENTS = {
    "rl8": ["rl8==1.0.0"],
    "rllib": ["ray[rllib]"],
    "agilerl": ["agilerl[box2d]", "peft==0.21.0"],  # 2.58.0 imports peft, and does not require it
}
"""Requirements of each peer, besides the torch version of this environment."""


def folder_of(peer: str) -> Path:
    """Return the folder of the peer's environment."""
    return Path.home() / ".cache" / "ppokit" / "peers" / peer


def is_installed(peer: str) -> bool:
    """Whether the peer's environment is complete."""
    return (folder_of(peer) / "installed").exists()


def install(peer: str) -> Path:
    """Make the peer's environment, unless it exists, and return its interpreter.

    Raises:
        RuntimeError: it cannot be installed; with pip's text.
    """
    folder = folder_of(peer)
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    wanted = REQUIREMENTS[peer]
    print(f"Installing {', '.join(wanted)} in {folder}: some minutes, once.", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run_python(["-m", "venv", folder])
    torch = f"torch=={version('torch').split('+')[0]}"
    for requirements in ([torch], wanted):
        run_python(["-m", "pip", "install", "-q", *requirements], python)
    done.touch()
    return python


def run_original(peer: str, arguments: Mapping[str, Any], result: Path) -> dict[str, Any]:
    """Run ``originals/{peer}.py`` in the peer's environment and return what it wrote.

    The script gets ``arguments`` as JSON and the path of its JSON file. An existing result is read.

    Raises:
        RuntimeError: with the last lines of what the script printed.
    """
    if not result.exists():
        script = Path(__file__).parent / "originals" / f"{peer}.py"
        python = install(peer)
        written = result.with_suffix(".part")
        given = ["-P", script, json.dumps(arguments), written.absolute()]
        run_python(given, python, PYTHONPATH="", PYTHONNOUSERSITE="1")
        written.replace(result)
    return json.loads(result.read_text())


Result = dict[str, Any]
"""Of a run: ``"rows"`` with ``"frames"``, ``"seconds"`` and more, or ``"error"`` and no rows."""
Results = dict[str, list[Result]]
"""The results of each arm, seed by seed."""


@dataclass(kw_only=True, eq=False)
class Example(Benchmark):
    """A benchmark of an example: arms of another system, and ppokit's.

    A run ends at the target of the score, or after so many frames.
    """

    peer: str  #: in REQUIREMENTS
    script: str  #: in ``assemblies``
    theirs: Mapping[str, Mapping[str, Any]]  #: the arguments of the peer's script for each arm
    ours: Mapping[str, Sequence[str]]  #: the options of the script for each arm
    columns: Mapping[str, str]  #: the scores of a row, and their names in the script's history
    score: str
    target: float
    frames: int
    quick_frames: int

    def __post_init__(self) -> None:
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
                columns = {"frames": "total_frames", "seconds": "seconds", **self.columns}
                rows = [{x: row.get(key) for x, key in columns.items()} for row in history]
                result = {"rows": rows}
            results[arm].append(result)
        return results

    def _run_peer(self, arguments: Mapping[str, Any], file: Path) -> Result:
        if self.quick and not is_installed(self.name):
            return {"error": "not installed, which a quick run does not do", "rows": []}
        try:
            return run_original(self.name, arguments, file)
        except RuntimeError as error:
            return {"error": " ".join(str(error).split())[-300:], "rows": []}

    def when(self, results: Iterable[Result], score: str | None = None) -> list[str]:
        """Return the frames and the seconds to the target: the median, and each seed."""
        return when([result["rows"] for result in results], score or self.score, self.target)

    def speed_cells(self, rounds: Results, warm_up: int) -> dict[str, list[str]]:
        """Return frames per second of each arm, and their ratio to the fastest peer's."""

        def speed(rows: Sequence[Row]) -> float:
            first, last = next(row for row in rows if row["frames"] >= warm_up), rows[-1]
            return (last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"])

        speeds = {
            arm: [speed(result["rows"]) for result in results if result["rows"]]
            for arm, results in rounds.items()
        }
        best = max((median(speeds[arm]) for arm in self.theirs if speeds.get(arm)), default=None)
        cells = {}
        for arm, found in speeds.items():
            if found:
                cells[arm] = [
                    with_range(found),
                    "" if best is None else f"{median(found) / best:.2f}",
                ]
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
