"""Runs in processes of their own, and the JSON files of their results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.benchmarks.report import ROOT
from tests.tutorial_runs import script_of

Row = dict[str, Any]


def kept(file: Path, make: Callable[[], Any]) -> Any:
    """Return the result in the JSON file; without the file, make the result and write it."""
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(make()))
        part.replace(file)
    return json.loads(file.read_text())


def file_name(*words: object) -> str:
    """Return the name of the JSON file of a run."""
    return "-".join(re.sub("[^a-z0-9]+", "-", str(word).lower()) for word in words) + ".json"


def run_python(
    arguments: Sequence[object], python: str | Path = sys.executable, **environment: str
) -> str:
    """Run Python on one thread with the arguments, and return its output.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RL_LOGGING_LEVEL": "WARNING"}
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | settings | environment, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def run_function(function: str, arguments: Mapping[str, Any], **environment: str) -> Any:
    """Return what ``"module.function"`` of this folder returns in a new process, as JSON."""
    module, name = function.split(".")
    code = f"from tests.benchmarks.{module} import {name}; import json, sys"
    code += f"; print(json.dumps({name}(**json.loads(sys.argv[1]))))"
    printed = run_python(["-c", code, json.dumps(arguments)], **environment)
    return json.loads(printed.splitlines()[-1])


CORES = os.cpu_count() or 1


def run_all(jobs: Sequence[Callable[[], Any]], at_once: int = 1) -> list[Any]:
    """Run the jobs in their order behind a progress bar, and return their results."""
    with ThreadPoolExecutor(at_once) as pool, tqdm(total=len(jobs), unit="run") as bar:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def run_jobs(
    function: str, jobs: Sequence[Row], results: Path | None, at_once: int = 1, **environment: str
) -> list[Row]:
    """Return each job, the arguments of ``"module.function"``, with what the function returns.

    Every job has a new process. With a folder of results, it has a JSON file there, and is not run
    again.
    """

    def run(job: Row) -> Row:
        make = partial(run_function, function, job, **environment)
        return job | (kept(results / file_name(*job.values()), make) if results else make())

    return run_all([partial(run, job) for job in jobs], at_once)


def run_script(
    name: str, options: Sequence[object], out: Path, launcher: Sequence[str] = ()
) -> list[Row]:
    """Run the script ``name``, unless a finished run is in ``out``; return its history.

    Raises:
        RuntimeError: it failed, or was interrupted, which is no error of the script.
    """
    file, interrupted = out / "history.json", out / "interrupted"
    if not file.exists() or interrupted.exists():
        shutil.rmtree(out, ignore_errors=True)
        run_python([*launcher, script_of(name), *options, "--out", out])
        if interrupted.exists():
            raise RuntimeError(f"{name}.py was interrupted; its partial results are in {out}.")
    return json.loads(file.read_text())
