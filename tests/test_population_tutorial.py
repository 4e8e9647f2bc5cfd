"""The population tutorial: both engines, killed drivers and workers, the code that it prints."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import PPOUpdate
from tests.test_tutorials import TUTORIALS, command, history, run

SCRIPT = TUTORIALS / "population.py"
needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="extra 'ray' is not installed")
needs_optuna = pytest.mark.skipif(not find_spec("optuna"), reason="extra 'tune' is not installed")


def rows_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    found: Any = history(out)
    return found


def assert_is_finished(out: Path, result: subprocess.CompletedProcess[str], trials: int = 4):
    assert result.returncode == 0, result.stderr
    rows = rows_of(out)
    assert len(rows) == trials
    assert matplotlib.image.imread(out / "figure.png").std() > 0.01
    assert "Best configuration" in result.stdout
    assert (out / "checkpoint.pt").exists()
    # what is printed can be pasted, and makes the update that it says
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    names: dict[str, Any] = {"actor": actor, "critic": ValueOperator(nn.Linear(4, 1))}
    exec((out / "best.py").read_text(), names)
    update = names["update"]
    assert isinstance(update, PPOUpdate)
    best = max(rows.values(), key=lambda each: each[-1]["score"])[-1]["config"]
    assert (update.epochs, update.minibatch_size) == (best["epochs"], best["minibatch_size"])
    names["scheduler"].step(10**9)
    assert update.step.optimizer.param_groups[0]["lr"] == pytest.approx(best["lr"], rel=1e-2)
    assert float(update.step.loss.clip_epsilon) == pytest.approx(best["clip_epsilon"], rel=1e-2)


@needs_optuna
def test_optuna(tmp_path: Path):
    out = tmp_path / "run"
    result = run(out, "--quick", "--engine", "optuna", script=SCRIPT)
    assert_is_finished(out, result)
    assert all(row["frames"] in (512, 1024) for rows in rows_of(out).values() for row in rows)


@needs_optuna
@pytest.mark.slow
def test_optuna_killed_and_resumed(tmp_path: Path):
    out = tmp_path / "run"
    options = ["--quick", "--engine", "optuna"]
    process = start(out, *options)
    wait_for(lambda: len(list(out.glob("optuna/*/checkpoint.pt"))) >= 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {
        file.parent.name: json.loads(file.read_text()) for file in out.glob("optuna/*/rows.json")
    }
    result = run(out, *options, "--resume", script=SCRIPT)
    assert_is_finished(out, result)
    after = [[(row["frames"], row["score"]) for row in rows] for rows in rows_of(out).values()]
    for rows in before.values():  # nothing that had a checkpoint was trained again
        kept = [(row["frames"], row["score"]) for row in rows]
        assert any(each[: len(kept)] == kept for each in after)


@needs_ray
@pytest.mark.slow
def test_population_ends_better_than_it_begins(tmp_path: Path):
    out = tmp_path / "run"
    result = run(out, "--quick", script=SCRIPT)
    assert_is_finished(out, result)
    rows = rows_of(out)
    assert max(each[-1]["score"] for each in rows.values()) > 9
    taken = [(name, row) for name, each in rows.items() for row in each if row["parent"] != name]
    assert taken  # the worst went on from the best
    for name, row in taken:
        donor = {each["frames"]: each for each in rows[row["parent"]] if each["parent"] != name}
        assert donor[row["frames"]]["score"] == row["score"]
        assert row["config"] != donor[row["frames"]]["config"]


@needs_ray
@pytest.mark.slow
def test_driver_killed_and_resumed(tmp_path: Path):
    out = tmp_path / "run"
    process = start(out, "--quick")
    wait_for(lambda: sum(map(len, reports(out).values())) >= 5, process)
    process.kill()
    process.wait()
    before = reports(out)
    result = run(out, "--quick", "--resume", script=SCRIPT)
    assert_is_finished(out, result)
    after = reports(out)
    for trial, frames in before.items():
        again = after[trial][len(frames) :]
        assert min(again) >= frames[-1] - 512  # at most one interval is lost
        assert max(again) == 1024


@needs_ray
@pytest.mark.slow
def test_interrupted_and_half_written(tmp_path: Path):
    out = tmp_path / "run"
    process = start(out, "--quick")
    wait_for(lambda: sum(map(len, reports(out).values())) >= 5, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) != 0
    text = out.with_suffix(".log").read_text()
    assert "Best configuration" not in text
    assert not (out / "best.py").exists()
    newest = max(out.glob("ray/experiment_state-*.json"))
    newest.write_text(newest.read_text()[:100])  # as a power cut leaves it
    result = run(out, "--quick", "--resume", script=SCRIPT)
    assert_is_finished(out, result)


@needs_optuna
@pytest.mark.slow
def test_optuna_interrupted(tmp_path: Path):
    out = tmp_path / "run"
    options = ["--engine", "optuna", "--env", "CartPole-v1", "--trials", "2", "--generations", "4"]
    process = start(out, *options, "--interval", "8192")
    wait_for(lambda: list(out.glob("optuna/0/checkpoint.pt")), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) != 0
    assert "--resume goes on" in out.with_suffix(".log").read_text()
    first = json.loads((out / "optuna" / "0" / "rows.json").read_text())
    result = run(out, *options, "--interval", "8192", "--resume", script=SCRIPT)
    assert_is_finished(out, result, trials=2)
    scores = [[row["score"] for row in rows] for rows in rows_of(out).values()]
    assert any(each[: len(first)] == [row["score"] for row in first] for each in scores)


@needs_ray
def test_nothing_to_resume(tmp_path: Path):
    out = tmp_path / "run"
    process = start(out, "--quick")
    wait_for(lambda: (out / "settings.json").exists(), process)
    process.kill()
    process.wait()
    result = run(out, "--quick", "--resume", script=SCRIPT)
    assert result.returncode == 2
    assert "run without --resume" in result.stderr


@needs_ray
@pytest.mark.slow
def test_worker_killed(tmp_path: Path):
    out = tmp_path / "run"
    process = start(out, "--quick")
    wait_for(lambda: sum(map(len, reports(out).values())) >= 2, process)
    pids = {
        json.loads(line)["pid"]
        for file in out.glob("ray/*/result.json")
        for line in whole_lines(file)
    }
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=240)
    text = out.with_suffix(".log").read_text()
    assert_is_finished(out, subprocess.CompletedProcess([], process.returncode, text, text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trials", "3"], "of fewer than four, none can take over another"),
        (["--interval", "1000"], "is no multiple of a batch, 8192"),
        (["--quick", "--trials", "0"], "--trials: 0 is not 1 or more"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--generations", "0"], "--generations: 0 is not 1 or more"),
        (["--env", "Nothing-v0"], "--env Nothing-v0"),
        (["--env", "FrozenLake-v1"], "not a vector"),
        (["--resume", "--env", "Pendulum-v1"], "run without --resume first"),
    ],
)
def test_wrong_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path / "run"), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def start(out: Path, *options: str) -> subprocess.Popen[bytes]:
    """Run the tutorial in a process group of its own; what it prints goes to a file beside it."""
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            command(out, *options, script=SCRIPT), stdout=log, stderr=log, start_new_session=True
        )


def reports(out: Path) -> dict[str, list[int]]:
    """Return the frames that each trial reported, in their order."""
    return {
        file.stem: [json.loads(line)["frames"] for line in whole_lines(file)]
        for file in out.glob("reports/*.jsonl")
        if whole_lines(file)
    }


def whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
