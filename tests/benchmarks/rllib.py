"""RLlib's CartPole example, by RLlib and by ``tutorials/rllib_ppo.py``, to a return of 450.

``python -m tests.benchmarks.rllib`` trains three seeds of each arm to a mean return of 450 or for
1M frames, measures frames a second in three rounds, and writes ``docs/benchmarks/rllib.{csv,md,
png}``. Each run leaves its result in ``--results``; finished runs are skipped.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.benchmarks import examples
from tests.benchmarks.runs import Row
from tests.benchmarks.tables import markdown

TARGET = 450.0
SPEED_FRAMES, WARM_UP = 100_000, 12_000  # frames of a round, and of its warm-up
QUICK_FRAMES = 16_000
THEIRS: dict[str, dict[str, int]] = {
    "RLlib, its example": {"workers": 4, "envs": 16, "learners": 1},
    "RLlib in one process": {"workers": 0, "envs": 64, "learners": 0},
}
OURS = {
    "ppokit, RLlib's settings": ["--settings", "rllib"],
    "ppokit, own settings": ["--settings", "ppokit"],
}
ABOUT = {
    "RLlib, its example": "4 environment runners with 16 environments each, 1 learner",
    "RLlib in one process": "`num_env_runners=0`, `num_learners=0`, 64 environments",
    "ppokit, RLlib's settings": "the same 64 environments, networks and hyper-parameters",
    "ppokit, own settings": "16 environments, batches of 1,024 frames, 8 epochs, minibatches of "
    "256, learning rate 0.003, lambda 0.95, policy and critic with a hidden layer of 64 tanh each, "
    "critic loss not clamped, its coefficient 0.5",
}
NAMES = ["frames", "seconds", "return", "return_100", "kl", "kl_coeff"]


def train(
    arm: str, seed: int, result: Path, *, frames: int, target: float | None
) -> examples.Result:
    if arm in THEIRS:
        arguments = {**THEIRS[arm], "seed": seed, "total_frames": frames, "target": target}
        return examples.run_peer("rllib", arguments, result)
    options = [*OURS[arm], "--total-frames", str(frames), "--seed", str(seed), "--eval-every", "0"]
    options += [] if target is None else ["--target", str(target)]
    columns = {name: name for name in NAMES}
    columns |= {"frames": "total_frames", "return": "episode_return"}

    def is_done(rows: list[Row]) -> bool:
        solved = target is not None and rows[-1].get("return_100", target - 1) >= target
        return solved or rows[-1]["total_frames"] >= frames

    return examples.run_ours("rllib_ppo", options, columns, result, is_done)


def reached_at(result: examples.Result, name: str) -> dict[str, float] | None:
    """Return the first row in which a mean return has the target, or None."""
    return next((row for row in result["rows"] if (row[name] or 0.0) >= TARGET), None)


def table(runs: examples.Results, rounds: examples.Results) -> str:
    speeds = examples.speed_cells(rounds, THEIRS, WARM_UP)
    lines = []
    for arm, results in runs.items():
        failed = examples.failure(results + rounds[arm])
        if failed is not None:
            lines.append([f"{arm}: `{failed}`", *[""] * 6])
            continue
        names = ("return", "return_100")
        of_batch, of_100 = (
            examples.when(reached_at(result, name) for result in results) for name in names
        )
        if arm == "ppokit, own settings":
            of_batch = ["", ""]  # its batches are too short for a mean
        lines.append([f"{arm}: {ABOUT[arm]}", *of_batch, *of_100, *speeds[arm]])
    head = ["arm", "frames, of the iteration", "seconds", "frames, of the last 100", "seconds"]
    return markdown([*head, "frames a second", "over the faster RLlib"], lines)


def main() -> None:
    bench = examples.Example("rllib", "RLlib", __doc__, THEIRS, OURS, quick=QUICK_FRAMES)
    speed_frames = bench.frames if bench.quick else SPEED_FRAMES
    runs, rounds = bench.run_all(
        partial(train, frames=bench.frames, target=TARGET),
        partial(train, frames=speed_frames, target=None),
    )
    title = "CartPole-v1: RLlib's example until it has its target"
    label = "mean return of the last 100 episodes"
    bench.write(runs, NAMES, "return_100", TARGET, title, label)
    bench.write_page(f"""# RLlib's CartPole example, by RLlib and by its assembly from blocks

`rllib/examples/algorithms/ppo/cartpole_ppo.py` of RLlib (github.com/ray-project/ray, commit
438af5cd), transcribed without Tune (`tests/benchmarks/originals/rllib.py`), against
`tutorials/rllib_ppo.py`: CartPole-v1, {bench.seeds} seeds, arms in turn, each run until the mean
return of the last 100 episodes is {TARGET:.0f}, the example's target, or for {bench.frames:,}
frames. The example itself stops by the mean of the 8 to 20 episodes that ended in the iteration.
The table has both: the median of the seeds, and each of them. Seconds are from the first iteration
on. Frames a second are of other runs of {speed_frames:,} frames without a target, without their
first {WARM_UP:,}.
`python -m tests.benchmarks.rllib`

![Returns over frames and over seconds](rllib.png)

{table(runs, rounds)}

{bench.note}RLlib {examples.versions_of(runs)} ran in a virtual environment of its own, with as many
processes as its arm says; the assembly is one process with one thread.
""")


if __name__ == "__main__":
    main()
