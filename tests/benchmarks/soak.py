"""Half an hour of two ranks that share two Ray workers, one of which is killed every 90 seconds.

``python -m tests.benchmarks.soak`` trains with ``tutorials/distributed_ppo.py`` as it stands,
counts every frame, watches the memory of all processes, and writes ``docs/benchmarks/soak.{csv,md,
png}``. It needs the extra ``ray``, and Linux.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import psutil
from tqdm import tqdm

from tests.benchmarks.report import ROOT, machine, output_folder
from tests.benchmarks.tables import markdown, versions

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ENV = "Pendulum-v1"
# So many frames that there is no end, and so few that the learning rate falls on the way.
OPTIONS = ["--env", ENV, "--collector", "ray", "--frames-per-batch", "4096", "--timeout", "300"]
OPTIONS += ["--total-frames", "40000000"]
EVERY = 5.0  # seconds between two looks at the memory
SETTLED = 300.0  # seconds after which the slope is measured
DAEMONS, STORE = "Ray's daemons", "shared memory"


@dataclass
class Soak:
    """What was seen. Times in seconds from the start, memory in MiB."""

    started: float = field(default_factory=time.time)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    kills: list[float] = field(default_factory=list)
    returncode: int | None = None
    seconds_to_end: float = float("nan")

    @property
    def now(self) -> float:
        """Seconds from the start."""
        return time.time() - self.started

    def slope(self, name: str) -> float:
        """Return MiB a minute, by least squares after the first minutes."""
        points = np.array(self.memory[name])
        points = points[points[:, 0] >= min(SETTLED, points[-1, 0] / 2)]
        return float(np.polyfit(points[:, 0] / 60, points[:, 1], 1)[0])


def name_of(process: psutil.Process) -> str:
    """Return what the process is in the soak."""
    command = process.cmdline()
    if command and command[0].startswith("ray::"):
        return "workers" if "TaggingCollector" in command[0] else DAEMONS
    if "tests.benchmarks.soak_rank" in command and "--nproc-per-node=2" not in command:
        return f"rank {process.environ()['RANK']}"
    return "torchrun" if "torch.distributed.run" in command else DAEMONS


def processes(root: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield all that the run consists of now."""
    agent = psutil.Process(root)
    for process in [agent, *agent.children(recursive=True)]:
        try:
            yield name_of(process), process
        except psutil.Error:  # it ended meanwhile
            continue


def look(soak: Soak, root: int) -> None:
    """Note the proportional set sizes; of all processes together what is in shared memory."""
    sums: dict[str, float] = defaultdict(float)
    for name, process in processes(root):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except (OSError, psutil.Error):
            continue
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        shared = kib.get("Pss_Shmem", 0)
        sums[name] += (kib.get("Pss", 0) - shared) / 1024
        sums[STORE] += shared / 1024
    for name, pss in sums.items():
        soak.memory[name].append((soak.now, pss))


def run(folder: Path, minutes: float, kill_every: float) -> Soak:
    """Train, kill and watch."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    launcher += [f"--master-port={random.randint(20_000, 30_000)}", sys.executable, "-m"]
    script = str(ROOT / "tutorials" / "distributed_ppo.py")
    command = [*launcher, "tests.benchmarks.soak_rank", str(folder), script, *OPTIONS]
    command += ["--out", str(folder / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    soak, generator = Soak(), random.Random(0)
    with (folder / "log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        progress = tqdm(total=round(60 * minutes), unit="s")
        while soak.now < 60 * minutes and agent.poll() is None:
            time.sleep(EVERY)
            look(soak, agent.pid)
            if soak.now >= kill_every * (1 + len(soak.kills)):
                workers = [process for name, process in processes(agent.pid) if name == "workers"]
                if workers:
                    generator.choice(workers).kill()
                soak.kills.append(soak.now if workers else float("nan"))
            progress.update(round(soak.now) - progress.n)
        progress.close()
        asked = time.time()
        for name, process in [*processes(agent.pid)] if agent.poll() is None else []:
            if name.startswith("rank"):
                process.send_signal(signal.SIGINT)
        soak.returncode = agent.wait(300)
        soak.seconds_to_end = time.time() - asked
    return soak


@dataclass(frozen=True)
class Count:
    """The frames of all updates, by the tags that their worker gave them."""

    frames: int
    workers: int
    twice: int
    missing: int  # of a worker's frames, before the last one that was trained on

    @classmethod
    def of(cls, folder: Path) -> Count:
        """Read what the ranks wrote down."""
        files = [folder / f"tags.{rank}" for rank in range(2)]
        tags = np.concatenate([np.fromfile(file, np.int64).reshape(-1, 2) for file in files])
        unique = np.unique(tags, axis=0)
        workers = np.unique(unique[:, 0])
        last = [unique[unique[:, 0] == worker, 1].max() + 1 for worker in workers]
        return cls(len(tags), len(workers), len(tags) - len(unique), sum(last) - len(unique))


def read_updates(folder: Path) -> list[dict[str, float]]:
    """Return what the first rank's updates reported."""
    return [json.loads(line) for line in (folder / "updates.0").read_text().splitlines()]


def draw(path: Path, soak: Soak, updates: list[dict[str, float]]) -> None:
    """Draw memory, frames and return over time, with the kills."""
    figure, axes = plt.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    for name, points in soak.memory.items():
        seconds, pss = np.array(points).T
        axes[0].plot(seconds / 60, pss, label=name, ls="--" if name in (DAEMONS, STORE) else "-")
    axes[0].set(title="memory", ylabel="proportional set size (MiB)")
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1.1), ncols=6, fontsize=8)
    minutes = (np.array([row["time"] for row in updates]) - soak.started) / 60
    frames = np.cumsum([row["frames"] for row in updates])
    axes[1].plot(minutes, frames / 1e6)
    axes[1].set(title="frames trained on", ylabel="millions")
    rewards = [(m, row["episode_return"]) for m, row in zip(minutes, updates, strict=True)
               if row["episodes"]]  # fmt: skip
    axes[2].plot(*zip(*rewards, strict=True), lw=0.8)
    axes[2].set(title=f"return of the episodes of a batch, {ENV}", ylabel="return")
    axes[2].set_xlabel("minutes; a worker is killed at each grey line")
    for axis in axes:
        axis.grid(alpha=0.3)
        for kill in soak.kills:
            axis.axvline(kill / 60, color="grey", lw=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_csv(path: Path, soak: Soak) -> None:
    """Write the memory of each kind of process."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["process", "seconds", "pss_mib"])
        for name, points in soak.memory.items():
            writer.writerows([name, f"{s:.0f}", f"{pss:.1f}"] for s, pss in points)


def mean_return(updates: list[dict[str, float]]) -> float:
    """Return the mean over updates in which episodes ended."""
    return float(np.mean([row["episode_return"] for row in updates if row["episodes"]]))


def table(soak: Soak) -> str:
    """Return the memory of each kind of process at the end, and how it grew."""
    lines = []
    for name in sorted(soak.memory):
        points = np.array(soak.memory[name])
        half = points[points[:, 0] >= points[-1, 0] / 2, 1]
        grew = "" if name == "workers" else f"{soak.slope(name):+.2f}"  # they are new all the time
        lines.append([name, f"{np.median(half):,.0f}", grew])
    minute = f"MiB a minute, from minute {SETTLED / 60:.0f}"
    return markdown(["process", "MiB, median of the second half", minute], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    minutes, kill_every = (1.5, 45.0) if args.quick else (args.minutes, 90.0)
    output = output_folder(args.quick)
    folder = Path(tempfile.mkdtemp(prefix="ppokit-soak-"))
    print(f"Log: {folder / 'log'}")
    soak = run(folder, minutes, kill_every)
    if soak.returncode != 0 or not (folder / "updates.0").exists():
        raise SystemExit(f"The run ended with {soak.returncode}; see {folder / 'log'}.")
    count, updates = Count.of(folder), read_updates(folder)
    trained = round(sum(row["frames"] for row in updates))
    lost = (folder / "log").read_text().count("frames are lost, workers start anew")
    tenth = max(1, len(updates) // 10)
    write_csv(output / "soak.csv", soak)
    draw(output / "soak.png", soak, updates)
    text = f"""# A soak: {minutes:.0f} minutes, a worker killed every {kill_every:.0f} seconds

Two ranks of `tutorials/distributed_ppo.py` on {ENV} (`{" ".join(OPTIONS)}`) share one Ray
collector of two workers, one of which gets SIGKILL every {kill_every:.0f} seconds. Each frame
carries the worker that collected it and its number there, and each rank writes down what it trained
on. `python -m tests.benchmarks.soak`

![Memory, frames and return over time](soak.png)

- {len(soak.kills)} kills; {lost} times the collector was built anew; frames of {count.workers}
  workers were trained on. Nothing hung; asked to end by Ctrl-C, all ended with exit code
  {soak.returncode} within {soak.seconds_to_end:.0f} seconds.
- {len(updates):,} updates on {trained:,} frames: {count.frames:,} were written down, of which
  {count.twice} twice. Of what a worker collected before the last of its batches that was trained
  on, {count.missing:,} frames are missing.
- Return of training episodes: {mean_return(updates[:tenth]):.0f} in the first tenth of the updates,
  {mean_return(updates[-tenth:]):.0f} in the last.

{table(soak)}

Rank 0 holds the collector. {DAEMONS} are its raylet, agents and idle workers. Shared memory is
counted apart: that of Ray's object store, which holds the batches, is mapped by all of them.

{versions("ray")}

{machine()}
"""
    (output / "soak.md").write_text(text)
    print(f"{output / 'soak.md'}\n\n{text}")


if __name__ == "__main__":
    main()
