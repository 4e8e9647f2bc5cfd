"""The tutorials: quick runs, interrupts, resumed runs and wrong options."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tutorial_runs import (
    assert_figure,
    assert_finite,
    follow,
    history,
    interrupt_after,
    play,
    run,
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
    "custom_algorithm": ["--total-frames", "2000"],
    "recurrent_ppo": ["--task", "cue"],
    "multi_agent_ppo": [],
}
SLOW = ("recurrent_ppo", "multi_agent_ppo")


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


# -- quick runs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in QUICK]
)
def test_quick_run_trains_and_draws_its_figure(
    name: str, quick: Any, capsys: pytest.CaptureFixture[str]
):
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
    if name == "custom_algorithm":
        printed = capsys.readouterr().out
        assert "'kl' is not in the batch. DualClipPPOLoss writes 'kl'" in printed
        assert "SPO: mean return of 5 episodes after 2000 frames" in printed
        state = torch.load(out / "spo.pt", weights_only=True)
        assert state["collector"]["frames"] == 2000


def parameters(out: Path) -> torch.Tensor:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return torch.cat([p.flatten() for p in (state["policy"] | state["critic"]).values()])


OTHER_KINDS: list[list[str]] = [
    ["coding_ppo", "--baseline"],
    ["coding_ppo", "--engine", "ppokit"],
    ["coding_ppo", "--engine", "torchrl"],
    ["coding_ppo", "--env", "CartPole-v1"],
    ["custom_algorithm", "--loss", "ppo", "--env", "Pendulum-v1"],
    ["recurrent_ppo", "--total-frames", "2048", "--memory", "gru"],
    ["recurrent_ppo", "--total-frames", "2048", "--memory", "stack"],
    ["multi_agent_ppo", "--arms"],
    ["rl8_vectorized", "--task", "pendulum", "--compile"],
    ["rllib_ppo", "--no-gae", "--no-shuffle", "--no-kl-loss"],
    ["rllib_ppo", "--settings", "ppokit", "--env", "Pendulum-v1"],
    ["rllib_ppo", "--no-critic", "--env", "MountainCar-v0", "--time-limit-is-end"],
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
def test_agents_learn_as_well_as_with_torchrls_pieces(tmp_path: Path):
    result = run("multi_agent_ppo", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    runs = history(tmp_path / "run")
    returns = {name: [rows[-1]["eval_return"] for rows in each] for name, each in runs.items()}
    assert min(returns["ppokit"]) > -35  # from -57
    assert sum(returns["ppokit"]) > sum(returns["torchrl"]) - 3  # seeds differ by 2


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
        ("coding_ppo", "reward="),
        ("coding_ppo --engine", "reward="),
        ("agilerl_ppo --env CartPole-v1", "score="),
        ("multi_agent_ppo", "reward="),
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
    logged = next(out.rglob("kl.csv")).read_text().split()
    assert len(logged) == len(history(out))


@pytest.mark.parametrize(
    ("name", "options", "had"),
    [
        ("rl8_vectorized", ["--horizon", "4"], "of another run, with --horizon 8"),
        ("rl8_vectorized", [], "has 128 frames already; raise --total-frames"),
        ("rllib_ppo", ["--hidden", "8"], "--resume: .* of another run: .*8"),
        ("agilerl_ppo", ["--target-kl", "0.5"], "of another run, with target_kl 0.03"),
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
        ("--device nope", "--device nope: .*--device cpu is always there"),
        ("--total-frames 0", "argument --total-frames: 0 is not 1 or more"),
    ],
    "custom_algorithm": [("--env CartPole-v1", "are not both a vector")],
    "recurrent_ppo": [("--forget --memory none", "there is no state to forget")],
    "multi_agent_ppo": [("--seeds 0", "argument --seeds: 0 is not 1 or more")],
    "distributed_ppo": [
        ("--asynchronous", "only --collector ray"),
        ("--frames-per-batch 64", "less than 16 steps"),
    ],
    "rl8_vectorized": [
        ("--recurrent --compile", "is not compiled"),
        ("--accumulate-grads --target-kl 0.1", "drop --accumulate-grads"),
        ("--lr-schedule 0:1e-3,9:nan", "learning rates must be from 0 to 1, got"),
    ],
    "rllib_ppo": [
        ("--no-critic", "truncates episodes after 500 steps.*no value to bootstrap from"),
        ("--lr [[5,0.1]]", "argument --lr: .* must be at frame 0"),
        ("--no-gae --lambda=0.9", "--no-gae: --lambda has no effect"),
    ],
    "agilerl_ppo": [
        ("--env Blackjack-v1", r"no encoder for 'observation' of Tuple\(Discrete"),
        ("--target-kl nan", "--target-kl must be positive"),
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
