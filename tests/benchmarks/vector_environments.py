"""Collecting from many CartPoles: native vector environments and lists of Python ones."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torchrl.envs import GymWrapper

from tests.benchmarks import collectors
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.networks import mlp
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, bullets, speed_table, speeds, timed
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
    mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
    python = gym.make_vec(ENV, count, vectorization_mode="sync", vector_kwargs=mode)
    vector = GymWrapper(python, **collectors.OPTIONS)
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
    shape, limits = (count, STEPS), {"seconds": seconds, "fewest": fewest}
    return timed("collection", shape, calls, peers=PEERS, bound=FLOOR, **limits)


def main() -> None:
    bench = Benchmark("vector_environments", packages=("envpool", "stable-baselines3"))
    counts, budget = ((8,), (0.5, 2)) if bench.quick else ((64, 256, 1024), (60.0, 7))
    rows = bench.measure(partial(measure, count, *budget) for count in counts)
    groups = {f"{n} environments": speeds(x for x in rows if x.batch == n) for n in counts}
    draw_bars(bench.file("png"), groups, log=True)
    ratios = {
        "times the fastest peer": lambda row: (
            "" if row.contender == FLOOR else f"{row.best_peer_over_this:.2f}"
        ),
        "time over floor": lambda row: f"{row.this_over_bound:.2f}",
    }
    bench.write_page(f"""# Many environments in one process

Batches of {STEPS} steps of {ENV}, a policy of 2x64; one thread.

![Frames a second over the number of environments](vector_environments.png)

{speed_table(rows, "{0.batch}: {0.contender}".format, ratios)}

{bullets(ABOUT)}

Frames of native environments include the steps that reset an environment, which no loss sees: one
in twenty for an untrained policy. torchrl's wrapper does not accept native environments that reset
in the next step, and is measured over Python's.
""")


if __name__ == "__main__":
    main()
