"""Collecting in several processes: ``GymCollector`` in torchrl's, beside others on two cores.

``python -m tests.benchmarks.workers`` writes ``docs/benchmarks/workers.{csv,md,png}``. EnvPool and
Stable-Baselines3 take part where they are installed (extra ``bench``). It needs two idle cores.
"""

from __future__ import annotations

from tests.benchmarks.timing import on_one_thread

if __name__ == "__main__":
    on_one_thread()

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")

import matplotlib
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import DoubleToFloat, GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from tqdm import tqdm

from ppokit import GymCollector
from tests.benchmarks.ray_workers import make_actor, speed
from tests.benchmarks.report import machine, output_folder
from tests.benchmarks.tables import Row, markdown, versions, write_csv
from tests.benchmarks.timing import Call, interleave

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WORKERS = 2
SIZES = (("HalfCheetah-v5", 8), ("HalfCheetah-v5", 64), ("CartPole-v1", 8), ("CartPole-v1", 64))
STEPS = {8: 256, 64: 64}
MOST_PROCESSES = 8  # of one environment each: more take minutes to start
ENVPOOL = {"HalfCheetah-v5": "HalfCheetah-v4", "CartPole-v1": "CartPole-v1"}
ABOUT = {
    "ppokit, 2 workers": "torchrl's `MultiSyncCollector`, `collector_class=partial(GymCollector, "
    "num_envs=n // 2)`",
    "ppokit, 1 process": "`GymCollector`, the environments one after the other",
    "ppokit, async": "`GymCollector(vectorization='async')`, a process for each environment",
    "ppokit, EnvPool": "`GymCollector` over EnvPool's environments (HalfCheetah-v4), two threads",
    "torchrl, 2 workers": "`MultiSyncCollector` over `SerialEnv`",
    "torchrl, ParallelEnv": "`Collector` over `ParallelEnv`, a process for each environment",
    "Stable-Baselines3": "`collect_rollouts` over `SubprocVecEnv`, a process for each environment",
}
PEERS = ("torchrl, 2 workers", "torchrl, ParallelEnv", "Stable-Baselines3")
OPTIONS: dict[str, Any] = {"categorical_action_encoding": True}


def one_env(env: str) -> GymEnv:
    """Return one environment of torchrl's."""
    return GymEnv(env, **OPTIONS)


def as_float(env: Any) -> Any:
    """Return an environment whose observations are as ours are stored."""
    return TransformedEnv(env, DoubleToFloat())


def several(env: str, count: int) -> Any:
    """Return the environments of one of torchrl's workers."""
    return as_float(SerialEnv(count, partial(one_env, env)))


def sync_workers(makers: list[Any], env: str, frames: int, **options: Any) -> Any:
    """Return torchrl's collector over two processes."""
    return MultiSyncCollector(
        makers,
        make_actor(env),
        frames_per_batch=frames,
        total_frames=-1,
        use_buffers=True,
        cat_results="stack",
        **options,
    )


@contextmanager
def contenders(env: str, count: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Give those that are installed, and bear so many environments."""
    frames = STEPS[count] * count
    size: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
    ours = partial(GymCollector, policy=make_actor(env), **size, **OPTIONS)
    in_worker = partial(GymCollector, num_envs=count // WORKERS, **OPTIONS)
    makers = [partial(one_env, env)] * WORKERS
    theirs = [partial(several, env, count // WORKERS)] * WORKERS
    with ExitStack() as stack:

        def add(name: str, collector: Any) -> None:
            stack.callback(collector.shutdown)
            batches = iter(collector)
            found[name] = lambda: next(batches)

        found: dict[str, Callable[[], object]] = {}
        add("ppokit, 1 process", ours(env, num_envs=count))
        add("ppokit, 2 workers", sync_workers(makers, env, frames, collector_class=in_worker))
        add("torchrl, 2 workers", sync_workers(theirs, env, frames))
        if count <= MOST_PROCESSES:
            add("ppokit, async", ours(env, num_envs=count, vectorization="async"))
            parallel = as_float(ParallelEnv(count, partial(one_env, env)))
            add("torchrl, ParallelEnv", Collector(parallel, make_actor(env), **size))
            with suppress(ImportError):
                found["Stable-Baselines3"] = of_sb3(env, count)
        with suppress(ImportError):
            pool: Any = {"env_type": "gymnasium", "num_envs": count, "num_threads": WORKERS}
            add("ppokit, EnvPool", ours(import_module("envpool").make(ENVPOOL[env], **pool)))
        yield found


def of_sb3(env: str, count: int) -> Callable[[], object]:
    """Return what collects a batch."""
    utils = import_module("stable_baselines3.common.env_util")
    processes = import_module("stable_baselines3.common.vec_env").SubprocVecEnv
    # without env_kwargs it makes environments that render
    plain: Any = {"env_kwargs": {"render_mode": None}, "vec_env_cls": processes, "seed": 0}
    made = utils.make_vec_env(env, count, **plain)
    steps, layers = STEPS[count], {"net_arch": [64, 64]}
    model = import_module("stable_baselines3").PPO(
        "MlpPolicy", made, n_steps=steps, policy_kwargs=layers, device="cpu"
    )
    _, callback = model._setup_learn(10**9)
    buffer = model.rollout_buffer
    return lambda: model.collect_rollouts(model.env, callback, buffer, n_rollout_steps=steps)


def measure(env: str, count: int, seconds: float, fewest: int) -> list[Row]:
    """Time a batch of each contender, in turns."""
    with contenders(env, count) as found:
        calls = {name: Call(run) for name, run in found.items()}
        times = interleave(calls, seconds=seconds, fewest=fewest)
        found.clear()
    del calls
    gc.collect()  # torchrl's collectors cannot be collected any more when the interpreter ends
    rows = [
        Row.of(env, name, (count, STEPS[count]), times[name]) for name in ABOUT if name in times
    ]
    fastest = max(speed(row) for row in rows if row.contender in PEERS)
    for row in rows:
        row.best_peer_over_this = speed(row) / fastest
    return rows


def table(rows: list[Row]) -> str:
    """Return frames a second, the spread, and the ratio to the fastest peer."""
    lines = []
    for row in rows:
        frames = 1e6 * row.batch * row.steps
        slow, fast = (
            frames / (x or row.median_us) for x in (row.upper_quartile_us, row.lower_quartile_us)
        )
        lines.append(
            [
                f"{row.part} x {row.batch}: {row.contender}",
                f"{speed(row):,.0f}",
                f"{slow:,.0f} to {fast:,.0f}",
                f"{row.best_peer_over_this:.2f}",
            ]
        )
    return markdown(["", "frames a second", "quartiles", "times the fastest peer"], lines)


def draw(path: Path, rows: list[Row]) -> None:
    """Draw frames a second as bars, on a logarithmic scale."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for axis, (env, count) in zip(axes.flat, SIZES, strict=True):
        own = [row for row in rows if (row.part, row.batch) == (env, count)]
        colours = ["C0" if row.contender.startswith("ppokit") else "C7" for row in own]
        bars = axis.barh([row.contender for row in own], [speed(row) for row in own], color=colours)
        axis.bar_label(bars, [f" {speed(row):,.0f}" for row in own], fontsize=8)
        axis.set(title=f"{count} x {env}", xlabel="frames a second", xscale="log")
        axis.invert_yaxis()
        axis.margins(x=0.2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    rows: list[Row] = []
    for env, count in tqdm(SIZES[1:2] if args.quick else SIZES, unit="size"):
        rows += measure(env, count, *((2.0, 2) if args.quick else (90.0, 7)))
    write_csv(folder / "workers.csv", rows)
    if not args.quick:
        draw(folder / "workers.png", rows)
    about = "\n".join(f"- **{name}**: {text}." for name, text in ABOUT.items())
    text = f"""# Collecting in several processes

Batches of {STEPS[8]} steps of 8 environments and {STEPS[64]} of 64, a policy of 2x64, two cores,
one thread a process; in turns, medians. `python -m tests.benchmarks.workers`

![Frames a second](workers.png)

{table(rows)}

{about}

A process for each environment is left out at 64: they take minutes to start on two cores.

{versions("envpool", "stable-baselines3")}

{machine()}
"""
    (folder / "workers.md").write_text(text)
    print(f"{folder / 'workers.md'}\n\n{text}")


if __name__ == "__main__":
    main()
