"""The tutorials: quick runs, interrupts, resumed runs and wrong options."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tutorial_runs import (
    TUTORIALS,
    assert_figure,
    assert_finite,
    follow,
    history,
    interrupt_after,
    play,
    run,
    with_constants,
)

RUNS: dict[str, list[str]] = {
    "rl8_vectorized": [
        *("--num-envs", "8", "--horizon", "8", "--epochs", "2", "--total-frames", "128")
    ],
    "rllib_ppo": [
        *("--train-batch-size", "200", "--num-envs", "4", "--total-frames", "400"),
        *("--eval-every", "0", "--lr", "[[0, 0.003], [800, 0.0003]]"),
    ],
    "agilerl_ppo": ["--env", "CartPole-v1", "--total-frames", "1024"],  # the default needs Box2D
}
QUICK = RUNS | {
    "coding_ppo": ["--total-frames", "1000"],
    "recurrent_ppo": ["--task", "cue"],
}
SLOW = ("recurrent_ppo",)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a finished quick run of a tutorial."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name) / "run"
            play(name, folders[name], *QUICK[name])
        return folders[name]

    return folder


# -- tutorials without options ----------------------------------------------------------


def test_five_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = follow("coding_ppo", tmp_path)
    printed = capsys.readouterr().out
    of_torchrl, own = re.findall(r"GAE of .*: .* ms, (\S+)", printed)
    assert float(own) == pytest.approx(float(of_torchrl), abs=1e-4)
    raw, scaled = map(float, re.findall(r"(\S+) of (?:raw|scaled)", printed))
    assert raw > 10 * scaled
    assert re.findall(r"ratio of 20: (\S+)", printed) == ["20.0", "5.0"]
    assert re.search(r"of 32 steps before the stop", printed)
    assert_finite(names["history"])
    assert_figure(tmp_path / names["OUT"])
    assert (tmp_path / names["OUT"] / "checkpoint.pt").exists()
    names["torchrl_update"](names["batch"])  # which the tutorial only shows


def test_a_run_in_two_pieces_equals_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = follow("checkpoints_and_resume", tmp_path)
    assert names["is_equal"]
    assert "bitwise equal: True" in capsys.readouterr().out
    assert names["returns"].mean() > 50
    assert_figure(tmp_path / names["OUT"])


def test_mujoco_resumes(tmp_path: Path):
    first = follow("mujoco_ppo", tmp_path, ENV="InvertedPendulum-v5")
    again = follow(
        "mujoco_ppo", tmp_path, ENV="InvertedPendulum-v5", RESUME=True, TOTAL_FRAMES=6_144
    )
    assert len(again["history"]) == len(first["history"]) + 2
    assert again["history"][: len(first["history"])] == first["history"]
    assert_figure(tmp_path / again["OUT"])


def printed_by(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Follow a tutorial, look at its figure, and return what it prints."""
    names = follow(name, folder)
    assert_figure(folder / names["OUT"])
    return capsys.readouterr().out


Printed = pytest.CaptureFixture[str]


def test_a_step_by_hand(tmp_path: Path, capsys: Printed):
    printed = printed_by("training_step", tmp_path, capsys)
    assert re.search(r"between the parameters: (0\.0e\+00|\d\.\de-0[78])", printed)
    before, steps = map(int, re.findall(r"(\d+) of (\d+) steps before the stop", printed)[0])
    assert 0 < before < steps
    assert "with a NaN advantage: stepped = False" in printed


def test_a_loss_of_your_own(tmp_path: Path, capsys: Printed):
    printed = printed_by("custom_algorithm", tmp_path, capsys)
    assert "'kl' is not in the batch. DualClipPPOLoss writes 'kl'" in printed
    assert re.search(r"SPO: return \d+ after 4,000 frames", printed)


def test_sequences_of_a_recurrent_policy(tmp_path: Path, capsys: Printed):
    printed = printed_by("recurrent_ppo", tmp_path, capsys)
    assert re.search(r"\(2, 32\) -> \(\d+, 8\), 64 valid frames", printed)
    assert re.search(r"(4|5)\d% right, remembers=False", printed)


def test_a_team(tmp_path: Path, capsys: Printed):
    printed = printed_by("multi_agent_ppo", tmp_path, capsys)
    assert "advantage: (128, 25, 3, 1)" in printed


def test_a_population_copies_its_best(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names = follow("population", tmp_path)
    assert_figure(tmp_path / names["OUT"])
    assert "generation 1: best" in capsys.readouterr().out
    worst, best = names["members"][0], names["members"][-1]
    if worst.number != best.number:
        worst.take_over(best)
    pairs = zip(worst.loss.parameters(), best.loss.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert worst.settings != best.settings


def test_environments_as_tensors(tmp_path: Path, capsys: Printed):
    printed = printed_by("rl8_vectorized", tmp_path, capsys)
    first, last = map(int, re.findall(r"horizon: (-\d+) -> (-\d+)", printed)[0])
    assert first < last


def test_settings_of_rllib(tmp_path: Path, capsys: Printed):
    printed = printed_by("rllib_ppo", tmp_path, capsys)
    of_example, own = map(int, re.findall(r": (\d+) of 500 after 8,000", printed))
    assert own > of_example


def test_clones_of_an_agent(tmp_path: Path):
    """In a process of its own: the import of Box2D crashes where warnings are errors."""
    line = [sys.executable, str(TUTORIALS / "agilerl_ppo.py"), "--quick"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert_figure(tmp_path / "outputs" / "agilerl_ppo")
    scores = re.findall(r"(?:agent|clone|loaded): return (\S+) after", result.stdout)
    assert len(scores) == 3
    assert len(set(scores)) == 1


def test_one_process_and_two_ranks(tmp_path: Path):
    script = tmp_path / "distributed_ppo.py"
    script.write_text(with_constants("distributed_ppo"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for number, options in enumerate([launcher, []], start=1):
        line = [sys.executable, *options, str(script), "--quick"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert f"{3 - number} rank(s): " in result.stdout
        assert_figure(tmp_path / "outputs" / "distributed_ppo")
        resumed = script.read_text().replace("RESUME = False", "RESUME = True")
        script.write_text(resumed.replace("4_096 if QUICK", "8_192 if QUICK"))
    rows = history(tmp_path / "outputs" / "distributed_ppo")
    assert [row["total_frames"] for row in rows] == [2_048.0 * n for n in range(1, 5)]


# -- quick runs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in QUICK]
)
def test_quick_run_trains_and_draws_its_figure(name: str, quick: Any):
    out = quick(name)
    assert_figure(out)
    found = history(out)
    runs = [found] if isinstance(found, list) else list(found.values())
    runs = [rows for each in runs for rows in (each if isinstance(each[0], list) else [each])]
    for rows in runs:
        assert len(rows) >= 2
        assert_finite(rows)
        assert rows[-1]["total_frames"] > rows[0]["total_frames"]
        assert len({row["kl"] for row in rows if "kl" in row}) != 1


def parameters(out: Path) -> torch.Tensor:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return torch.cat([p.flatten() for p in state["update"]["loss"].values()])


OTHER_KINDS: list[list[str]] = [
    ["coding_ppo", "--baseline"],
    ["coding_ppo", "--env", "CartPole-v1"],
    ["recurrent_ppo", "--total-frames", "2048", "--memory", "gru"],
    ["recurrent_ppo", "--total-frames", "2048", "--memory", "stack"],
    ["rl8_vectorized", "--task", "pendulum", "--compile"],
    ["rllib_ppo", "--settings", "ppokit", "--env", "Pendulum-v1"],
    ["agilerl_ppo", "--env", "CarRacing-v3"],
    ["agilerl_ppo", "--env", "CliffWalking-v1", "--encoders", "own"],
]


@pytest.mark.slow
@pytest.mark.parametrize("line", OTHER_KINDS, ids=" ".join)
def test_other_kinds_of_runs(line: list[str], tmp_path: Path):
    name, *options = line
    result = run(name, tmp_path / "run", "--quick", *options)
    assert result.returncode == 0, result.stderr
    assert_figure(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "least"),
    [
        ("rl8_vectorized --num-envs 256 --horizon 64 --minibatch-size 256 --target -50", -50),
        ("agilerl_ppo --env LunarLander-v3 --total-frames 100000", 50),
    ],
)
def test_assemblies_of_other_systems_learn(line: str, least: float, tmp_path: Path):
    name, *options = line.split()
    result = run(name, tmp_path / "run", *options)
    assert result.returncode == 0, result.stderr
    rows = history(tmp_path / "run")  # agilerl_ppo evaluates after some of the batches
    scores = [row[key] for row in rows for key in ("score", "return") if key in row]
    assert max(scores[-3:]) > least


# -- interrupted and resumed ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("coding_ppo", "eval_return="),
        ("agilerl_ppo --env CartPole-v1", "kl="),
    ],
)
def test_ctrl_c_ends_a_run_with_its_checkpoint_and_figure(line: str, seen: str, tmp_path: Path):
    name, *options = line.split()
    out = tmp_path / "run"
    interrupt_after(seen, name, out, "--quick", "--total-frames", "900000", *options)
    assert_figure(out)
    if name != "coding_ppo":
        return
    done = int(history(out)[-1]["total_frames"])
    stopped = parameters(out)
    more = ["--quick", "--resume", "--total-frames", str(done + 1000), *options]
    result = run(name, out, *more)
    assert result.returncode == 0, result.stderr
    assert [row["total_frames"] for row in history(out)] == [
        500.0 * n for n in range(1, done // 500 + 3)
    ]
    assert not torch.equal(parameters(out), stopped)


@pytest.mark.parametrize(
    ("name", "options", "had"),
    [
        ("rl8_vectorized", ["--horizon", "4"], "of another run, with --horizon 8"),
        ("rl8_vectorized", [], "has 128 frames already; raise --total-frames"),
        ("rllib_ppo", ["--settings", "ppokit"], "--resume: .* damaged, or of another run"),
        ("agilerl_ppo", ["--target-kl", "0.5"], "of another run, with --target-kl 0.03"),
    ],
)
def test_resuming_with_other_settings_raises(
    name: str, options: list[str], had: str, quick: Any, capsys: pytest.CaptureFixture[str]
):
    checkpoint = quick(name) / "checkpoint.pt"
    before = checkpoint.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        play(name, quick(name), *RUNS[name], "--resume", *options)
    assert re.search(had, " ".join(capsys.readouterr().err.split()))
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_continues_its_history_and_its_schedules(name: str, quick: Any):
    out = quick(name)
    before = history(out)
    size = before[0]["total_frames"]
    total = before[-1]["total_frames"] + 2 * size
    play(name, out, *RUNS[name], "--resume", "--total-frames", str(int(total)))
    rows = history(out)
    assert rows[: len(before)] == before
    assert [row["total_frames"] for row in rows] == [size * (n + 1) for n in range(len(rows))]
    assert rows[-1]["seconds"] > before[-1]["seconds"]
    if name == "rllib_ppo":
        rates = np.interp([0, 200, 400, 600], [0, 800], [0.003, 0.0003])
        np.testing.assert_allclose([row["lr"] for row in rows], rates, rtol=1e-5)
        moves = [b["kl_coeff"] / a["kl_coeff"] for a, b in itertools.pairwise(rows)]
        assert all(min(abs(x - y) for y in (0.5, 1.0, 1.5)) < 1e-5 for x in moves)


@pytest.mark.parametrize("name", ["coding_ppo", "distributed_ppo", "recurrent_ppo", *RUNS])
def test_a_damaged_checkpoint_is_named(
    name: str, quick: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = (quick(name) / "checkpoint.pt").read_bytes()[:1000] if name in RUNS else b"x" * 20
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        play(name, tmp_path, *RUNS.get(name, []), "--resume")
    assert "checkpoint.pt is damaged" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "checkpoint.pt").read_bytes() == content


# -- wrong options --------------------------------------------------------------------


WRONG: dict[str, list[tuple[str, str]]] = {
    "coding_ppo": [
        ("--resume", "run without --resume first"),
        ("--env FrozenLake-v1", r"the observation is Discrete\(16\), not a vector"),
        ("--total-frames 0", "argument --total-frames: 0 is not 1 or more"),
    ],
    "recurrent_ppo": [("--forget --memory none", "there is no state to forget")],
    "distributed_ppo": [
        ("--asynchronous", "only --collector ray"),
        ("--frames-per-batch 64", "less than 16 steps"),
    ],
    "rl8_vectorized": [
        ("--lr-schedule 9:1e-3", "argument --lr-schedule: invalid points value"),
        ("--horizon 0", "argument --horizon: 0 is not 1 or more"),
    ],
    "rllib_ppo": [
        ("--lr [[5,0.1]]", "argument --lr: invalid schedule value"),
    ],
    "agilerl_ppo": [
        ("--env Blackjack-v1", "Observation .* is no array"),
        ("--target-kl nan", "target_kl must be positive"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for options, message in WRONG[name]:
        env = ["--env", "CartPole-v1"] if name == "agilerl_ppo" else []  # the default needs Box2D
        with pytest.raises(SystemExit, match="2"):
            play(name, tmp_path / "run", *env, *options.split())
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(message, said), (options, said)
    assert not (tmp_path / "run").exists()
