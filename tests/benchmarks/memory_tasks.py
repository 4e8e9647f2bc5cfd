"""LSTM, GRU, a stack of frames and a single frame, on tasks with hidden state.

``python -m tests.benchmarks.memory_tasks`` trains all seeds of all arms with
``tutorials/recurrent_ppo.py`` and writes ``docs/benchmarks/memory_tasks.{csv,md,png}``. Each run
leaves its history in ``--results``; finished runs are skipped.
"""

from __future__ import annotations

import numpy as np

from tests.benchmarks.curves import (
    JOBS,
    Curves,
    Plan,
    evaluations,
    train,
    with_interval,
    write_curves,
)
from tests.benchmarks.figures import draw_band, panels
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import markdown

MEMORIES: dict[str, tuple[int, list[str]]] = {
    "LSTM": (5, []),
    "GRU": (3, ["--memory", "gru"]),
    "stack of 4": (3, ["--memory", "stack"]),
    "no memory": (3, ["--memory", "none"]),
}
LENGTHS = {f"seq_len {n}": (3, ["--seq-len", str(n)]) for n in (8, 16, 64)}
FORGET = {"LSTM, zeroed at cuts": (3, ["--forget"])}
PENDULUM, CUE = "Pendulum-v1 without velocity", "cue, gap, decision"
TASKS = {
    PENDULUM: Plan(98_304, ["--task", "pendulum"], {**MEMORIES, **LENGTHS}, 4_096),
    "CartPole-v1 without velocities": Plan(198_656, ["--task", "cartpole"], MEMORIES, 4_096),
    CUE: Plan(196_608, ["--task", "cue"], {**MEMORIES, **FORGET}, 8_192),
}


def section(task: str, frames: np.ndarray, curves: Curves) -> str:
    style = ".3f" if task == CUE else ",.0f"
    lines = []
    for arm, returns in curves.items():
        last = returns[:, -1]
        ends = [f"{value:{style}}" for value in (last.min(), last.max())]
        lines.append([arm, str(len(last)), with_interval(last, style), *ends])
    head = ["", "seeds", "last evaluation, mean (95% interval)", "worst seed", "best seed"]
    return f"## {task}, {frames[-1]:,.0f} frames\n\n{markdown(head, lines)}"


def draw(bench: Benchmark, found: dict[str, tuple[np.ndarray, Curves]]) -> None:
    """Draw mean and range of the seeds, a panel for each task and one for sequence lengths."""
    shown = {task: [arm for arm in TASKS[task].arms if arm not in LENGTHS] for task in found}
    contents = [(task, task, arms) for task, arms in shown.items()]
    contents.append((f"{PENDULUM}, LSTM", PENDULUM, ["LSTM", *LENGTHS]))
    title = "Mean of the seeds, and their range"
    with panels(bench.file("png"), len(contents), (19, 4.4), title) as axes:
        for axis, (heading, task, arms) in zip(axes, contents, strict=True):
            frames, curves = found[task]
            for arm in arms:
                label = "seq_len 32" if arm == "LSTM" and heading != task else arm
                returns = curves[arm]
                span = returns.min(0), returns.max(0)
                draw_band(axis, frames / 1_000, returns.mean(0), span, label)
            axis.set(title=heading, xlabel="thousand frames (environment steps)")
            axis.legend(loc="best", fontsize="small")
        axes[0].set_ylabel("return of 100 evaluation episodes")
        axes[2].set_ylabel("share of right decisions, gaps above 2 seq_len")


def main() -> None:
    bench = Benchmark("memory_tasks", __doc__, keeps_results=True, jobs=JOBS)
    trained = train(bench, "recurrent_ppo", TASKS)
    found = {task: evaluations(histories) for task, histories in trained.items()}
    write_curves(bench.file("csv"), found)
    draw(bench, found)
    sections = "\n\n".join(section(task, *of_task) for task, of_task in found.items())
    bench.write_page(f"""# Tasks with hidden state

`tutorials/recurrent_ppo.py` with an LSTM or a GRU and `SequenceBatcher(32)` (16 for the cue), with
four stacked frames, and with one frame. The last evaluation is the mean return of 100 episodes
under the deterministic policy, in raw reward. For the cue it is the share of right decisions in 400
episodes with gaps above twice `seq_len`, so that no gradient reaches from the decision to the cue.
"Zeroed at cuts": the state is zeroed every `seq_len` steps, in training and evaluation.
`python -m tests.benchmarks.memory_tasks`

![Evaluation over frames](memory_tasks.png)

{sections}
""")


if __name__ == "__main__":
    main()
