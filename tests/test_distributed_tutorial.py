"""``tests/benchmarks/assemblies/distributed_ppo.py``: one process, ranks, a Ray cluster."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ppokit.plotting import read_run
from tests.tutorial_runs import assert_figure, assert_finite, command, play, run

NAME = "distributed_ppo"
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="extra 'ray' is not installed")
PORTS = itertools.count(23_000 + os.getpid() % 4_000)


def torchrun(out: Path, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launcher += [f"--master-port={next(PORTS)}", *command(NAME, out, *options)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(launcher, capture_output=True, text=True, env=environment, check=False)


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
    assert_healthy(out, torchrun(out, "--quick", "--ragged"), 4_352)  # 2 x 128 x (8 + 9)
    rows = read_run(out / "logs")
    assert rows[-1]["lr"] < rows[0]["lr"]  # schedules count the frames of all ranks
    names = play(NAME, tmp_path / "alone")
    assert names["policy"].policy_version == 2
    assert read_run(tmp_path / "alone" / "logs")[-1]["total_frames"] == 4_096


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--memory", "--ragged"], ["--memory", "--env", "Pendulum-v1"]]
)
def test_other_kinds(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    frames = 4_352 if "--ragged" in options else 4_096
    assert_healthy(out, torchrun(out, "--quick", *options), frames)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--asynchronous"], ["--memory"]])
def test_ray(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    result = run(NAME, out, "--quick", "--collector", "ray", *options)
    assert_healthy(out, result, 4_096)
    if "--asynchronous" in options:
        assert max(row["policy_lag"] for row in read_run(out / "logs")) >= 1
