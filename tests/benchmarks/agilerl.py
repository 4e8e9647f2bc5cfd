"""AgileRL's LunarLander, by AgileRL and by ``tutorials/agilerl_ppo.py``, to a score of 250.

``python -m tests.benchmarks.agilerl`` trains three seeds of each arm to its target, a mean score of
250 over ten evaluations, or for 1M frames, measures frames a second in three rounds, and writes
``docs/benchmarks/agilerl.{csv,md,png}``. Each run leaves its result in ``--results``; finished
runs are skipped.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.benchmarks import examples
from tests.benchmarks.runs import Row
from tests.benchmarks.tables import markdown

TARGET, EVALUATIONS = 250.0, 10
EVALUATE_EVERY = 10_240  # frames; also the warm-up of a speed round
SPEED_FRAMES = 8 * EVALUATE_EVERY
STILL = 1e-12  # learning rate of a round of the speed
QUICK_FRAMES = 2 * EVALUATE_EVERY
THEIRS = {"AgileRL, its example": {"sync": False}, "AgileRL in one process": {"sync": True}}
OURS = {
    "ppokit, AgileRL's settings": ["--settings", "agilerl"],
    "ppokit, own settings": ["--settings", "own"],
}
ABOUT = {
    "AgileRL, its example": "16 environments, a process each",
    "AgileRL in one process": "`sync: true`",
    "ppokit, AgileRL's settings": "the same environments, networks and hyper-parameters",
    "ppokit, own settings": "4,096 frames a batch, 8 epochs, minibatches of 256, rewards scaled, "
    "gamma 0.999, an encoder each without layer norm, learning rate 0.001 to 0.0002 and entropy "
    "0.01 to 0 over 300,000 frames, target KL 0.03",
}
NAMES = ["frames", "seconds", "score"]


def with_means(rows: list[Row]) -> list[Row]:
    recent: list[float] = []
    for row in rows:
        if row.get("score") is not None:
            recent = [*recent, row["score"]][-EVALUATIONS:]
            row["score_10"] = sum(recent) / EVALUATIONS if len(recent) == EVALUATIONS else None
    return rows


def train(
    arm: str, seed: int, result: Path, *, frames: int, target: float | None
) -> examples.Result:
    """Run an arm, unless its result is kept; return it, with the means of ten evaluations.

    Without a target the learning rate is tiny, so that all arms keep their initial policy.
    """
    if arm in THEIRS:
        arguments = {**THEIRS[arm], "seed": seed, "total_frames": frames, "target": target}
        arguments["lr"] = STILL if target is None else 1e-3
        found = examples.run_peer("agilerl", arguments, result)
    else:
        options = [*OURS[arm], "--env", "LunarLander-v3", "--seed", str(seed)]
        options += ["--total-frames", str(frames)]
        options += ["--lr", str(STILL)] if target is None else ["--target-score", str(target)]

        def is_done(rows: list[Row]) -> bool:
            mean = last_mean({"rows": with_means(rows)})
            solved = target is not None and mean is not None and mean > target
            return solved or rows[-1]["total_frames"] >= frames

        columns = dict(zip(NAMES, ["total_frames", *NAMES[1:]], strict=True))
        found = examples.run_ours("agilerl_ppo", options, columns, result, is_done)
    return found | {"rows": with_means(found["rows"])}


def reached_at(result: examples.Result) -> dict[str, float] | None:
    """Return the first row in which the mean of ten evaluations exceeds the target, or None."""
    return next((row for row in result["rows"] if (row.get("score_10") or 0.0) > TARGET), None)


def last_mean(result: examples.Result) -> float | None:
    return next((x for row in result["rows"][::-1] if (x := row.get("score_10")) is not None), None)


def table(runs: examples.Results, rounds: examples.Results) -> str:
    """Return frames and seconds to the target, the last scores, and speed, an arm a line."""
    speeds = examples.speed_cells(rounds, THEIRS, EVALUATE_EVERY)
    lines = []
    for arm, results in runs.items():
        failed = examples.failure(results + rounds[arm])
        if failed is not None:
            lines.append([f"{arm}: `{failed}`", *[""] * 5])
            continue
        last = examples.each([last_mean(result) for result in results], ".0f")
        reached = examples.when(reached_at(result) for result in results)
        lines.append([f"{arm}: {ABOUT[arm]}", *reached, last, *speeds[arm]])
    head = ["arm", f"frames to {TARGET:.0f}", "seconds of training", "last mean of ten"]
    return markdown([*head, "frames a second", "over the faster AgileRL"], lines)


def main() -> None:
    bench = examples.Example("agilerl", "AgileRL", __doc__, THEIRS, OURS, quick=QUICK_FRAMES)
    speed_frames = bench.frames if bench.quick else SPEED_FRAMES
    runs, rounds = bench.run_all(
        partial(train, frames=bench.frames, target=TARGET),
        partial(train, frames=speed_frames, target=None),
    )
    label = f"mean score of {EVALUATIONS} evaluations"
    title = "LunarLander-v3: AgileRL's example until it has its target"
    bench.write(runs, [*NAMES, "score_10"], "score_10", TARGET, title, label)
    bench.write_page(f"""# AgileRL's LunarLander, by AgileRL and by its assembly from blocks

`configs/training/ppo/ppo.yaml` of AgileRL (github.com/AgileRL/AgileRL, commit 549d85e4), without
mutation and selection, one agent in place of four, trained by AgileRL's `LocalTrainer`
(`tests/benchmarks/originals/agilerl.py`), against `tutorials/agilerl_ppo.py`: LunarLander-v3, 16
environments, {bench.seeds} seeds, arms in turn. Every {EVALUATE_EVERY:,} frames there is an
evaluation of 16 episodes, with actions drawn. A run ends when the mean of the last {EVALUATIONS}
evaluations exceeds {TARGET:.0f}, the example's target, or after {bench.frames:,} frames. The table
has the median of the seeds and each of them. Seconds are of training. Frames a second are of other
runs of {speed_frames:,} frames, without their first {EVALUATE_EVERY:,}, at a learning rate of
{STILL}: the cost of a step depends on the policy.
`python -m tests.benchmarks.agilerl`

![Scores over frames and over seconds](agilerl.png)

{table(runs, rounds)}

{bench.note}AgileRL's vector environments reset in the step after an episode's last, and this frame
is learned from. Episodes that a time limit ends count as terminated, unless they end with the
batch. AgileRL clips the gradients of actor and critic apart, ppokit together.

AgileRL {examples.versions_of(runs)} ran in a virtual environment of its own, with as many
processes as its arm says; the assembly is one process with one thread.
""")


if __name__ == "__main__":
    main()
