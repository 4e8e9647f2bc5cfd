"""Collecting with two Ray workers: ``GymCollector`` in them, against one process and torchrl's own.

``python -m tests.benchmarks.ray_workers`` writes ``docs/benchmarks/ray_workers.{csv,md,png}``. It
needs the extra ``ray``, and two idle cores.
"""

from __future__ import annotations

from tests.benchmarks.timing import on_one_thread

if __name__ == "__main__":
    on_one_thread()

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import matplotlib
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import ProbabilisticActor, TanhNormal
from tqdm import tqdm

from ppokit import GymCollector
from tests.benchmarks.report import machine, output_folder
from tests.benchmarks.tables import Row, markdown, versions, write_csv
from tests.benchmarks.timing import Call, interleave

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WORKERS, ENVS = 2, 8
TASKS = {"HalfCheetah-v5": 8_192, "CartPole-v1": 1_024}  # frames of a worker and batch
OURS, ONE, THEIRS = "Ray over GymCollector", "one GymCollector", "Ray over torchrl's Collector"
ABOUT = {
    OURS: "torchrl's `RayCollector(sync=True)`, `collector_class=GymCollector`",
    ONE: "a `GymCollector` in this process, as many environments and frames as one worker has",
    THEIRS: "torchrl's `RayCollector(sync=True)` over its `Collector` and `SerialEnv`",
}


def make_actor(env: str) -> ProbabilisticActor:
    """Return the policy of all contenders, of 2x64."""
    torch.manual_seed(0)
    size, outputs = (17, 12) if env == "HalfCheetah-v5" else (4, 2)
    layers: list[nn.Module] = [nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    layers.append(nn.Linear(64, outputs))
    keys, distribution = ["logits"], torch.distributions.Categorical
    if env == "HalfCheetah-v5":
        layers.append(NormalParamExtractor())
        keys, distribution = ["loc", "scale"], TanhNormal
    return ProbabilisticActor(
        TensorDictModule(nn.Sequential(*layers), ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )


def make_env(env: str) -> Any:
    """Return one of torchrl's environments, with observations as ours are stored."""
    from torchrl.envs import DoubleToFloat, TransformedEnv

    one = lambda: GymEnv(env, categorical_action_encoding=True)  # noqa: E731
    return TransformedEnv(SerialEnv(ENVS, one), DoubleToFloat())


def on_ray(env: str, frames: int, ours: bool) -> Callable[[], object]:
    """Return what collects a batch of all workers, and sends them the weights."""
    from functools import partial

    from torchrl.collectors.distributed import RayCollector

    actor = make_actor(env)
    options: dict[str, Any] = {
        "collector_class": "single",
        "collector_kwargs": {"auto_register_policy_transforms": False},
    }
    if ours:
        options = {
            "collector_class": GymCollector,
            "collector_kwargs": {"categorical_action_encoding": True},
            "num_workers_per_collector": ENVS,
        }
    collector = RayCollector(
        [env if ours else partial(make_env, env)] * WORKERS,
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


def in_one_process(env: str, frames: int) -> Callable[[], object]:
    """Return what collects a batch here."""
    return GymCollector(
        env,
        make_actor(env),
        num_envs=ENVS,
        frames_per_batch=frames,
        categorical_action_encoding=True,
    ).rollout


def measure(env: str, frames: int, seconds: float, fewest: int) -> list[Row]:
    """Time a batch of each contender, in turns."""
    found = {
        OURS: on_ray(env, frames, ours=True),
        ONE: in_one_process(env, frames),
        THEIRS: on_ray(env, frames, ours=False),
    }
    times = interleave({name: Call(x) for name, x in found.items()}, seconds=seconds, fewest=fewest)
    counts = {ONE: 1}
    rows = [
        Row.of(env, name, (counts.get(name, WORKERS) * ENVS, frames // ENVS), times[name])
        for name in found
    ]
    slowest = min(map(speed, rows[1:]))
    for row in rows:
        row.best_peer_over_this = speed(row) / slowest
    return rows


def speed(row: Row) -> float:
    """Return frames a second."""
    return 1e6 * row.batch * row.steps / row.median_us


def table(rows: list[Row]) -> str:
    """Return frames a second, the spread, and what two Ray workers are over each."""
    lines = []
    for row in rows:
        ours = next(x for x in rows if (x.part, x.contender) == (row.part, OURS))
        frames = 1e6 * row.batch * row.steps
        slow, fast = (
            frames / (x or row.median_us) for x in (row.upper_quartile_us, row.lower_quartile_us)
        )
        lines.append(
            [
                f"{row.part}: {row.contender}",
                f"{speed(row):,.0f}",
                f"{slow:,.0f} to {fast:,.0f}",
                "" if row is ours else f"{speed(ours) / speed(row):.2f}",
            ]
        )
    return markdown(["", "frames a second", "quartiles", "ours on Ray over this"], lines)


def draw(path: Path, rows: list[Row]) -> None:
    """Draw frames a second as bars."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(9, 3.4), layout="constrained")
    for axis, env in zip(axes, TASKS, strict=True):
        own = [row for row in rows if row.part == env]
        bars = axis.barh([row.contender for row in own], [speed(row) for row in own])
        axis.bar_label(bars, [f" {speed(row):,.0f}" for row in own], fontsize=8)
        axis.set(title=env, xlabel="frames a second")
        axis.invert_yaxis()
        axis.margins(x=0.2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = output_folder(args.quick)
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(num_cpus=4 * WORKERS, include_dashboard=False, log_to_driver=False)
    rows: list[Row] = []
    for env, frames in tqdm(TASKS.items(), unit="task"):
        budget = (2.0, 2) if args.quick else (120.0, 7)
        rows += measure(env, frames // 8 if args.quick else frames, *budget)
    ray.shutdown()
    write_csv(folder / "ray_workers.csv", rows)
    draw(folder / "ray_workers.png", rows)
    about = "\n".join(f"- **{name}**: {text}." for name, text in ABOUT.items())
    text = f"""# Two Ray workers

Batches of {" and ".join(f"{n:,} frames a worker on {env}" for env, n in TASKS.items())}, with
{ENVS} environments in each; a policy of 2x64, whose weights are sent after each batch. In turns,
medians. `python -m tests.benchmarks.ray_workers`

![Frames a second](ray_workers.png)

{table(rows)}

{about}

{versions("ray")}

{machine()}
"""
    (folder / "ray_workers.md").write_text(text)
    print(f"{folder / 'ray_workers.md'}\n\n{text}")


if __name__ == "__main__":
    main()
