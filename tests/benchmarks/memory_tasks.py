"""LSTM, GRU, a stack of frames and a single frame, on tasks with hidden state."""

from __future__ import annotations

from tests.benchmarks.curves import Curve, Curves, Plan, mean_and_range, with_interval
from tests.benchmarks.figures import draw_bands

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
HEAD = ["", "seeds", "last evaluation, mean (95% interval)", "worst seed", "best seed"]


def cells(task: str, arm: str, curve: Curve) -> list[str]:
    style, last = ".3f" if task == CUE else ",.0f", curve[1][:, -1]
    ends = [f"{value:{style}}" for value in (last.min(), last.max())]
    return [arm, str(len(last)), with_interval(last, style), *ends]


def main() -> None:
    bench = Curves("memory_tasks", "recurrent_ppo", TASKS)
    groups = {task: dict(arms) for task, arms in bench.evaluations.items()}
    lengths = {name: groups[PENDULUM].pop(name) for name in LENGTHS}
    groups[f"{PENDULUM}, LSTM"] = {"seq_len 32": groups[PENDULUM]["LSTM"], **lengths}
    labels = ["return of 100 evaluation episodes", "", "share of right decisions"]
    title = "Mean of the seeds, and their range"
    draw_bands(bench.file("png"), groups, mean_and_range, title, labels)
    bench.write_page(f"""# Tasks with hidden state

`tests/benchmarks/assemblies/recurrent_ppo.py` with an LSTM or a GRU and `SequenceBatcher(32)` (16
for the cue), with four stacked frames, and with one frame. The last evaluation is the mean return
of 100 episodes
under the deterministic policy, in raw reward. For the cue it is the share of right decisions in 400
episodes with gaps above twice `seq_len`, so that no gradient reaches from the decision to the cue.
"Zeroed at cuts": the state is zeroed every `seq_len` steps, in training and evaluation.

![Evaluation over frames](memory_tasks.png)

{bench.sections(HEAD, cells)}""")


if __name__ == "__main__":
    main()
