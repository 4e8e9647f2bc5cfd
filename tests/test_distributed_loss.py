"""The loss on two real ranks: what one process computes on the data of both."""

from __future__ import annotations

import math
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from ppokit import DualClipPPOLoss
from tests.blocks import make_actor, make_critic, make_minibatch

LIMIT = 60  # seconds, after which the processes are killed
CASES: dict[str, dict[str, Any]] = {
    "fast": {},
    "torchrl's path": {"fast": False},
    "dual clip": {"dual_clip": 1.2, "kl_coeff": 0.1},
}
FRAMES = 12


def minibatch() -> TensorDict:
    """What both ranks hold together."""
    batch = make_minibatch(make_actor("categorical"), FRAMES)
    batch["advantage"] += 1
    return batch


def make_loss(options: dict[str, Any], *, parallel: bool = False) -> DualClipPPOLoss:
    actor, critic = make_actor("categorical"), make_critic()
    if parallel:
        actor.module[0].module = DistributedDataParallel(actor.module[0].module)
        critic.module = DistributedDataParallel(critic.module)
    return DualClipPPOLoss(actor, critic, functional=False, normalize_advantage=True, **options)


def gradients(loss: nn.Module, batch: TensorDict) -> tuple[float, list[torch.Tensor]]:
    out = loss(batch)
    total = sum(out[name] for name in out.keys() if name.startswith("loss_"))
    assert isinstance(total, torch.Tensor)
    total.backward()
    return out["loss_objective"].item(), [p.grad for p in loss.parameters() if p.grad is not None]


def process(rank: int, folder: str) -> None:
    """Compute the losses of one half, and store what came out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    batch, found = minibatch(), {}
    half = batch[rank::2]
    for name, options in CASES.items():
        found[name] = gradients(make_loss(options, parallel=True), half)
    # halves of different sizes: 11 valid frames on one, 1 on the other
    row = batch.unsqueeze(0).expand(2, FRAMES).clone()
    valid = torch.arange(FRAMES) < torch.tensor([[FRAMES - 1], [0]])
    valid[1, -1] = True
    row["collector", "mask"] = valid
    loss = make_loss({"reduction": "sum"})
    found["masked"] = gradients(loss, row[rank : rank + 1])
    found["one frame"] = gradients(
        make_loss({"reduction": "sum"}), batch[:1] if rank else batch[1:]
    )
    # what is not finite on one rank must not make it meet the others once more
    if rank:
        half["action_log_prob"][0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["not finite"] = make_loss({})(half)["loss_objective"].item()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    context = start_processes(process, (str(folder),), nprocs=2, join=False, start_method="spawn")
    deadline = time.monotonic() + LIMIT
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for child in context.processes:
                child.kill()
            pytest.fail(f"A rank is still waiting after {LIMIT} s.")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_does(results, name: str):
    objective, expected = gradients(make_loss(CASES[name]), minibatch())
    mean = sum(found[name][0] for found in results) / 2
    assert mean == pytest.approx(objective, abs=1e-6)
    for found in results:  # DistributedDataParallel has averaged the gradients
        torch.testing.assert_close(found[name][1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["masked", "one frame"])
def test_ranks_may_hold_different_numbers_of_frames(results, name: str):
    objective, expected = gradients(make_loss({"reduction": "sum"}), minibatch())
    assert sum(found[name][0] for found in results) == pytest.approx(objective, abs=1e-5)
    for one, other, total in zip(results[0][name][1], results[1][name][1], expected, strict=True):
        torch.testing.assert_close(one + other, total, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_on_one_rank_leaves_no_rank_waiting(results):
    found = [result["not finite"] for result in results]
    assert math.isfinite(found[0])
    assert math.isnan(found[1])
