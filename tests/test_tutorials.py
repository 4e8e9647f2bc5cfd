"""The tutorials as a reader runs them: every kind, interrupted, resumed, other environments."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "tutorials"
SCRIPT = TUTORIALS / "coding_ppo.py"
OWN = TUTORIALS / "custom_algorithm.py"
MEMORY = TUTORIALS / "recurrent_ppo.py"
AGENTS = TUTORIALS / "multi_agent_ppo.py"
COLUMNS = {"kl", "clip_fraction", "explained_variance", "lr", "episode_return", "episode_length"}


def command(out: Path, *options: str, script: Path = SCRIPT) -> list[str]:
    return [sys.executable, str(script), "--out", str(out), *options]


def run(out: Path, *options: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = command(out, *options, script=script)
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)


def history(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "history.json").read_text())


def parameters(out: Path) -> torch.Tensor:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return torch.cat([p.flatten() for p in (state["policy"] | state["critic"]).values()])


def assert_finite(rows: Iterable[Mapping[str, float]]) -> None:
    """All are numbers, but for return and length where no episode ended."""
    for row in rows:
        unknown = () if row.get("episodes", 1.0) else ("episode_return", "episode_length")
        assert all(math.isfinite(x) for name, x in row.items() if name not in unknown), row


def assert_healthy(out: Path, result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr
    rows = history(out)
    assert set().union(*rows) >= COLUMNS
    assert_finite(rows)
    # what the figure's axes show is not constant
    for name in COLUMNS - {"clip_fraction", "explained_variance"} | {"eval_return", "eval_length"}:
        values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
        assert len(values) >= 2, name
        assert len(set(values)) >= 2, f"{name} is constant: {values}"
    figure = matplotlib.image.imread(out / "figure.png")
    assert figure.shape[0] > 500
    assert figure.std() > 0.01
    logged = {path.stem: path.read_text().split() for path in out.rglob("*.csv")}
    assert logged.keys() >= COLUMNS
    for name in logged.keys() - {"episode_return", "episode_length"}:
        lines = logged[name]
        assert all(math.isfinite(float(line.split(",")[1])) for line in lines), name


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("quick") / "run"
    return out, run(out, "--quick")


def test_quick(quick_run: Any):
    out, result = quick_run
    assert_healthy(out, result)
    assert "Mean return of 5 episodes after 2000 frames" in result.stdout
    assert history(out)[-1]["steps"] > 0


@pytest.mark.slow
def test_a_run_of_the_past_is_kept_and_the_seed_is_the_run(quick_run: Any, tmp_path: Path):
    first, _ = quick_run
    out = tmp_path / "run"
    run(out, "--quick", "--total-frames", "500")
    started = parameters(out)
    again = run(out, "--quick")
    assert f"it is now {out}.1" in again.stdout
    assert torch.equal(parameters(Path(f"{out}.1")), started)
    assert torch.equal(parameters(out), parameters(first))
    assert not torch.equal(parameters(out), started)


@pytest.mark.slow
def test_baseline(tmp_path: Path):
    assert_healthy(tmp_path / "run", run(tmp_path / "run", "--quick", "--baseline"))


@pytest.mark.slow
@pytest.mark.parametrize("collector", ["ppokit", "torchrl"])
def test_engine(tmp_path: Path, collector: str):
    out = tmp_path / "run"
    assert_healthy(out, run(out, "--quick", "--engine", collector))
    assert history(out)[-1]["seconds_collecting"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--engine"]], ids=["by hand", "engine"])
def test_interrupt_and_resume(tmp_path: Path, kind: list[str]):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(out, "--quick", "--total-frames", "200000", *kind),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    seen = ""
    while "reward=" not in seen:  # the progress bar of the first batch
        seen += (character := process.stderr.read(1))
        assert character, seen
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Interrupted" in printed
    assert (out / "figure.png").exists()
    done = int(history(out)[-1]["total_frames"])
    stopped = parameters(out)

    result = run(out, "--quick", "--resume", "--total-frames", str(done + 1000), *kind)
    assert_healthy(out, result)
    frames = [row["total_frames"] for row in history(out)]
    assert frames == [500.0 * n for n in range(1, done // 500 + 3)]
    assert not torch.equal(parameters(out), stopped)
    logged = (next(out.rglob("kl.csv"))).read_text().split()
    assert len(logged) == len(history(out))


@pytest.mark.slow
def test_discrete_actions(tmp_path: Path):
    out = tmp_path / "run"
    assert_healthy(out, run(out, "--quick", "--env", "CartPole-v1"))


@pytest.mark.slow
def test_resuming_the_other_kind_of_run_is_refused(quick_run: Any):
    out, _ = quick_run
    result = run(out, "--quick", "--baseline", "--resume")
    assert result.returncode == 2
    assert "is damaged, or of another run" in result.stderr
    for options in (["--quick", "--seed", "1"], []):
        result = run(out, "--resume", "--total-frames", "3000", *options)
        assert result.returncode == 2
        assert "is of another run: " in result.stderr


def test_an_algorithm_of_ones_own(tmp_path: Path):
    out = tmp_path / "run"
    result = run(out, "--quick", script=OWN)
    assert result.returncode == 0, result.stderr
    assert "The loss writes no 'kl' for the KLEarlyStopper to read" in result.stdout
    assert "SPO: mean return of 5 episodes after 4000 frames" in result.stdout
    assert matplotlib.image.imread(out / "figure.png").std() > 0.01
    for name, rows in history(out).items():  # pyright: ignore[reportAttributeAccessIssue]
        assert len({row["eval_return"] for row in rows if "eval_return" in row}) >= 2
        assert_finite(rows)
        state = torch.load(out / f"{name}.pt", weights_only=True)
        assert state["collector"]["frames"] == 4000


@pytest.mark.slow
def test_another_loss_and_environment(tmp_path: Path):
    out = tmp_path / "run"
    out.mkdir()  # an empty folder is no run
    first = run(out, "--quick", "--total-frames", "1000", "--loss", "ppo", script=OWN)
    assert "held an earlier run" not in first.stdout
    again = run(out, "--quick", "--loss", "ppo", "--env", "Pendulum-v1", script=OWN)
    assert f"it is now {out}.1" in again.stdout
    assert list(history(out)) == ["ppo"]
    refused = run(tmp_path / "other", "--quick", "--env", "CartPole-v1", script=OWN)
    assert refused.returncode == 2
    assert "are not both a vector" in refused.stderr


@pytest.fixture(scope="module")
def memory_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("memory") / "run"
    return out, run(out, "--quick", "--task", "cue", script=MEMORY)


@pytest.mark.slow
def test_memory(memory_run: Any):
    out, result = memory_run
    assert result.returncode == 0, result.stderr
    assert "cue, lstm: " in result.stdout
    assert matplotlib.image.imread(out / "figure.png").std() > 0.01
    rows = history(out)
    assert [row["total_frames"] for row in rows] == [4096.0, 8192.0]
    assert all(0 <= row["eval_return"] <= 1 and 0 < row["padded"] < 0.5 for row in rows)


@pytest.mark.slow
def test_memory_resumed(memory_run: Any):
    out, _ = memory_run
    more = run(
        out, "--quick", "--task", "cue", "--resume", "--total-frames", "12288", script=MEMORY
    )
    assert more.returncode == 0, more.stderr
    assert [row["total_frames"] for row in history(out)] == [4096.0, 8192.0, 12288.0]
    other = run(out, "--quick", "--task", "cue", "--resume", "--forget", script=MEMORY)
    assert other.returncode == 2
    assert "of another run" in other.stderr
    finished = run(out, "--quick", "--task", "cue", "--resume", script=MEMORY)
    assert finished.returncode == 2
    assert "has 12288 frames already; raise --total-frames" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--memory", "gru"], ["--memory", "stack"]])
def test_other_memories(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    result = run(out, "--quick", "--total-frames", "2048", *options, script=MEMORY)
    assert result.returncode == 0, result.stderr
    assert ("padded" in history(out)[0]) == ("gru" in options)


@pytest.mark.slow
def test_nothing_to_forget_with(tmp_path: Path):
    result = run(tmp_path / "run", "--quick", "--forget", "--memory", "none", script=MEMORY)
    assert result.returncode == 2
    assert "there is no state to forget" in result.stderr


def assert_agents_learn(out: Path, result: subprocess.CompletedProcess[str], kinds: set[str]):
    assert result.returncode == 0, result.stderr
    runs: Any = history(out)
    assert set(runs) == kinds
    for rows in (rows for each in runs.values() for rows in each):
        assert_finite(rows)
        assert all(-150 < row["return"] < 0 for row in rows)
        assert "eval_return" in rows[-1]
        assert len({row["return"] for row in rows}) == len(rows) >= 2
    assert "Mean return of 64 episodes after 6400 frames" in result.stdout
    assert matplotlib.image.imread(out / "figure.png").std() > 0.01


@pytest.mark.slow
def test_several_agents(tmp_path: Path):
    out = tmp_path / "run"
    result = run(out, "--quick", script=AGENTS)
    assert_agents_learn(out, result, {"ppokit", "torchrl"})
    runs: Any = history(out)
    first, other = (runs[name][0][0] for name in ("ppokit", "torchrl"))
    # before the first update both play alike
    assert first["return"] == pytest.approx(other["return"], rel=1e-4)


@pytest.mark.slow
def test_four_arms_and_the_seed_is_the_run(tmp_path: Path):
    out = tmp_path / "run"
    kinds = {
        f"{parameters} parameters, {critic} critic"
        for parameters in ("shared", "own")
        for critic in ("central", "own")
    }
    assert_agents_learn(out, run(out, "--quick", "--arms", script=AGENTS), kinds)
    first: Any = history(out)
    options = ("--quick", "--pieces", "ppokit", "--parameters", "own", "--critic", "own")
    again = run(out, *options, script=AGENTS)
    assert f"it is now {out}.1" in again.stdout
    second: Any = history(out)
    of_first = first["own parameters, own critic"][0]
    assert second["ppokit"][0][-1]["eval_return"] == of_first[-1]["eval_return"]


@pytest.mark.slow
def test_agents_interrupted(tmp_path: Path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(out, "--quick", "--total-frames", "3200000", script=AGENTS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    seen = ""
    while "reward=" not in seen:
        seen += (character := process.stderr.read(1))
        assert character, seen
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Interrupted" in printed
    runs: Any = history(out)
    assert list(runs) == ["ppokit"]
    assert "eval_return" in runs["ppokit"][0][-1]
    assert f"episodes after {runs['ppokit'][0][-1]['total_frames']} frames" in printed
    assert matplotlib.image.imread(out / "figure.png").std() > 0.01


@pytest.mark.slow
def test_agents_learn_as_well_as_with_torchrls_pieces(tmp_path: Path):
    result = run(tmp_path / "run", script=AGENTS)
    assert result.returncode == 0, result.stderr
    runs: Any = history(tmp_path / "run")
    returns = {name: [rows[-1]["eval_return"] for rows in each] for name, each in runs.items()}
    assert min(returns["ppokit"]) > -35  # from -57
    assert sum(returns["ppokit"]) > sum(returns["torchrl"]) - 3  # a run differs by 2 from another


# -- what all of them refuse ----------------------------------------------------------

NAMES = sorted(path.stem for path in TUTORIALS.glob("*.py"))
Play = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Play]:
    """Run a tutorial in this process, which is to refuse its options; return what it says."""
    threads = torch.get_num_threads()

    def script(name: str, out: Path | str, *options: str) -> str:
        options = ("--quick", "--out", str(out), *options)
        if name == "population":
            engine = next((x for x in ("optuna", "ray") if find_spec(x)), None)
            if engine is None:
                pytest.skip("neither extra 'ray' nor 'tune' is installed")
            options += ("--engine", engine)
        if name == "agilerl_ppo":
            options += ("--env", "CartPole-v1")  # without Box2D
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(TUTORIALS / f"{name}.py"), run_name="__main__")
        return " ".join(capsys.readouterr().err.split())

    yield script
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_others_is_refused(refused: Play, tmp_path: Path, name: str):
    (tmp_path / "mine").write_text("mine")
    said = refused(name, tmp_path)
    assert f"--out: {tmp_path} is not empty, and holds no earlier run of this script." in said
    assert [x.name for x in tmp_path.iterdir()] == ["mine"]


def test_a_refused_option_moves_nothing(refused: Play, tmp_path: Path):
    (tmp_path / "run.json").write_text('{"script": "coding_ppo"}')
    for option, value in (("--device", "nope"), ("--env", "NoSuchThing-v0")):
        assert f"{option} {value}: " in refused("coding_ppo", tmp_path, option, value)
    assert [x.name for x in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("coding_ppo", ["--resume"], "run without --resume first"),
        ("coding_ppo", ["--env", "NoSuchThing-v0"], "`NoSuchThing` doesn't exist"),
        (
            "coding_ppo",
            ["--env", "FrozenLake-v1"],
            "the observation is Discrete(16), not a vector",
        ),
        ("distributed_ppo", ["--resume"], "run without --resume first"),
        ("distributed_ppo", ["--asynchronous"], "only --collector ray"),
        ("distributed_ppo", ["--frames-per-batch", "64"], "less than 16 steps"),
    ],
)
def test_wrong_options(refused: Play, tmp_path: Path, name: str, options: list[str], message: str):
    assert message in refused(name, tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


COUNTS = {
    "coding_ppo": ["total-frames"],
    "recurrent_ppo": ["total-frames", "seq-len"],
    "custom_algorithm": ["total-frames"],
    "multi_agent_ppo": ["total-frames", "seeds"],
    "distributed_ppo": ["total-frames", "num-envs", "workers", "frames-per-batch", "timeout"],
}


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_out_of_range_are_refused(refused: Play, tmp_path: Path, name: str):
    for option in COUNTS[name]:
        for value in ("0", "-5"):
            said = refused(name, tmp_path / "run", f"--{option}", value)
            assert f"argument --{option}: {value} is not 1 or more" in said
    for value in ("-1", str(2**32)):
        said = refused(name, tmp_path / "run", "--seed", value)
        assert f"argument --seed: {value} is not from 0" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["nope", "cuda:99"])
def test_devices_that_are_not_there(refused: Play, tmp_path: Path, device: str):
    said = refused("coding_ppo", tmp_path / "run", "--device", device)
    assert f"--device {device}: " in said
    assert "--device cpu is always there" in said


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_not_installed(refused: Play, tmp_path: Path):
    said = refused("coding_ppo", tmp_path / "run", "--logger", "wandb")
    assert "--logger wandb is not installed: pip install wandb" in said


@pytest.mark.parametrize("name", ["coding_ppo", "distributed_ppo", "recurrent_ppo"])
@pytest.mark.parametrize("content", [b"", b"x" * 20])
def test_a_damaged_checkpoint_is_named(refused: Play, tmp_path: Path, name: str, content: bytes):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    said = refused(name, tmp_path, "--resume")
    assert "checkpoint.pt is damaged, or of another run: " in said
    assert (tmp_path / "checkpoint.pt").read_bytes() == content
