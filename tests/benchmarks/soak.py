"""Two ranks that share two Ray workers for half an hour, a worker killed every 90 seconds.

It counts every frame and watches the memory of all processes. Needs the extra ``ray``, and Linux.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from ppokit.plotting import read_run
from tests.benchmarks.report import ROOT, Benchmark
from tests.benchmarks.tables import markdown, write_csv
from tests.tutorial_runs import script_of

ENV = "Pendulum-v1"
# So many frames that the run does not end, and that the learning rate still falls.
OPTIONS = ["--env", ENV, "--collector", "ray", "--frames-per-batch", "4096", "--timeout", "300"]
OPTIONS += ["--total-frames", "40000000"]
EVERY = 5.0  # seconds between two measurements of the memory
SETTLED = 300.0  # seconds after which the slope is measured
DAEMONS = "Ray's daemons"


def name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    if command and command[0].startswith("ray::"):
        return "workers" if "TaggingCollector" in command[0] else DAEMONS
    if "tests.benchmarks.soak_rank" in command and "--nproc-per-node=2" not in command:
        return f"rank {process.environ()['RANK']}"
    return "torchrun" if "torch.distributed.run" in command else DAEMONS


def processes(root: int) -> Iterator[tuple[str, psutil.Process]]:
    agent = psutil.Process(root)
    for process in [agent, *agent.children(recursive=True)]:
        try:
            yield name_of(process), process
        except psutil.Error:  # it ended meanwhile
            continue


class Soak:
    """Trains, kills workers and watches. Times in seconds from the start, memory in MiB."""

    def __init__(self, folder: Path, minutes: float, kill_every: float) -> None:
        self.started = time.time()
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.kills: list[float] = []
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
        launcher += [f"--master-port={random.randint(20_000, 30_000)}", sys.executable, "-m"]
        command = [sys.executable, *launcher, "tests.benchmarks.soak_rank", str(folder)]
        command += [str(script_of("distributed_ppo")), *OPTIONS]
        command += ["--out", str(folder / "run")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (folder / "log").open("w") as log:
            self.agent = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=ROOT
            )
            self._watch(minutes, kill_every)
            asked = time.time()
            for name, process in [*processes(self.agent.pid)] if self.agent.poll() is None else []:
                if name.startswith("rank"):
                    process.send_signal(signal.SIGINT)
            self.returncode = self.agent.wait(300)
            self.seconds_to_end = time.time() - asked

    @property
    def now(self) -> float:
        return time.time() - self.started

    def _watch(self, minutes: float, kill_every: float) -> None:
        generator = random.Random(0)
        with tqdm(total=round(60 * minutes), unit="s") as progress:
            while self.now < 60 * minutes and self.agent.poll() is None:
                time.sleep(EVERY)
                self._note_memory()
                if self.now >= kill_every * (1 + len(self.kills)):
                    found = processes(self.agent.pid)
                    if workers := [process for name, process in found if name == "workers"]:
                        generator.choice(workers).kill()
                    self.kills.append(self.now if workers else float("nan"))
                progress.update(round(self.now) - progress.n)

    def _note_memory(self) -> None:
        """Note the proportional set sizes."""
        sums: dict[str, float] = defaultdict(float)
        for name, process in processes(self.agent.pid):
            with suppress(psutil.Error):
                sums[name] += process.memory_full_info().pss / 2**20
        for name, pss in sums.items():
            self.memory[name].append((self.now, pss))


def count_frames(folder: Path) -> dict[str, int]:
    """Count frames and workers by the tags; also frames trained on twice, and missing frames.

    A frame is missing if its worker collected it before the last one that was trained on.
    """
    files = [folder / f"tags.{rank}" for rank in range(2)]
    tags = np.concatenate([np.fromfile(file, np.int64).reshape(-1, 2) for file in files])
    unique = np.unique(tags, axis=0)
    workers = np.unique(unique[:, 0])
    last = [unique[unique[:, 0] == worker, 1].max() + 1 for worker in workers]
    twice, missing = len(tags) - len(unique), int(sum(last)) - len(unique)
    return {"frames": len(tags), "workers": len(workers), "twice": twice, "missing": missing}


def memory_table(soak: Soak) -> str:
    lines = []
    for name in sorted(soak.memory):
        seconds, pss = np.array(soak.memory[name]).T
        half = np.median(pss[seconds >= seconds[-1] / 2])
        settled = seconds >= min(SETTLED, seconds[-1] / 2)
        slope = np.polyfit(seconds[settled] / 60, pss[settled], 1)[0]
        # Workers are replaced all the time: their slope means nothing.
        lines.append([name, f"{half:,.0f}", "" if name == "workers" else f"{slope:+.2f}"])
    minute = f"MiB a minute, from minute {SETTLED / 60:.0f}"
    return markdown(["process", "MiB, median of the second half", minute], lines)


def main() -> None:
    bench = Benchmark("soak", packages=("ray",))
    minutes, kill_every = (1.5, 45.0) if bench.quick else (30.0, 90.0)
    folder = Path(tempfile.mkdtemp(prefix="ppokit-soak-"))
    print(f"Log: {folder / 'log'}")
    soak = Soak(folder, minutes, kill_every)
    if soak.returncode != 0:
        raise SystemExit(f"The run ended with {soak.returncode}; see {folder / 'log'}.")
    counts = count_frames(folder)
    updates = read_run(folder / "run" / "logs")
    trained = round(sum(row["frames"] for row in updates))
    lost = (folder / "log").read_text().count("frames are lost, workers start again")
    points = [
        [name, f"{s:.0f}", f"{pss:.1f}"] for name, each in soak.memory.items() for s, pss in each
    ]
    write_csv(bench.file("csv"), ["process", "seconds", "pss_mib"], points)
    every = f"{kill_every:.0f} seconds"
    bench.write_page(f"""# A soak: {minutes:.0f} minutes, a worker killed every {every}

Two ranks of `tests/benchmarks/assemblies/distributed_ppo.py` on {ENV} (`{" ".join(OPTIONS)}`)
share one Ray collector of two workers, one of which gets SIGKILL every {every}. Each frame carries
its worker and
its number.

- {len(soak.kills)} kills; the collector was rebuilt {lost} times; frames of {counts["workers"]}
  workers were trained on. Nothing hung. After Ctrl-C all processes ended with exit code
  {soak.returncode} within {soak.seconds_to_end:.0f} seconds.
- {len(updates):,} updates on {trained:,} frames: {counts["frames"]:,} were written down, of which
  {counts["twice"]} twice. {counts["missing"]:,} frames are missing that a worker collected before
  its last batch that was trained on.

{memory_table(soak)}

The memory is the proportional set size: shared memory counts in parts. Rank 0 holds the collector.
{DAEMONS} are its raylet, agents and idle workers.
""")


if __name__ == "__main__":
    main()
