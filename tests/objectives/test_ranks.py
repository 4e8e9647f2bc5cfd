"""The loss on two real ranks: what one process computes on the data of both."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ppokit import DualClipPPOLoss
from tests.blocks import make_actor, make_critic, make_minibatch
from tests.ranks import run_on_two_ranks

pytestmark = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {"plain": {}, "dual clip": {"dual_clip": 1.2, "kl_coeff": 0.1}}
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


def found_on(rank: int) -> dict[str, Any]:
    """Compute the losses of one half; return what came out."""
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
    share = batch[:1] if rank else batch[1:]
    found["one frame"] = gradients(make_loss({"reduction": "sum"}), share)
    # what is not finite on one rank must not make it meet the others once more
    if rank:
        half["action_log_prob"][0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["not finite"] = make_loss({})(half)["loss_objective"].item()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two_ranks(found_on, tmp_path_factory.mktemp("ranks"))


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
