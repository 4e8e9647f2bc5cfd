"""Peak memory of blocks on large batches, beside TorchRL's. It takes five minutes, on Linux."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import run_jobs
from tests.benchmarks.tables import markdown, shape_name, write_lines

SHAPES, QUICK_SHAPES = ((4_096, 24), (16_384, 32), (65_536, 16)), ((1_024, 8),)
OBSERVATIONS, ACTIONS, HIDDEN, MINIBATCHES = 48, 12, (256, 256, 256), 16
CHUNK = 16_384  # frames
Work = Callable[[], Any]
Parts = tuple[Any, Any, TensorDict]
DISCOUNTS = {"gamma": 0.99, "lmbda": 0.95}


def make_parts(rows: int, steps: int) -> Parts:
    """Return actor, critic and a batch with advantages."""
    torch.manual_seed(0)
    boxes = (spaces.Box(-9, 9, (size,)) for size in (OBSERVATIONS, ACTIONS))
    actor, critic = actor_critic((*boxes,), HIDDEN)
    done = torch.rand(rows, steps, 1) < 0.01
    terminated = done & (torch.rand(rows, steps, 1) < 0.5)
    batch = TensorDict({"observation": torch.randn(rows, steps, OBSERVATIONS)}, [rows, steps])
    batch["action"] = torch.randn(rows, steps, ACTIONS)
    batch["action_log_prob"] = torch.randn(rows, steps)
    for key in ("advantage", "value_target"):
        batch[key] = torch.randn(rows, steps, 1)
    following = {"observation": torch.randn(rows, steps, OBSERVATIONS)}
    signals = {"reward": torch.randn(rows, steps, 1), "done": done, "terminated": terminated}
    batch["next"] = following | signals
    return actor, critic, batch


def advantages(parts: Parts, kind: Any = ppokit.GAE, **options: Any) -> Work:
    _, critic, batch = parts
    module = kind(value_network=critic, **DISCOUNTS, **options)
    return torch.no_grad()(partial(module, batch))


def update(parts: Parts) -> Work:
    """One epoch, of as many minibatches as the other's."""
    actor, critic, batch = parts
    loss = ppokit.DualClipPPOLoss(actor, critic)
    step = ppokit.TrainingStep(loss, torch.optim.Adam(loss.parameters(), fused=True))
    size = batch.numel() // MINIBATCHES
    return partial(ppokit.PPOUpdate(step, epochs=1, minibatch_size=size), batch)


def torchrl_epoch(parts: Parts) -> Work:
    """The epoch of TorchRL's tutorial: a replay buffer, ``ClipPPOLoss``, Adam."""
    actor, critic, batch = parts
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), fused=True)
    frames, size = batch.numel(), batch.numel() // MINIBATCHES

    def epoch() -> None:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(frames, device="auto"),
            sampler=SamplerWithoutReplacement(),
            batch_size=size,
        )
        buffer.extend(batch.reshape(-1))
        for _ in range(MINIBATCHES):
            losses = loss(buffer.sample())
            sum(x for name, x in losses.items() if name.startswith("loss_")).backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


BLOCKS: dict[str, Callable[[Parts], Work]] = {
    "ppokit `RewardNormalizer`": lambda parts: partial(ppokit.RewardNormalizer(0.99), parts[2]),
    "ppokit `GAE`": advantages,
    f"ppokit `GAE`, values in chunks of {CHUNK:,} frames": partial(
        advantages, value_chunk_size=CHUNK
    ),
    "torchrl `GAE`": partial(advantages, kind=TorchRLGAE),
    f"ppokit `PPOUpdate`, an epoch of {MINIBATCHES} minibatches": update,
    f"torchrl: replay buffer and `ClipPPOLoss`, an epoch of {MINIBATCHES}": torchrl_epoch,
}


def peak(block: str, rows: int, steps: int) -> dict[str, float]:
    """Return the size of the batch, and how much more memory the block takes at most, in bytes."""
    BLOCKS[block](make_parts(64, 8))()  # what is created once
    parts = make_parts(rows, steps)
    work, status = BLOCKS[block](parts), Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here

    def read(name: str) -> float:
        return 1024.0 * int(re.findall(rf"{name}:\s+(\d+)", status.read_text())[0])

    before = read("VmRSS")
    work()
    return {"batch": float(parts[2].bytes()), "peak": read("VmHWM") - before}


def page(found: dict[tuple[str, tuple[int, int]], dict[str, float]], shapes: Sequence[Any]) -> str:
    sizes = [f"{found[next(iter(BLOCKS)), shape]['batch'] / 1e6:,.0f} MB" for shape in shapes]
    lines = [
        [block, *(f"{x['peak'] / x['batch']:.2f}" for x in (found[block, s] for s in shapes))]
        for block in BLOCKS
    ]
    return f"""# Memory

Peak memory of a block beyond the batch, as a multiple of the size of the batch. The batch has
{OBSERVATIONS} observations before and after each step, and {ACTIONS} actions; the networks have
three layers of 256 units.

{markdown(["", *map(shape_name, shapes)], [["size of the batch", *sizes], *lines])}

Each figure is the peak of the resident memory of a process of its own, on the CPU.
"""


def main() -> None:
    bench = Benchmark("memory")
    shapes = QUICK_SHAPES if bench.quick else SHAPES
    jobs = [
        {"block": block, "rows": rows, "steps": steps} for rows, steps in shapes for block in BLOCKS
    ]
    results = run_jobs("memory.peak", jobs, None, MALLOC_MMAP_THRESHOLD_="65536")
    found = {(x["block"], (x["rows"], x["steps"])): x for x in results}
    write_lines(bench.file("csv"), results)
    bench.write_page(page(found, shapes))


if __name__ == "__main__":
    main()
