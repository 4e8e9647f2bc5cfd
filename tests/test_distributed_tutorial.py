"""``tutorials/distributed_ppo.py``: one process, ranks, a Ray cluster; killed ranks and workers."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

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


def start_ranks(out: Path, *options: str, ranks: int = 2) -> list[subprocess.Popen[str]]:
    """Start ranks without torchrun, which would end all of them where one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            command(NAME, out, *options),
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def wait_for(condition: Callable[[], Any], processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_healthy(out: Path, result: subprocess.CompletedProcess[str], frames: int) -> None:
    assert result.returncode == 0, result.stderr
    assert f"Return of 5 episodes after {frames} frames" in result.stdout
    assert "Traceback" not in result.stderr
    rows = read_run(out / "logs")
    assert rows[-1]["total_frames"] == frames
    assert_finite(rows)
    assert_figure(out)
    assert len(list(out.glob("logs/**/kl.csv"))) == 1


def test_a_run_on_two_ranks_resumes_on_one(tmp_path: Path):
    out = tmp_path / "run"
    assert_healthy(out, torchrun(out, "--quick", "--ragged"), 4_352)  # 2 x 128 x (8 + 9)
    state = torch.load(out / "checkpoint.pt")["update"]["loss"]
    assert int(state["actor_network.policy_version"]) == 2
    rows = read_run(out / "logs")
    assert rows[-1]["lr"] < rows[0]["lr"]  # schedules count the frames of all ranks
    play(NAME, out, "--resume", "--total-frames", "8448")
    assert read_run(out / "logs")[-1]["total_frames"] == 8_448
    assert read_run(out / "logs")[:2] == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--memory", "--ragged"],
        ["--memory", "--env", "Pendulum-v1"],
        ["--accumulate", "--memory"],
    ],
)
def test_other_kinds(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    frames = 4_352 if "--ragged" in options else 4_096
    assert_healthy(out, torchrun(out, "--quick", *options), frames)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path):
    out = tmp_path / "run"
    ranks = start_ranks(out, "--total-frames", "10000000", "--timeout", "30")
    wait_for((out / "checkpoint.pt").exists, ranks)
    ranks[1].kill()
    text, _ = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode not in (0, None)
    assert "Error" in text
    ranks[1].communicate()
    saved = torch.load(out / "checkpoint.pt")  # the last whole one
    assert saved["frames"] >= 20_480


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--asynchronous"], ["--memory"]])
def test_ray(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    result = run(NAME, out, "--quick", "--collector", "ray", *options)
    assert_healthy(out, result, 4_096)
    if "--asynchronous" in options:
        assert max(row["policy_lag"] for row in read_run(out / "logs")) >= 1
