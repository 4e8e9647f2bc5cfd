"""The tutorials, and the scripts with options that benchmarks run."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

from ppokit.plotting import read_run
from tests.tutorial_runs import (
    TUTORIALS,
    assert_figure,
    assert_finite,
    command,
    follow,
    history,
    interrupt_after,
    play,
    run_python,
    with_constants,
)

QUICK = [
    "rl8_vectorized --num-envs 8 --horizon 8 --total-frames 128 --minibatch-size 64",
    "rl8_vectorized --num-envs 8 --horizon 8 --total-frames 128 --original --accumulate-grads",
    "rllib_ppo --total-frames 8000",
    "rllib_ppo --settings ppokit --total-frames 2000",
    "agilerl_ppo --env CartPole-v1 --total-frames 1024",  # the default needs Box2D
    "coding_ppo --env CartPole-v1 --total-frames 1000",
    "coding_ppo --baseline --env CartPole-v1 --total-frames 1000",
    "recurrent_ppo --task cue",
    "recurrent_ppo --total-frames 4096 --memory gru",
    "recurrent_ppo --total-frames 4096 --memory stack",
]


LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

# -- tutorials ----------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
def test_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for game, atari in (("Breakout", False), ("Pong", True)):
        first = follow("atari_ppo", tmp_path, ATARI=atari)
        more = {"RESUME": True, "TOTAL_FRAMES": 4_096}
        again = follow("atari_ppo", tmp_path, ATARI=atari, **more)
        assert len(again["history"]) == 2 * len(first["history"]) == 4
        norms = [[row["grad_norm"] for row in run["history"]] for run in (first, again)]
        assert norms[0] == norms[1][:2]
        assert again["optimizer"].param_groups[0]["lr"] < first["LEARNING_RATE"]
        assert f"{game}, mean return of" in capsys.readouterr().out
        assert_finite(again["history"])
        assert_figure(tmp_path / again["OUT"])
    frames = matplotlib.image.imread(tmp_path / "outputs/atari_ppo/Breakout/frames.png")
    assert frames.std() > 0.01


@pytest.mark.slow
def test_images_are_learned(tmp_path: Path):
    """A random policy has 0.5 bricks."""
    names = follow("atari_ppo", tmp_path, EPOCHS=4, TOTAL_FRAMES=60_000, EVALUATE_EVERY=20)
    assert names["evaluations"][-1] > 2


@pytest.mark.slow
def test_mujoco_resumes(tmp_path: Path):
    first = follow("mujoco_ppo", tmp_path, ENV="InvertedPendulum-v5")
    again = follow(
        "mujoco_ppo", tmp_path, ENV="InvertedPendulum-v5", RESUME=True, TOTAL_FRAMES=6_144
    )
    assert len(again["history"]) == len(first["history"]) + 2
    assert again["history"][: len(first["history"])] == first["history"]
    assert_figure(tmp_path / again["OUT"])


def numbers_of(printed: str, folder: Path) -> tuple[str, str]:
    """Return what a run printed and stored, without times and the log of torchrl."""

    def without_times(found: Any) -> Any:
        if isinstance(found, dict):
            timed = ("seconds_", "frames_per_second")
            return {k: without_times(x) for k, x in found.items() if not k.startswith(timed)}
        return [without_times(x) for x in found] if isinstance(found, list) else found

    files = sorted((folder / "outputs").rglob("*.json"))
    stored = json.dumps([without_times(json.loads(file.read_text())) for file in files])
    printed = re.sub(r"[\d.,]+ (ms|frames a second)|.*\[torchrl\].*", "", printed)
    return printed, stored


def test_a_second_run_of_the_main_command_gives_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        follow("coding_ppo", folder, TOTAL_FRAMES=1_000, EPOCHS=1)
        runs.append(numbers_of(capsys.readouterr().out, folder))
    assert runs[0] == runs[1]
    assert "episode_return" in runs[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in TUTORIALS.glob("*.py")))
def test_a_second_run_gives_the_same_numbers(name: str, tmp_path: Path):
    """Environments, weights, actions, minibatches and evaluation follow SEED."""
    runs = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        result = run_python(str(TUTORIALS / f"{name}.py"), "--quick", cwd=folder)
        assert result.returncode == 0, result.stderr
        runs.append(numbers_of(result.stdout, folder))
    assert runs[0] == runs[1]


Printed = pytest.CaptureFixture[str]
SLOW = pytest.mark.slow
#: patterns of what a tutorial prints; two numbers in the last one rise
PRINTED = [
    pytest.param("multi_agent_ppo", [r"advantage: \(128, 25, 3, 1\)"]),
    pytest.param("rl8_vectorized", [r"horizon: (-\d+) -> (-\d+)"]),
    pytest.param(
        "rllib_ppo", [r"(?s): (\d+) of 500 after 8,000.*: (\d+) of 500 after 8,000"], marks=SLOW
    ),
    pytest.param(
        "training_step",
        [
            r"between the parameters: (?:0\.0e\+00|\d\.\de-0[78])",
            "with a NaN advantage: stepped = False",
            r"([1-9]\d*) of (\d+) steps before the stop",
        ],
    ),
    pytest.param(
        "custom_algorithm",
        [
            "'kl' is not in the batch. DualClipPPOLoss writes 'kl'",
            r"SPO: return \d+ after 4,000 frames",
        ],
        marks=SLOW,
    ),
    pytest.param(
        "recurrent_ppo",
        [r"\(2, 32\) -> \(\d+, 8\), 64 valid frames", r"(?:4|5)\d% right, remembers=False"],
        marks=SLOW,
    ),
    pytest.param(
        "memory_tasks",
        [r"four frames: [123]\d% right", r"GRU: \d+% right", r"'LSTM': '(?:0e\+00|\de-\d\d)'"],
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("name", "patterns"), PRINTED)
def test_what_a_tutorial_draws_and_prints(
    name: str, patterns: list[str], tmp_path: Path, capsys: Printed
):
    names = follow(name, tmp_path)
    assert_figure(tmp_path / names["OUT"])
    printed = capsys.readouterr().out
    for pattern in patterns:
        found = re.search(pattern, printed)
        assert found is not None, pattern
        numbers = [int(x) for x in found.groups()]
        assert numbers == sorted(set(numbers))


@pytest.mark.slow
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


@pytest.mark.slow
def test_clones_of_an_agent(tmp_path: Path):
    """In a process of its own: the import of Box2D crashes where warnings are errors."""
    result = run_python(str(TUTORIALS / "agilerl_ppo.py"), "--quick", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_figure(tmp_path / "outputs" / "agilerl_ppo")
    scores = re.findall(r"(?:agent|clone|loaded): return (\S+) after", result.stdout)
    assert len(scores) == 3
    assert len(set(scores)) == 1


@pytest.mark.slow
def test_one_process_and_two_ranks(tmp_path: Path):
    script = tmp_path / "distributed_ppo.py"
    script.write_text(with_constants("distributed_ppo"))
    for number, options in enumerate([LAUNCHER, []], start=1):
        result = run_python(*options, str(script), "--quick", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert f"{3 - number} rank(s): " in result.stdout
        assert_figure(tmp_path / "outputs" / "distributed_ppo")
        resumed = script.read_text().replace("RESUME = False", "RESUME = True")
        script.write_text(resumed.replace("4_096 if QUICK", "8_192 if QUICK"))
    rows = history(tmp_path / "outputs" / "distributed_ppo")
    assert [row["total_frames"] for row in rows] == [2_048.0 * n for n in range(1, 5)]


# -- assemblies -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("line", QUICK)
def test_quick_run_trains_and_draws_its_figure(line: str, tmp_path: Path):
    name, *options = line.split()
    play(name, tmp_path / "run", *options)
    assert_figure(tmp_path / "run")
    rows = history(tmp_path / "run")
    assert len(rows) >= 2
    assert_finite(rows)
    assert rows[-1]["total_frames"] > rows[0]["total_frames"]
    # The KL of an update with one step is 0, or nearly.
    of_training = [{k: row[k] for k in row if k.startswith(("kl", "loss"))} for row in rows]
    assert len({str(row) for row in of_training if row}) != 1


def settings_of(update: Any) -> dict[str, Any]:
    """Return the hyper-parameters of an update."""
    step, gae = update.step, update.advantage
    names = ("clip_epsilon", "critic_coeff", "dual_clip", "critic_loss_clip", "kl_coeff")
    found = {name: getattr(step.loss, name) for name in (*names, "loss_critic_type")}
    return {
        **{name: float(x) if isinstance(x, torch.Tensor) else x for name, x in found.items()},
        "epochs": update.epochs,
        "minibatch_size": update.minibatch_size,
        "gae": (float(gae.gamma), float(gae.lmbda), gae.average_gae),
        "max_grad_norm": step.max_grad_norm,
        "target_kl": step.stopper and step.stopper.target_kl,
        "lr": step.optimizer.defaults["lr"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coding_ppo", "rl8_vectorized", "rllib_ppo"])
def test_a_tutorial_has_the_settings_of_its_benchmark(name: str, tmp_path: Path):
    names = follow(name, tmp_path)
    update = names["update"]
    if name == "rllib_ppo":
        _, update = names["make_update"](names["SETTINGS"]["RLlib's example"])
    expected = settings_of(play(name, tmp_path / "run")["update"])
    assert settings_of(update) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "least"),
    [("rl8_vectorized --target -50", -50), ("agilerl_ppo --total-frames 100000", 50)],
)
def test_assemblies_of_other_systems_learn(line: str, least: float, tmp_path: Path):
    name, *options = line.split()
    result = run_python(*command(name, tmp_path / "run", *options))
    assert result.returncode == 0, result.stderr
    rows = history(tmp_path / "run")  # agilerl_ppo evaluates after some of the batches
    scores = [row[key] for row in rows for key in ("score", "return") if key in row]
    assert max(scores[-3:]) > least


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_its_history_and_figure(tmp_path: Path):
    out = tmp_path / "run"
    interrupt_after("eval_return=", "coding_ppo", out, "--quick", "--total-frames", "900000")
    assert_figure(out)
    assert history(out)[-1]["total_frames"] < 900_000


def test_a_folder_with_files_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "history.json").write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        play("rllib_ppo", tmp_path)
    assert f"--out: {tmp_path} is not empty" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "history.json").read_text() == "[]"


# -- distributed_ppo: ranks, and a Ray cluster ------------------------------------------


def torchrun(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script on two ranks."""
    return run_python(*LAUNCHER, *command("distributed_ppo", out, "--quick", *options))


def assert_healthy(out: Path, result: subprocess.CompletedProcess[str], frames: int) -> None:
    assert result.returncode == 0, result.stderr
    assert f"Return of 5 episodes after {frames} frames" in result.stdout
    assert "Traceback" not in result.stderr
    rows = read_run(out / "logs")
    assert rows[-1]["total_frames"] == frames
    assert_finite(rows)
    assert_figure(out)
    assert len(list(out.glob("logs/**/kl.csv"))) == 1


@pytest.mark.slow
def test_two_ranks_and_one(tmp_path: Path):
    out = tmp_path / "run"
    assert_healthy(out, torchrun(out, "--ragged"), 4_352)  # 2 x 128 x (8 + 9)
    rows = read_run(out / "logs")
    assert rows[-1]["lr"] < rows[0]["lr"]  # schedules count the frames of all ranks
    names = play("distributed_ppo", tmp_path / "alone")
    assert names["policy"].policy_version == 2
    assert read_run(tmp_path / "alone" / "logs")[-1]["total_frames"] == 4_096


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--memory", "--ragged"], ["--memory", "--env", "Pendulum-v1"]]
)
def test_other_kinds_of_ranks(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    frames = 4_352 if "--ragged" in options else 4_096
    assert_healthy(out, torchrun(out, *options), frames)


@pytest.mark.skipif(find_spec("ray") is None, reason="extra 'ray' is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--asynchronous"], ["--memory"]])
def test_ray(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    line = command("distributed_ppo", out, "--quick", "--collector", "ray", *options)
    assert_healthy(out, run_python(*line), 4_096)
    if "--asynchronous" in options:
        assert max(row["policy_lag"] for row in read_run(out / "logs")) >= 1
