"""Record of training runs in a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import mujoco_record
from tests.benchmarks.mujoco_record import SPEED, Record, curves, final, last_training

JOBS = [("Hopper-v5", "ppokit", 10), ("Hopper-v5", "ppokit", 11)]
POINTS = {"evaluations": [[50, 1.0], [100, 2.5]], "training": [[100, 3.0]], "final": [1.0, 2.0]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the runs, which take no time."""
    made: list[Any] = []

    def run_function(_: str, given: dict[str, Any]) -> dict[str, Any]:
        made.append((given["task"], given["arm"], given["seed"]))
        if given["seconds"]:
            return {"frames_per_second": 4.0, "commit": "def5678"}
        return POINTS | {"commit": "abc1234"}

    monkeypatch.setattr(mujoco_record, "run_function", run_function)
    return made


def record(folder: Path, results: str) -> Record:
    (folder / results).mkdir()
    return Record(folder / "record.csv", folder / results)


def test_a_run_in_the_csv_file_is_not_repeated_without_its_json_file(
    tmp_path: Path, calls: list[Any]
):
    record(tmp_path, "here").run(JOBS[:1], 1, 100)
    other = record(tmp_path, "there")
    other.run(JOBS, 2, 100)
    assert calls == JOBS
    other.run(JOBS[:1], 1, 100, 20.0)  # a speed of the same numbers is another run
    other.run(JOBS[:1], 1, 100, 20.0)
    assert calls == [*JOBS, JOBS[0]]


def test_runs_are_read_as_they_were_written(tmp_path: Path, calls: list[Any]):
    made = record(tmp_path, "here")
    made.run(JOBS, 2, 100)
    made.run(JOBS[:1], 1, 100, 20.0)
    runs = made.by_task(["Ant-v5", "Hopper-v5"])
    assert {task: list(arms) for task, arms in runs.items()} == {"Hopper-v5": ["ppokit"]}
    seeds = runs["Hopper-v5"]["ppokit"]
    frames, returns = curves(runs)["Hopper-v5"]["ppokit"]
    assert [run.job for run in seeds] == JOBS
    assert frames.tolist() == [50, 100]
    assert returns.tolist() == [[1.0, 2.5]] * 2
    assert final(seeds).tolist() == [1.5, 1.5]
    assert last_training(seeds).tolist() == [3.0, 3.0]
    (speed,) = made.by_task(["Hopper-v5"], speed=True)["Hopper-v5"]["ppokit"]
    assert speed.values(SPEED) == [4.0]
    assert made.commits() == "abc1234, def5678"


def test_an_interrupted_write_leaves_the_file_whole(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
):
    made = record(tmp_path, "here")
    made.run(JOBS[:1], 1, 100)
    before = made.file.read_bytes()

    def interrupted(path: Path, *_: Any) -> None:
        path.write_text("task,ar")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mujoco_record, "write_csv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.run(JOBS, 1, 100)
    assert made.file.read_bytes() == before
    made.run(JOBS, 1, 100)
    assert [run.job for run in made.runs()] == JOBS
    assert calls == JOBS  # the second run is kept as JSON
