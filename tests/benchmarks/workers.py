"""Collecting in several processes: torchrl's workers over ``GymCollector``, and other collectors.

Needs two idle cores.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")

import gymnasium as gym
from gymnasium.vector import AutoresetMode
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import ParallelEnv

from ppokit import GymCollector
from tests.benchmarks import collectors
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, bullets, speed_table, speeds, timed
from tests.benchmarks.timing import Call

WORKERS = 2
SIZES = (("HalfCheetah-v5", 8), ("HalfCheetah-v5", 64), ("CartPole-v1", 8), ("CartPole-v1", 64))
STEPS = {8: 256, 64: 64}
MOST_PROCESSES = 8  # of one environment each: more take minutes to start
ENVPOOL = {"HalfCheetah-v5": "HalfCheetah-v4", "CartPole-v1": "CartPole-v1"}
ABOUT = {
    "ppokit, 2 workers": "torchrl's `MultiSyncCollector`, `collector_class=partial(GymCollector, "
    "num_envs=n // 2)`",
    "ppokit, 1 process": "`GymCollector`, the environments one after the other",
    "ppokit, async": "`GymCollector` over gymnasium's `AsyncVectorEnv`, a process for each "
    "environment",
    "ppokit, EnvPool": "`GymCollector` over EnvPool's environments (HalfCheetah-v4), two threads",
    "torchrl, 2 workers": "`MultiSyncCollector` over `SerialEnv`",
    "torchrl, ParallelEnv": "`Collector` over `ParallelEnv`, a process for each environment",
    "Stable-Baselines3": "`collect_rollouts` over `SubprocVecEnv`, a process for each environment",
}
PEERS = ("torchrl, 2 workers", "torchrl, ParallelEnv", "Stable-Baselines3")


def sync_workers(makers: list[Any], env: str, frames: int, **options: Any) -> Any:
    return MultiSyncCollector(
        makers,
        collectors.make_actor(env),
        frames_per_batch=frames,
        total_frames=-1,
        use_buffers=True,
        cat_results="stack",
        **options,
    )


@contextmanager
def contenders(env: str, count: int) -> Iterator[dict[str, collectors.Collect]]:
    frames, half = STEPS[count] * count, count // WORKERS
    in_worker = partial(GymCollector, num_envs=half, **collectors.OPTIONS)
    makers, theirs = (
        [partial(collectors.one_env, env)] * WORKERS,
        [partial(collectors.serial, env, half)] * WORKERS,
    )
    with ExitStack() as stack:

        def add(name: str, collector: Any) -> None:
            stack.callback(collector.shutdown)
            found[name] = iter(collector).__next__

        found: dict[str, collectors.Collect] = {}
        add("ppokit, 1 process", collectors.gym_collector(env, env, frames, num_envs=count))
        add("ppokit, 2 workers", sync_workers(makers, env, frames, collector_class=in_worker))
        add("torchrl, 2 workers", sync_workers(theirs, env, frames))
        if count <= MOST_PROCESSES:
            mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
            asynchronous = gym.make_vec(env, count, vectorization_mode="async", vector_kwargs=mode)
            add("ppokit, async", collectors.gym_collector(asynchronous, env, frames))
            parallel = collectors.as_float(ParallelEnv(count, partial(collectors.one_env, env)))
            add("torchrl, ParallelEnv", collectors.torchrl_collector(parallel, env, frames))
            with suppress(ImportError):
                peer = collectors.stable_baselines3(env, count, STEPS[count], processes=True)
                found["Stable-Baselines3"] = peer
        with suppress(ImportError):
            pool = collectors.env_pool(ENVPOOL[env], count, WORKERS)
            add("ppokit, EnvPool", collectors.gym_collector(pool, env, frames))
        yield found


def measure(env: str, count: int, seconds: float, fewest: int) -> list[Row]:
    with contenders(env, count) as found:
        calls = {name: Call(found[name]) for name in ABOUT if name in found}
        limits = {"seconds": seconds, "fewest": fewest}
        rows = timed(env, (count, STEPS[count]), calls, peers=PEERS, **limits)
        found.clear()
    del calls
    gc.collect()  # torchrl's collectors raise if they are finalized at exit
    return rows


def main() -> None:
    bench = Benchmark("workers", packages=("envpool", "stable-baselines3"))
    sizes, budget = (SIZES[1:2], (2.0, 2)) if bench.quick else (SIZES, (90.0, 7))
    rows = bench.measure(partial(measure, *size, *budget) for size in sizes)
    groups = {
        f"{count} x {env}": speeds(x for x in rows if (x.part, x.batch) == (env, count))
        for env, count in sizes
    }
    draw_bars(bench.file("png"), groups, log=True)
    ratio = {"times the fastest peer": lambda row: f"{row.best_peer_over_this:.2f}"}
    bench.write_page(f"""# Collecting in several processes

Batches of {STEPS[8]} steps of 8 environments and {STEPS[64]} of 64, a policy of 2x64, two cores,
one thread a process.

![Frames a second](workers.png)

{speed_table(rows, "{0.part} x {0.batch}: {0.contender}".format, ratio)}

{bullets(ABOUT)}

A process for each environment is left out at 64: they take minutes to start on two cores.
""")


if __name__ == "__main__":
    main()
