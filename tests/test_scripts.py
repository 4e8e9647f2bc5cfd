"""What scripts need around their loop: nothing is lost, whatever is pressed or in the way."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ppokit.scripts import begin_run, catch_interrupt, count, from_zero


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- the folder of a run --------------------------------------------------------------


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


def test_a_resumed_run_stays_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    begin_run(tmp_path / "run", "mine")
    (tmp_path / "run" / "history.json").write_text("[]")
    begin_run(tmp_path / "run", "mine", resume=True)
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["history.json", "run.json"]
    begin_run(tmp_path / "new", "mine", resume=True)
    assert names(tmp_path / "new") == ["run.json"]
    assert not capsys.readouterr().out


def test_an_empty_folder_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    begin_run(tmp_path, "mine")
    assert names(tmp_path) == ["run.json"]
    assert not capsys.readouterr().out


def test_another_run_is_not_resumed(tmp_path: Path):
    begin_run(tmp_path, "another")
    with pytest.raises(FileExistsError, match="holds no earlier run of this script"):
        begin_run(tmp_path, "mine", resume=True)
    assert (tmp_path / "run.json").read_text() == '{"script": "another"}'


def test_a_marker_is_left_as_it_is_and_written_where_there_is_none(tmp_path: Path):
    marker = tmp_path / "run.json"
    marker.write_text('{"script": "mine", "seed": 3}')
    begin_run(tmp_path, "mine", resume=True)
    assert marker.read_text() == '{"script": "mine", "seed": 3}'
    marker.unlink()
    (tmp_path / "checkpoint.pt").write_text("mine")
    begin_run(tmp_path, "mine", resume=True)
    assert marker.read_text() == '{"script": "mine"}'


def test_what_a_marker_links_to_is_not_written(tmp_path: Path):
    precious, out = tmp_path / "precious", tmp_path / "run"
    out.mkdir()
    (out / "run.json").symlink_to(precious)
    for text in (None, "mine"):
        if text is not None:
            precious.write_text(text)
        for resume in (False, True):
            with pytest.raises(FileExistsError):
                begin_run(out, "mine", resume=resume)
        assert precious.exists() == (text is not None)
    assert precious.read_text() == "mine"


def test_the_marker_is_whole_or_not_there(tmp_path: Path):
    """On a full disk: a limit of 0 bytes for the files of a process."""
    code = (
        "import resource, signal; from ppokit.scripts import begin_run\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"begin_run({str(tmp_path)!r}, 'mine')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "File too large" in result.stderr
    assert names(tmp_path) == []


def test_a_name_that_leads_nowhere_is_not_free(tmp_path: Path):
    begin_run(tmp_path / "run", "mine")
    (tmp_path / "run.1").symlink_to(tmp_path / "nowhere")
    begin_run(tmp_path / "run", "mine")
    assert names(tmp_path) == ["run", "run.1", "run.2"]
    assert names(tmp_path / "run.2") == ["run.json"]


@pytest.mark.parametrize(
    "marker",
    [
        None,
        b"",
        b"mine",
        b"[]",
        b'{"name": "mine"}',
        b'{"script": "another"}',
        b"\xff",
        b"3",
        b"[" * 200_000,
    ],
)
def test_what_is_no_run_of_this_script_is_refused(tmp_path: Path, marker: bytes | None):
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


def test_folders_that_cannot_be_made_or_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OSError, match=r"Not a directory.*file"):
        begin_run(file, "mine")
    with pytest.raises(OSError, match=r"Not a directory.*below"):
        begin_run(file / "below", "mine")
    assert file.read_text() == "mine"
    inner = tmp_path / "run" / "inner"
    begin_run(inner, "mine")
    begin_run(tmp_path / "run", "mine", resume=True)
    for current in (tmp_path / "run", inner):
        monkeypatch.chdir(current)
        with pytest.raises(OSError, match=f"the current folder {tmp_path}/run cannot be renamed"):
            begin_run(tmp_path / "run", "mine")
    assert names(tmp_path) == ["file", "run"]


def test_a_marker_that_is_no_file(tmp_path: Path):
    for number, make in enumerate((Path.mkdir, os.mkfifo)):
        out = tmp_path / str(number)
        out.mkdir()
        make(out / "run.json")
        with pytest.raises(FileExistsError, match="holds no earlier run of this script"):
            begin_run(out, "mine")


def test_links_in_a_circle(tmp_path: Path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=f"{tmp_path}/a"):
        begin_run(tmp_path / "a", "mine")


def test_a_link_stays_and_its_target_is_renamed(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    begin_run(target, "mine")
    link.symlink_to(target)
    (target / "old").write_text("old")
    begin_run(link, "mine")
    assert link.is_symlink()
    assert names(target) == ["run.json"]
    assert names(tmp_path / "target.1") == ["old", "run.json"]


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


def test_after_the_loop_ctrl_c_does_what_it_did(capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGINT)
    with catch_interrupt(None) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.pressed
    assert signal.getsignal(signal.SIGINT) is before
    with catch_interrupt() as again:
        assert not again.pressed
    assert not capsys.readouterr().out


def test_interrupts_that_interrupt_each_other():
    """A second one at every line of the first one's handler: nothing waits for ever."""
    for line in range(1, 10):
        lines = 0

        def trace(frame: Any, event: str, _: Any, line: int = line) -> Any:
            nonlocal lines
            lines += event == "line"
            if lines == line and event == "line":
                os.kill(os.getpid(), signal.SIGINT)
            return trace

        with suppress(KeyboardInterrupt), catch_interrupt(None) as interrupt:
            sys.settrace(trace)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                sys.settrace(None)
            assert interrupt.pressed


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


def test_another_thread_than_the_main_one_is_refused():
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


# -- options --------------------------------------------------------------------------


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
