"""Helpers of training scripts: the folder of a run, Ctrl-C, numbers as options."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.benchmarks.assemblies.folders import begin_run, catch_interrupt, count, from_zero


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- the folder of a run ----------------------------------------------------------------


def test_earlier_runs_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "below" / "run"
    for number in range(3):
        begin_run(out, "mine")
        (out / "number").write_text(str(number))
    assert names(out.parent) == ["run", "run.1", "run.2"]
    kept = [(out.parent / name / "number").read_text() for name in names(out.parent)]
    assert kept == ["2", "0", "1"]
    assert capsys.readouterr().out.splitlines() == [
        f"{out} held an earlier run; it is now {out}.{number}." for number in (1, 2)
    ]


def test_a_resumed_run_stays_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    begin_run(out, "mine", resume=True)
    (out / "checkpoint.pt").write_text("mine")
    begin_run(out, "mine", resume=True)
    assert names(out) == ["checkpoint.pt", "run.json"]
    assert names(tmp_path) == ["run"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("marker", [None, b"", b'{"script": "another"}', b"\xff"])
def test_a_folder_that_holds_no_run_of_this_script_raises(tmp_path: Path, marker: bytes | None):
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoint.pt").write_text("of somebody")
    if marker is not None:
        (out / "run.json").write_bytes(marker)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    message = f"{out} is not empty, and holds no earlier run of this script."
    with pytest.raises(FileExistsError, match=re.escape(message)):
        begin_run(out, "mine")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert names(tmp_path) == ["run"]


def test_a_link_to_a_run_stays_and_its_target_is_renamed(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    begin_run(target, "mine")
    link.symlink_to(target)
    begin_run(link, "mine")
    assert link.is_symlink()
    assert names(tmp_path) == ["link", "target", "target.1"]


# -- Ctrl-C ---------------------------------------------------------------------------


def test_the_first_interrupt_ends_a_batch_and_the_second_one_at_once(
    capsys: pytest.CaptureFixture[str],
):
    before, batches = signal.getsignal(signal.SIGINT), []

    def train() -> None:
        with catch_interrupt() as interrupt:
            for batch in range(5):
                batches.append((batch, interrupt.pressed))
                if batch in (1, 3):
                    os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert batches == [(0, False), (1, False), (2, True), (3, True)]
    assert capsys.readouterr().out == "\nInterrupted: ending after this batch.\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("reentrant")])
def test_a_message_that_cannot_be_written_does_not_end_the_batch(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    with catch_interrupt() as interrupt:
        monkeypatch.setattr(sys, "stdout", Closed())
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.undo()
        assert interrupt.pressed


def test_another_thread_than_the_main_one_raises():
    errors: list[Exception] = []

    def train() -> None:
        try:
            with catch_interrupt():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


# -- numbers as options ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (count, "0", "0 is not 1 or more"),
        (count, "-5", "-5 is not 1 or more"),
        (count, "1.5", "invalid count value: '1.5'"),
        (from_zero, "-1", "-1 is not from 0 to 2**32 - 1"),
        (from_zero, "4294967296", "4294967296 is not from 0 to 2**32 - 1"),
        (from_zero, "x", "invalid from_zero value: 'x'"),
    ],
)
def test_numbers_out_of_range(
    kind: type, value: str, message: str, capsys: pytest.CaptureFixture[str]
):
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=kind)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--number={value}"])
    assert f"argument --number: {message}" in capsys.readouterr().err


def test_numbers_in_range():
    assert [count("1"), count("1000000")] == [1, 1_000_000]
    assert [from_zero("0"), from_zero("4294967295")] == [0, 2**32 - 1]
