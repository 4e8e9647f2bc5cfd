"""The cost of each block as environments and networks grow, and the messages between ranks."""

from __future__ import annotations

import pickle
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
import torch.distributed as dist

import ppokit
from tests.benchmarks.networks import actor_and_critic
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, markdown, pivot, timed
from tests.benchmarks.timing import Call
from tests.ranks import run_on_two_ranks

STEPS, MINIBATCHES, EPOCHS = 32, 8, 4
ENVS, HIDDEN = (64, 512, 4096), (64, 256)
KINDS = {
    "gradients and statistics": (),
    "and a KL stop in each minibatch": ("stopper",),
    "and advantages standardised over ranks": ("stopper", "normalize"),
    "and a reward normalizer": ("stopper", "normalize", "rewards"),
}


class Blocks:
    """The blocks of one assembly on CartPole; ``parts`` are those that need further messages."""

    def __init__(self, num_envs: int, hidden: int, parts: Sequence[str] = ()) -> None:
        actor, critic = actor_and_critic("CartPole-v1", (hidden, hidden), seed=0)
        loss = ppokit.DualClipPPOLoss(actor, critic, normalize_advantage="normalize" in parts)
        envs = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
        options = {"frames_per_batch": num_envs * STEPS, "categorical_action_encoding": True}
        self.collector = ppokit.GymCollector(envs, actor, **options)
        optimizer = torch.optim.Adam(loss.parameters(), fused=True)
        stop = ppokit.KLEarlyStopper(100.0) if "stopper" in parts else None
        self.update: Any = ppokit.PPOUpdate(
            ppokit.TrainingStep(loss, optimizer, stopper=stop, max_grad_norm=0.5),
            advantage=ppokit.GAE(gamma=0.99, lmbda=0.95, value_network=critic),
            reward_normalizer=ppokit.RewardNormalizer(0.99) if "rewards" in parts else None,
            minibatch_size=num_envs * STEPS // MINIBATCHES,
            epochs=EPOCHS,
        )
        self.parameters = sum(p.numel() for p in loss.parameters())


def measure(num_envs: int, hidden: int, seconds: float) -> list[Row]:
    blocks = Blocks(num_envs, hidden)
    batch = blocks.collector.rollout()
    calls = {
        "collect": Call(blocks.collector.rollout),
        "scale rewards": Call(lambda: ppokit.RewardNormalizer(0.99)(batch.copy())),
        "GAE": Call(lambda: blocks.update.advantage(batch.copy())),
        "update": Call(lambda: blocks.update(batch.copy())),
    }
    return timed(f"2x{hidden}", (num_envs, STEPS), calls, seconds=seconds, fewest=3)


def on_rank(rank: int) -> dict[str, Any]:
    """Return the messages and bytes that this rank sends in one update of each kind."""
    found: dict[str, Any] = {}
    said: Counter[str] = Counter()
    reduce, gather = dist.all_reduce, dist.all_gather_object

    def all_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        said.update(messages=1, bytes=x.nbytes)
        return reduce(x, *args, **kwargs)

    def all_gather_object(each: list[Any], own: Any, *args: Any, **kwargs: Any) -> Any:
        said.update(messages=2, bytes=len(pickle.dumps(own)) + 8)  # its length goes before it
        return gather(each, own, *args, **kwargs)

    dist.all_reduce, dist.all_gather_object = all_reduce, all_gather_object
    for kind, parts in KINDS.items():
        blocks = Blocks(64, HIDDEN[0], parts)
        blocks.update(blocks.collector.rollout())  # the first one compares parameters
        said.clear()
        blocks.update(blocks.collector.rollout())
        found[kind] = {**said, "parameters": blocks.parameters}
    return found


def message_table() -> str:
    """Return the messages of one of two real ranks in an update."""
    lines, steps = [], EPOCHS * MINIBATCHES
    with tempfile.TemporaryDirectory() as folder:
        found = run_on_two_ranks(on_rank, Path(folder))[0]
    for kind, said in found.items():
        messages, rest = said["messages"], said["bytes"] - 4 * said["parameters"] * steps
        counts = f"{messages:,}", f"{messages / steps:.1f}", f"{said['bytes']:,}", f"{rest:,}"
        lines.append([kind, *counts])
    return markdown(["", "messages an update", "a step", "bytes", "beside gradients"], lines)


def main() -> None:
    bench = Benchmark("scale")
    envs, seconds = (ENVS[:1], 1.0) if bench.quick else (ENVS, 40.0)
    sizes = [(count, hidden) for hidden in HIDDEN for count in envs]
    rows = bench.measure(partial(measure, *size, seconds) for size in sizes)
    times = pivot(
        rows,
        lambda row: row.median_us / row.batch / row.steps,
        ".2f",
        line=lambda row: f"{row.part}, {row.batch:,}",
        column=lambda row: row.contender,
    )
    bench.write_page(f"""# Cost by environments, networks and ranks

CartPole-v1 as gymnasium's native vector environment, {STEPS} steps, {EPOCHS} epochs of
{MINIBATCHES} minibatches, one thread; microseconds a frame by networks and environments.

{times}

The messages that one of two ranks hands to `torch.distributed` in an update of
{EPOCHS * MINIBATCHES} optimizer steps with networks of 2x{HIDDEN[0]}, counted:

{message_table()}
""")


if __name__ == "__main__":
    main()
