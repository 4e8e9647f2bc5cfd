"""AgileRL's LunarLander, by AgileRL and by ``assemblies/agilerl_ppo.py``, to a score of 250."""

from __future__ import annotations

from tests.benchmarks.examples import Example, versions_of
from tests.benchmarks.tables import each

EVALUATE_EVERY = 10_240  # frames; also the warm-up of a speed round
STILL = 1e-12  # learning rate of a speed round
ABOUT = {
    "AgileRL, its example": "16 environments, a process each",
    "AgileRL in one process": "`sync: true`",
    "ppokit, AgileRL's settings": "the same environments, networks and hyper-parameters",
    "ppokit, own settings": "4,096 frames a batch, 8 epochs, minibatches of 256, rewards scaled, "
    "gamma 0.999, an encoder each without layer norm, learning rate 0.001 to 0.0002 and entropy "
    "0.01 to 0 over 300,000 frames, target KL 0.03",
}
HEAD = ["arm", "frames to 250", "seconds of training", "last mean of ten"]
HEAD += ["frames a second", "over the faster AgileRL"]


def main() -> None:
    bench = Example(
        peer="agilerl",
        script="agilerl_ppo",
        theirs={"AgileRL, its example": {"sync": False}, "AgileRL in one process": {"sync": True}},
        ours={
            "ppokit, AgileRL's settings": ["--settings", "agilerl"],
            "ppokit, own settings": ["--settings", "own"],
        },
        columns={"score": "score", "score_10": "score_10"},
        score="score_10",
        target=250.0,
        frames=1_000_000,
        quick_frames=2 * EVALUATE_EVERY,
    )
    runs = bench.train(ABOUT, arguments={"lr": 1e-3})
    speed_frames = bench.frames if bench.quick else 8 * EVALUATE_EVERY
    # With a tiny learning rate all arms keep their initial policy.
    still = bench.train(
        ABOUT, frames=speed_frames, arguments={"lr": STILL}, options=["--lr", STILL]
    )
    speeds = bench.speed_cells(still, EVALUATE_EVERY)

    def cells(arm: str) -> list[str]:
        scores = [
            [row["score_10"] for row in run["rows"] if row["score"] is not None]
            for run in runs[arm]
        ]
        last = each([(seed or [None])[-1] for seed in scores], ".0f")
        return [f"{arm}: {ABOUT[arm]}", *bench.when(runs[arm]), last, *speeds[arm]]

    title = "LunarLander-v3: AgileRL's example until it has its target"
    bench.write(runs, title, "mean score of 10 evaluations")
    bench.write_page(f"""# AgileRL's LunarLander, by AgileRL and by its assembly from blocks

`configs/training/ppo/ppo.yaml` of AgileRL (github.com/AgileRL/AgileRL, commit 549d85e4), without
mutation and selection, one agent in place of four, trained by AgileRL's `LocalTrainer`
(`tests/benchmarks/originals/agilerl.py`), against `tests/benchmarks/assemblies/agilerl_ppo.py`:
LunarLander-v3, 16 environments, {bench.seeds} seeds, arms in turn. Every {EVALUATE_EVERY:,} frames
there is an
evaluation of 16 episodes, with actions drawn. A run ends when the mean of the last 10 evaluations
exceeds {bench.target:.0f}, the example's target, or after {bench.frames:,} frames. The table
has the median of the seeds and each of them. Seconds are of training. Frames a second are of other
runs of {speed_frames:,} frames, without their first {EVALUATE_EVERY:,}, at a learning rate of
{STILL}: the cost of a step depends on the policy.

![Scores over frames and over seconds](agilerl.png)

{bench.table(runs, HEAD, cells)}

AgileRL's vector environments reset in the step after an episode's last, and this frame is learned
from. Episodes that a time limit ends count as terminated, unless they end with the batch. AgileRL
clips the gradients of actor and critic apart, ppokit together.

AgileRL {versions_of(runs)} ran in a virtual environment of its own, with as many processes as its
arm says; the assembly is one process with one thread.
""")


if __name__ == "__main__":
    main()
