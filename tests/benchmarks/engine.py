"""The tutorial's loop written out, and the same run by ``PPOUpdate`` and ``GymCollector``."""

from __future__ import annotations

from tests.benchmarks.curves import Curve, Curves, Plan, area, mean_and_interval, with_interval
from tests.benchmarks.figures import draw_bands

ARMS = {
    "loop written out": (5, []),
    "--engine: PPOUpdate, GymCollector": (5, ["--engine"]),
    "PPOUpdate, torchrl's Collector": (5, ["--engine", "torchrl"]),
}
TASKS = {"CartPole-v1": 50_000, "Pendulum-v1": 80_000, "InvertedDoublePendulum-v5": 100_000}
HEAD = ["", "mean return while learning (95% interval)", "final return (95% interval)"]


def main() -> None:
    plans = {task: Plan(frames, ["--env", task], ARMS) for task, frames in TASKS.items()}
    bench = Curves("engine", "coding_ppo", plans)
    title, label = "Mean of the seeds, and its 95% interval", "evaluation return (raw reward)"
    draw_bands(bench.file("png"), bench.evaluations, mean_and_interval, title, [label])

    def cells(task: str, arm: str, curve: Curve) -> list[str]:
        return [arm, with_interval(area(curve)), with_interval(curve[1][:, -1])]

    bench.write_page(f"""# Learning with `PPOUpdate` and with a loop written out

`tests/benchmarks/assemblies/coding_ppo.py` with its loop written out, with `--engine`, and with
`--engine torchrl`: five seeds of each, the mean return of five episodes under the deterministic
policy every second batch, in raw reward. The runs differ in the order of their minibatches and in
rounding, so single curves differ; the comparison is of their means.

![Evaluation return over frames](engine.png)

{bench.sections(HEAD, cells)}""")


if __name__ == "__main__":
    main()
