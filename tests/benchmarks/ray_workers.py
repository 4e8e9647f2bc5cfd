"""Collecting with two Ray workers: ``GymCollector`` or torchrl's collector (extra ``ray``).

Needs two idle cores.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from torchrl.collectors.distributed import RayCollector

from ppokit import GymCollector
from tests.benchmarks.collectors import OPTIONS, Collect, gym_collector, make_actor, serial
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, bullets, speed_table, speeds
from tests.benchmarks.timing import Call, interleave

WORKERS, ENVS = 2, 8
TASKS = {"HalfCheetah-v5": 8_192, "CartPole-v1": 1_024}  # frames of a worker and batch
OURS, ONE, THEIRS = "Ray over GymCollector", "one GymCollector", "Ray over torchrl's Collector"
ABOUT = {
    OURS: "torchrl's `RayCollector(sync=True)`, `collector_class=GymCollector`",
    ONE: "a `GymCollector` in this process, as many environments and frames as one worker has",
    THEIRS: "torchrl's `RayCollector(sync=True)` over its `Collector` and `SerialEnv`",
}


def on_ray(env: str, frames: int, ours: bool) -> Collect:
    """Return a call that collects a batch of all workers, and sends them the weights."""
    actor = make_actor(env)
    options: dict[str, Any] = {
        "collector_class": "single",
        "collector_kwargs": {"auto_register_policy_transforms": False},
    }
    if ours:
        options = {
            "collector_class": GymCollector,
            "collector_kwargs": dict(OPTIONS),  # RayCollector adds to it
            "num_workers_per_collector": ENVS,
        }
    collector = RayCollector(
        [env if ours else partial(serial, env, ENVS)] * WORKERS,
        actor,
        frames_per_batch=WORKERS * frames,
        total_frames=2**62,
        sync=True,
        remote_configs={"num_cpus": 1},
        **options,
    )
    collector.update_policy_weights_(actor)
    batches = iter(collector)

    def collect() -> None:
        batch = next(batches)
        assert batch.numel() == WORKERS * frames
        collector.update_policy_weights_(actor)

    return collect


def measure(env: str, frames: int, seconds: float, fewest: int) -> list[Row]:
    found = {
        OURS: on_ray(env, frames, ours=True),
        ONE: gym_collector(env, env, frames, num_envs=ENVS).rollout,
        THEIRS: on_ray(env, frames, ours=False),
    }
    times = interleave({name: Call(x) for name, x in found.items()}, seconds=seconds, fewest=fewest)
    sizes = {name: (ENVS if name == ONE else WORKERS * ENVS, frames // ENVS) for name in found}
    return [Row.of(env, name, sizes[name], times[name]) for name in found]


def main() -> None:
    bench = Benchmark("ray_workers", packages=("ray",))
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(num_cpus=4 * WORKERS, include_dashboard=False, log_to_driver=False)
    budget, part = ((2.0, 2), 8) if bench.quick else ((120.0, 7), 1)
    rows = bench.measure(partial(measure, env, n // part, *budget) for env, n in TASKS.items())
    ray.shutdown()
    groups = {env: speeds(row for row in rows if row.part == env) for env in TASKS}
    draw_bars(bench.file("png"), groups, ours=(OURS, ONE))
    ours = {row.part: row.speed for row in rows if row.contender == OURS}

    def ratio(row: Row) -> str:
        return "" if row.contender == OURS else f"{ours[row.part] / row.speed:.2f}"

    bench.write_page(f"""# Two Ray workers

Batches of {" and ".join(f"{n:,} frames a worker on {env}" for env, n in TASKS.items())}, with
{ENVS} environments in each; a policy of 2x64, whose weights are sent after each batch.

![Frames a second](ray_workers.png)

{speed_table(rows, "{0.part}: {0.contender}".format, {"GymCollector on Ray over this": ratio})}

{bullets(ABOUT)}
""")


if __name__ == "__main__":
    main()
