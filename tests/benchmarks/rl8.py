"""rl8 on its own cartpole example, and the same assembled from ppokit's blocks."""

from __future__ import annotations

from tests.benchmarks.examples import Example, Results, versions_of

CHUNK = 2_048  # frames
COMMIT = "f598c6d1bceaa07a43e083508608cffc2c64becf"
ACCUMULATED = ["--original", "--minibatch-size", str(CHUNK), "--accumulate-grads"]


def example() -> Example:
    return Example(
        peer="rl8",
        script="rl8_vectorized",
        theirs={"rl8": {"chunk": None}, "rl8, accumulated": {"chunk": CHUNK}},
        ours={
            "ppokit": [],
            "ppokit, eager": ["--original"],
            "ppokit, compiled": ["--original", "--compile"],
            "ppokit, accumulated, eager": ACCUMULATED,
        },
        columns={"return": "return"},
        score="return",
        target=-50.0,
        frames=60 * 256 * 64,
        quick_frames=256 * 64,
    )


def main() -> None:
    bench = example()
    curves = bench.train(["rl8", "ppokit"], arguments={"num_envs": 256, "horizon": 64})
    envs, horizon, batches = (64, 8, 4) if bench.quick else (1_024, 32, 8)
    size = {"num_envs": envs, "horizon": horizon}
    options = ["--num-envs", envs, "--horizon", horizon]

    def speeds(*arms: str) -> str:
        frames = batches * envs * horizon
        rounds: Results = bench.train(arms, frames=frames, arguments=size, options=options)
        cells = bench.speed_cells(rounds, 2 * envs * horizon)
        return bench.table(
            rounds, ["arm", "frames a second", "over rl8"], lambda arm: [arm, *cells[arm]]
        )

    whole = ["ppokit, eager"] if bench.quick else ["ppokit, eager", "ppokit, compiled"]
    curve_table = bench.table(
        curves,
        ["arm", f"frames to {bench.target:.0f}", "seconds"],
        lambda arm: [arm, *bench.when(curves[arm])],
    )
    bench.write(curves, "rl8's cartpole until its target", "mean return of a horizon")
    bench.write_page(f"""# rl8's own example

rl8's cartpole example (`examples/cartpole` of its repository at commit `{COMMIT}`), reimplemented
in `tests/benchmarks/originals/rl8.py` for rl8 and in
`tests/benchmarks/assemblies/rl8_vectorized.py` for ppokit: five observations, three actions, no
end of an episode, a negative reward. Every run is a process of
its own on one thread, the arms in turn. Tables have the median of {bench.seeds} seeds or rounds,
and each of them or their range.

![Returns over frames and over seconds](rl8.png)

## Until a horizon's mean return is {bench.target:.0f}

256 environments, 64 steps. rl8 has the settings of its example, ppokit those of the tutorial:
minibatches of 256 frames, one epoch, a learning rate of 0.002; the same networks, two of 2x256.
Seconds are of collecting and training, without imports and without rl8's compilation.

{curve_table}

## Steady state, with rl8's settings and networks

Collecting and training: {envs:,} environments, {horizon} steps, four epochs, the whole batch in
each optimizer step.

{speeds("rl8", *whole)}

With the gradients of chunks of {CHUNK:,} frames accumulated:

{speeds("rl8, accumulated", "ppokit, accumulated, eager")}

rl8 {versions_of(curves)} ran in a virtual environment of its own.
""")


if __name__ == "__main__":
    main()
