"""RLlib's CartPole example, by RLlib and by ``assemblies/rllib_ppo.py``, to a return of 450."""

from __future__ import annotations

from tests.benchmarks.examples import Example, versions_of

SPEED_FRAMES, WARM_UP = 100_000, 12_000  # frames of a round, and of its warm-up
OWN = "ppokit, own settings"
ABOUT = {
    "RLlib, its example": "4 environment runners with 16 environments each, 1 learner",
    "RLlib in one process": "`num_env_runners=0`, `num_learners=0`, 64 environments",
    "ppokit, RLlib's settings": "the same 64 environments, networks and hyper-parameters",
    OWN: "16 environments, batches of 1,024 frames, 8 epochs, minibatches of "
    "256, learning rate 0.003, lambda 0.95, policy and critic with a hidden layer of 64 tanh each, "
    "critic loss not clamped, its coefficient 0.5",
}
HEAD = ["arm", "frames, of the iteration", "seconds", "frames, of the last 100", "seconds"]
HEAD += ["frames a second", "over the faster RLlib"]


def main() -> None:
    bench = Example(
        peer="rllib",
        script="rllib_ppo",
        theirs={
            "RLlib, its example": {"workers": 4, "envs": 16, "learners": 1},
            "RLlib in one process": {"workers": 0, "envs": 64, "learners": 0},
        },
        ours={"ppokit, RLlib's settings": ["--settings", "rllib"], OWN: ["--settings", "ppokit"]},
        columns={"return": "episode_return", "return_100": "return_100"},
        score="return_100",
        target=450.0,
        frames=1_000_000,
        quick_frames=16_000,
    )
    runs = bench.train(ABOUT)
    speed_frames = bench.frames if bench.quick else SPEED_FRAMES
    speeds = bench.speed_cells(bench.train(ABOUT, frames=speed_frames), WARM_UP)

    def cells(arm: str) -> list[str]:
        # Batches of the own settings are too short for a mean of the iteration.
        of_batch = ["", ""] if arm == OWN else bench.when(runs[arm], "return")
        return [f"{arm}: {ABOUT[arm]}", *of_batch, *bench.when(runs[arm]), *speeds[arm]]

    title = "CartPole-v1: RLlib's example until it has its target"
    bench.write(runs, title, "mean return of the last 100 episodes")
    bench.write_page(f"""# RLlib's CartPole example, by RLlib and by its assembly from blocks

`rllib/examples/algorithms/ppo/cartpole_ppo.py` of RLlib (github.com/ray-project/ray, commit
438af5cd), transcribed without Tune (`tests/benchmarks/originals/rllib.py`), against
`tests/benchmarks/assemblies/rllib_ppo.py`: CartPole-v1, {bench.seeds} seeds, arms in turn, each run
until the mean return of the last 100 episodes is {bench.target:.0f}, the example's target, or for
{bench.frames:,}
frames. The example itself stops by the mean of the 8 to 20 episodes that ended in the iteration.
The table has both: the median of the seeds, and each of them. Seconds are from the first iteration
on. Frames a second are of other runs of {speed_frames:,} frames without a target, without their
first {WARM_UP:,}.

![Returns over frames and over seconds](rllib.png)

{bench.table(runs, HEAD, cells)}

RLlib {versions_of(runs)} ran in a virtual environment of its own, with as many processes as its
arm says; the assembly is one process with one thread.
""")


if __name__ == "__main__":
    main()
