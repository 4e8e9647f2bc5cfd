"""What a memory is worth: LSTM, GRU, a stack of frames and nothing, on tasks that hide something.

``python -m tests.benchmarks.memory_tasks`` trains all seeds of all arms with
``tutorials/recurrent_ppo.py`` and writes ``docs/benchmarks/memory_tasks.{csv,md,png}``. Each run
leaves its history in ``--results``; runs that are there already are skipped, so an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np

from tests.benchmarks.curves import Curves, Run, bootstrap, returns_of, train_all, write_csv
from tests.benchmarks.report import ROOT, machine, output_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Arms = Mapping[str, tuple[int, list[str]]]  # name -> seeds, options
Found = dict[str, tuple[np.ndarray, Curves]]  # task -> frames, and what the arms reached

MEMORIES: Arms = {
    "LSTM": (5, []),
    "GRU": (3, ["--memory", "gru"]),
    "stack of 4": (3, ["--memory", "stack"]),
    "no memory": (3, ["--memory", "none"]),
}
LENGTHS: Arms = {f"seq_len {n}": (3, ["--seq-len", str(n)]) for n in (8, 16, 64)}
TASKS: dict[str, tuple[str, int, Arms]] = {
    "Pendulum-v1 without velocity": ("pendulum", 98_304, {**MEMORIES, **LENGTHS}),
    "CartPole-v1 without velocities": ("cartpole", 198_656, MEMORIES),
    "cue, gap, decision": (
        "cue",
        196_608,
        {**MEMORIES, "LSTM, zeroed at cuts": (3, ["--forget"])},
    ),
}


def runs_of(task: str, results: Path, quick: bool) -> dict[str, list[Run]]:
    """Return the runs of each arm on a task."""
    name, frames, arms = TASKS[task]
    more, frames = (["--quick"], 8_192 if name == "cue" else 4_096) if quick else ([], frames)
    return {
        arm: [
            Run(
                results / f"{name}-{arm.replace(' ', '-').replace(',', '')}-{seed}",
                frames,
                ["--task", name, *options, "--seed", str(seed), *more],
                "recurrent_ppo",
            )
            for seed in range(1 if quick else seeds)
        ]
        for arm, (seeds, options) in arms.items()
    }


def table(task: str, frames: np.ndarray, curves: Curves) -> str:
    """Return the last evaluations of a task as a Markdown table."""
    lines = [
        f"## {task}, {frames[-1]:,.0f} frames\n",
        "| | seeds | last evaluation, mean (95% interval) | worst seed | best seed |",
        "|---|---:|---:|---:|---:|",
    ]
    digits = ".3f" if task.startswith("cue") else ",.0f"
    for arm, returns in curves.items():
        last = returns[:, -1]
        low, high = bootstrap(last)
        shown = " | ".join(f"{value:{digits}}" for value in (last.min(), last.max()))
        interval = f"{last.mean():{digits}} ({low:{digits}} to {high:{digits}})"
        lines.append(f"| {arm} | {len(last)} | {interval} | {shown} |")
    return "\n".join(lines)


def draw(found: Found, path: Path) -> None:
    """Mean over the seeds, and the range of them, a panel for each task and one for lengths."""
    panels = {task: [arm for arm in TASKS[task][2] if arm not in LENGTHS] for task in found}
    first = next(iter(found))
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(19, 4.4), layout="constrained")
    shown = [*panels.items(), (first, ["LSTM", *LENGTHS])]
    for axis, (task, arms) in zip(axes, shown, strict=True):
        frames, curves = found[task]
        for arm in arms:
            returns = curves[arm]
            lengths = "seq_len 32" if len(arms) > 3 and arm == "LSTM" and axis is axes[-1] else arm
            (line,) = axis.plot(frames / 1_000, returns.mean(0), label=lengths)
            span = returns.min(0), returns.max(0)
            axis.fill_between(frames / 1_000, *span, color=line.get_color(), alpha=0.15)
        axis.set(title=task if axis is not axes[-1] else f"{task}, LSTM")
        axis.set_xlabel("thousand frames (environment steps)")
        axis.grid(alpha=0.3)
        axis.legend(loc="best", fontsize="small")
    axes[0].set_ylabel("return of 100 evaluation episodes")
    axes[len(panels) - 1].set_ylabel("share of right decisions, gaps above 2 seq_len")
    figure.suptitle("Mean of the seeds, and their range")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = ROOT / "outputs" / "benchmarks" / "memory_tasks"
    parser.add_argument("--results", type=Path, default=default)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)))
    parser.add_argument("--out", type=Path, help="folder to write to, instead of the docs")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = args.out or output_folder(args.quick)
    if args.quick:
        args.results = folder / "runs"
    args.results.mkdir(parents=True, exist_ok=True)
    if not (started := args.results / "machine.txt").exists():
        started.write_text(machine())  # what the runs ran on, not what is there when they are read

    runs = {task: runs_of(task, args.results, args.quick) for task in TASKS}
    each = [run for arms in runs.values() for of_arm in arms.values() for run in of_arm]
    train_all(sorted(each, key=lambda run: run.out.name.rsplit("-", 1)[1]), args.jobs)
    found: Found = {}
    for task, arms in runs.items():
        curves = {arm: returns_of(of_arm) for arm, of_arm in arms.items()}
        frames = next(iter(curves.values()))[0]
        found[task] = frames, {arm: returns for arm, (_, returns) in curves.items()}
    write_csv(found, folder / "memory_tasks.csv")
    draw(found, folder / "memory_tasks.png")
    tables = "\n\n".join(table(task, *of_task) for task, of_task in found.items())
    text = f"""# What a memory is worth

`tutorials/recurrent_ppo.py` on tasks that hide what has to be remembered: an LSTM or a GRU with
`SequenceBatcher(32)` (16 for the cue), four frames at once, and one frame alone. The last
evaluation is the mean return of 100 episodes under the deterministic policy, in the environment's
own reward; of the cue, the share of right decisions in 400 episodes whose gaps are all above twice
`seq_len`, where no gradient reaches from the decision to the cue. "Zeroed at cuts": the state is
zeroed every `seq_len` steps, in training and evaluation.
`python -m tests.benchmarks.memory_tasks`

![Evaluation over frames](memory_tasks.png)

{tables}

{started.read_text()}
"""
    (folder / "memory_tasks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
