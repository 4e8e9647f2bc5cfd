"""A system's own example, by that system and by its assembly: runs, their curves and speeds."""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from tqdm import tqdm

from tests.benchmarks import peers
from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.runs import Row, read_json, run_tutorial, write_json

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Result = dict[str, Any]
"""Of a run: ``"rows"`` with ``"frames"``, ``"seconds"`` and more, or ``"error"`` and no rows."""

COLORS = ("#d62728", "#ff7f0e", "#6baed6", "#08306b")


class Plan(NamedTuple):
    """What a benchmark of an example is to run, and where its results and its page go."""

    arms: list[str]
    seeds: int
    frames: int  #: of a run that does not reach its target
    results: Path
    folder: Path  #: of the page
    machine: str  #: that the runs ran on, not the one that reads them
    note: str  #: what a quick run leaves out
    is_quick: bool


def plan_of(
    peer: str, name: str, about: str | None, theirs: Iterable[str], ours: Iterable[str], quick: int
) -> Plan:
    """Return what the command line asks for.

    Args:
        peer: whose example it is.
        name: how the page calls it.
        about: the benchmark's docstring.
        theirs: its arms, first that of several processes, then that of one.
        ours: our arms.
        quick: frames of a quick run, with one seed, without the arm of several processes.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--total-frames", type=int, default=1_000_000)
    parser.add_argument("--results", type=Path, default=ROOT / "outputs" / "benchmarks" / peer)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    theirs, note = list(theirs), ""
    if args.quick:
        args.seeds, args.total_frames, args.results = 1, quick, folder / "runs"
        del theirs[0]
        if not (peers.folder_of(peer) / "installed.txt").exists():
            theirs.clear()
            note = f"{name} is not installed and left out of this quick run.\n\n"
    args.results.mkdir(parents=True, exist_ok=True)
    if not (started := args.results / "machine.txt").exists():
        started.write_text(machine())
    of_runs = args.seeds, args.total_frames, args.results
    return Plan([*theirs, *ours], *of_runs, folder, started.read_text(), note, args.quick)


def run_peer(peer: str, arguments: Mapping[str, Any], result: Path) -> Result:
    """Run the peer, unless its result is there, and return the result."""
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
    """Run ``tutorials/{name}.py``, unless its result is there, and return the result.

    Args:
        name: of the tutorial, which writes a ``history.json`` into its ``--out``.
        options: of the tutorial.
        columns: the names of a row, and what the history calls them; None for what it lacks.
        result: the JSON file to write.
        is_done: whether a history is that of a run which was not interrupted.
    """
    if not result.exists():
        history = run_tutorial(name, options, result.with_suffix(""), is_done)
        rows = [{name: row.get(key) for name, key in columns.items()} for row in history]
        write_json(result, {"rows": rows})
    return read_json(result)


Train = Callable[[str, int, Path], Result]
"""Of the name of an arm, a seed and the file of the result."""


def run_all(
    plan: Plan, to_target: Train, for_speed: Train
) -> tuple[dict[str, list[Result]], dict[str, list[Result]]]:
    """Run the arms in turn, first to the target and then for speed; return both by arm.

    In a quick run those to the target are those of the speed, too.
    """
    runs: dict[str, list[Result]] = {arm: [] for arm in plan.arms}
    rounds: dict[str, list[Result]] = {arm: [] for arm in plan.arms}
    cells = [(seed, arm) for seed in range(plan.seeds) for arm in plan.arms]
    for seed, arm in tqdm(cells if plan.is_quick else [*cells, *cells], unit="run"):
        name = f"{'-'.join(re.findall(r'[a-zA-Z]+', arm))}-{seed}.json"
        if len(runs[arm]) < plan.seeds:
            runs[arm].append(to_target(arm, seed, plan.results / name))
        else:
            rounds[arm].append(for_speed(arm, seed, plan.results / f"speed-{name}"))
    return runs, runs if plan.is_quick else rounds


def versions_of(runs: Mapping[str, Sequence[Result]]) -> str:
    """Return the versions of the peer that ran."""
    found = {result.get("version") for results in runs.values() for result in results} - {None}
    return ", ".join(sorted(map(str, found))) or "was not run"


def speeds_of(results: Iterable[Result], warm_up: int) -> list[float]:
    """Return each run's frames a second after so many frames."""
    speeds = []
    for rows in (result["rows"] for result in results if result["rows"]):
        first, last = next(row for row in rows if row["frames"] >= warm_up), rows[-1]
        speeds.append((last["frames"] - first["frames"]) / (last["seconds"] - first["seconds"]))
    return speeds


def speed_cells(
    rounds: Mapping[str, Sequence[Result]], theirs: Iterable[str], warm_up: int
) -> dict[str, list[str]]:
    """Return each arm's median and range of frames a second, and how much faster that is."""
    speeds = {arm: speeds_of(results, warm_up) for arm, results in rounds.items()}
    best = max((median(speeds[arm]) for arm in theirs if speeds.get(arm)), default=None)
    cells = {}
    for arm, found in speeds.items():
        if found:
            speed = f"{median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
            cells[arm] = [speed, "" if best is None else f"{median(found) / best:.1f}"]
    return cells


def failure(results: Iterable[Result]) -> str | None:
    """Return the end of the first error, or None."""
    error = next((result["error"] for result in results if "error" in result), None)
    return None if error is None else " ".join(error.split())[-300:]


def each(values: Sequence[float | None], style: str) -> str:
    """Return the median, and each seed's in brackets; a run that did not get there is the worst."""
    middle = median(float("inf") if x is None else x for x in values)
    shown = ", ".join("-" if x is None else format(x, style) for x in values)
    return f"{'-' if middle == float('inf') else format(middle, style)} ({shown})"


def when(ends: Iterable[Mapping[str, float] | None]) -> list[str]:
    """Return after how many frames and seconds the runs were at the target, seed by seed."""
    found = [end or {} for end in ends]
    styles = {"frames": ",.0f", "seconds": ",.1f"}
    return [each([end.get(unit) for end in found], style) for unit, style in styles.items()]


def write_csv(path: Path, runs: Mapping[str, Sequence[Result]], names: Sequence[str]) -> None:
    """Write every row of every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", *names])
        for arm, results in runs.items():
            for seed, result in enumerate(results):
                for row in result["rows"]:
                    values = (row.get(name) for name in names)
                    writer.writerow([arm, seed, *("" if x is None else f"{x:.5g}" for x in values)])


def draw(
    path: Path, runs: Mapping[str, Sequence[Result]], name: str, target: float, *texts: str
) -> None:
    """Draw an entry of the rows over frames and over seconds; ``texts``: the title, its label."""
    title, label = texts
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for axis, unit in zip(axes, ("frames", "seconds"), strict=True):
        for (arm, results), color in zip(runs.items(), COLORS[-len(runs) :], strict=True):
            for seed, result in enumerate(results):
                rows = [row for row in result["rows"] if row.get(name) is not None]
                xs, ys = [row[unit] for row in rows], [row[name] for row in rows]
                axis.plot(xs, ys, color=color, lw=1.2, label=arm if seed == 0 else None)
        axis.axhline(target, color="black", ls=":", lw=1)
        if any(len(line.get_xdata()) for line in axis.lines[:-1]):
            axis.set_xscale("log")  # where a run was long enough to have a score
        axis.set_xlabel("frames (environment steps)" if unit == "frames" else "seconds")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
