"""The population tutorial: both engines, killed drivers and workers, the code that it prints."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import PPOUpdate
from tests.tutorial_runs import assert_figure, command, history, play, run

needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="extra 'ray' is not installed")
needs_optuna = pytest.mark.skipif(not find_spec("optuna"), reason="extra 'tune' is not installed")


def assert_is_finished(out: Path, printed: str, trials: int = 4) -> dict[str, list[Any]]:
    """All is written, and the printed code makes the update of the best trial."""
    rows = history(out)
    assert len(rows) == trials
    assert_figure(out)
    assert "Best configuration" in printed
    assert (out / "checkpoint.pt").exists()
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
    return rows


@needs_optuna
def test_optuna_tunes_a_population(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    play("population", tmp_path / "run", "--engine", "optuna", "--trials", "2")
    rows = assert_is_finished(tmp_path / "run", capsys.readouterr().out, trials=2)
    assert all(row["frames"] in (512, 1024) for each in rows.values() for row in each)


@needs_ray
@pytest.mark.slow
def test_population_ends_better_than_it_begins(tmp_path: Path):
    out = tmp_path / "run"
    result = run("population", out, "--quick")
    rows = assert_is_finished(out, result.stdout)
    assert max(each[-1]["score"] for each in rows.values()) > 9
    taken = [(name, row) for name, each in rows.items() for row in each if row["parent"] != name]
    assert taken  # the worst trial took over the best one
    for name, row in taken:
        donor = {each["frames"]: each for each in rows[row["parent"]] if each["parent"] != name}
        assert donor[row["frames"]]["score"] == row["score"]
        assert row["config"] != donor[row["frames"]]["config"]


@needs_optuna
@pytest.mark.slow
def test_optuna_resumes_after_a_kill(tmp_path: Path):
    out = tmp_path / "run"
    options = ["--quick", "--engine", "optuna"]
    process = start(out, *options)
    wait_for(lambda: len(list(out.glob("optuna/*/checkpoint.pt"))) >= 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = [json.loads(file.read_text()) for file in out.glob("optuna/*/rows.json")]
    rows = assert_is_finished(out, run("population", out, *options, "--resume").stdout)
    after = [[(row["frames"], row["score"]) for row in each] for each in rows.values()]
    for each in before:  # saved intervals are not trained again
        kept = [(row["frames"], row["score"]) for row in each]
        assert any(other[: len(kept)] == kept for other in after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trials 3", "of fewer than four, none can take over another"),
        ("--interval 1000", "is no multiple of a batch"),
        ("--seed -1", "--seed must be from 0"),
        ("--generations 0", "--generations: 0 is not 1 or more"),
        ("--env Nothing-v0", "--env Nothing-v0"),
        ("--env FrozenLake-v1", "not a vector"),
        ("--resume --env Pendulum-v1", "run without --resume first"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
):
    with pytest.raises(SystemExit, match="2"):
        play("population", tmp_path / "run", *options.split())
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def start(out: Path, *options: str) -> subprocess.Popen[bytes]:
    """Run the tutorial in a process group of its own; its output goes to a file beside it."""
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            command("population", out, *options), stdout=log, stderr=log, start_new_session=True
        )


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
