"""Collecting from many CartPoles: native vector environments and lists of Python ones.

``python -m tests.benchmarks.vector_environments`` writes
``docs/benchmarks/vector_environments.{csv,md,png}``. EnvPool and Stable-Baselines3 take part if
they are installed (extra ``bench``).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper

from tests.benchmarks import collectors
from tests.benchmarks.figures import panels
from tests.benchmarks.networks import mlp
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, bullets, speed_table, timed
from tests.benchmarks.timing import Call

ENV, STEPS = "CartPole-v1", 32
FLOOR = "floor"
ABOUT = {
    "ppokit, EnvPool": "`GymCollector` over EnvPool's CartPole, one thread",
    "ppokit, native": "`GymCollector` over gymnasium's `CartPoleVectorEnv`",
    "ppokit, serial": "`GymCollector` over a list of `CartPoleEnv`",
    "torchrl, vector": "torchrl's `Collector` over `GymWrapper(SyncVectorEnv(...))`",
    "torchrl, serial": "torchrl's `Collector` over `SerialEnv`",
    "Stable-Baselines3": "its `collect_rollouts` over `DummyVecEnv`",
    FLOOR: "`CartPoleVectorEnv`, and the networks called and sampled from in plain torch",
}
PEERS = ("torchrl, vector", "torchrl, serial", "Stable-Baselines3")


def floor(count: int) -> collectors.Collect:
    env: Any = gym.make_vec(ENV, count, vectorization_mode="vector_entry_point")
    network, state = mlp(4, 2), [env.reset(seed=0)[0]]

    @torch.no_grad()
    def collect() -> None:
        for _ in range(STEPS):
            logits = network(torch.from_numpy(np.asarray(state[0])))
            action = torch.distributions.Categorical(logits=logits).sample()
            state[0] = env.step(action.numpy())[0]

    return collect


def contenders(count: int) -> dict[str, collectors.Collect]:
    frames = STEPS * count
    native = gym.make_vec(ENV, count, vectorization_mode="vector_entry_point")
    mode = AutoresetMode.SAME_STEP
    vector = GymWrapper(
        SyncVectorEnv([lambda: gym.make(ENV)] * count, autoreset_mode=mode), **collectors.OPTIONS
    )
    found: dict[str, collectors.Collect] = {
        "ppokit, native": collectors.gym_collector(native, ENV, frames).rollout,
        "ppokit, serial": collectors.gym_collector(ENV, ENV, frames, num_envs=count).rollout,
        FLOOR: floor(count),
        "torchrl, vector": iter(collectors.torchrl_collector(vector, ENV, frames)).__next__,
    }
    if count <= 64:  # at 256, SerialEnv takes more than ten seconds a batch
        batches = iter(collectors.torchrl_collector(collectors.serial(ENV, count), ENV, frames))
        found["torchrl, serial"] = batches.__next__
    with suppress(ImportError):
        found["Stable-Baselines3"] = collectors.stable_baselines3(ENV, count, STEPS)
    with suppress(ImportError):
        found["ppokit, EnvPool"] = collectors.gym_collector(
            collectors.env_pool(ENV, count, 1), ENV, frames
        ).rollout
    return {name: found[name] for name in ABOUT if name in found}


def measure(count: int, seconds: float, fewest: int) -> list[Row]:
    calls = {name: Call(collect) for name, collect in contenders(count).items()}
    options: Any = {"seconds": seconds, "fewest": fewest, "peers": PEERS, "bound": FLOOR}
    return timed("collection", (count, STEPS), calls, **options)


def page(rows: list[Row]) -> str:
    ratios = {
        "times the fastest peer": lambda row: (
            "" if row.contender == FLOOR else f"{row.best_peer_over_this:.2f}"
        ),
        "time over floor": lambda row: f"{row.this_over_bound:.2f}",
    }
    return f"""# Many environments in one process

Batches of {STEPS} steps of {ENV}, a policy of 2x64; one thread. The contenders take turns in a
random order; figures are medians. `python -m tests.benchmarks.vector_environments`

![Frames a second over the number of environments](vector_environments.png)

{speed_table(rows, lambda row: f"{row.batch}: {row.contender}", ratios)}

{bullets(ABOUT)}

Frames of native environments include the steps that reset an environment, which no loss sees: one
in twenty for an untrained policy. torchrl's wrapper does not accept native environments that reset
in the next step, and is measured over Python's.
"""


def draw(bench: Benchmark, rows: list[Row]) -> None:
    title = f"Collecting from {ENV}, one thread"
    with panels(bench.file("png"), 1, (7.5, 4.6), title) as (axis,):
        for name in dict.fromkeys(row.contender for row in rows):
            own = [row for row in rows if row.contender == name]
            style: Any = {"ls": "--", "color": "black"} if name == FLOOR else {}
            width = 2.2 if name.startswith("ppokit") else 1.2
            points = [row.batch for row in own], [row.speed for row in own]
            axis.plot(*points, marker="o", lw=width, label=name, **style)
        axis.set(xscale="log", yscale="log", xlabel="environments", ylabel="frames a second")
        axis.legend(fontsize=8)


def main() -> None:
    packages = ("envpool", "stable-baselines3")
    bench = Benchmark("vector_environments", __doc__, packages=packages)
    counts, budget = ((8,), (0.5, 2)) if bench.quick else ((64, 256, 1024), (60.0, 7))
    rows = bench.measure(partial(measure, count, *budget) for count in counts)
    draw(bench, rows)
    bench.write_page(page(rows))


if __name__ == "__main__":
    main()
