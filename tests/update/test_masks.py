"""The mask of valid frames under another name, and batches in another order of dimensions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.objectives import ClipPPOLoss

from ppokit import (
    GAE,
    DualClipPPOLoss,
    InterpSchedule,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
)
from tests.blocks import make_actor, make_critic, ppo_update
from tests.update import parts

VALID = torch.arange(6) < torch.tensor([[6], [2]])


def make_batch(mask_key: Any, padding: float = math.nan) -> TensorDict:
    batch = parts.make_batch().exclude(("collector", "traj_ids"))
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        batch[key][~VALID] = padding
    batch[mask_key] = VALID.clone()
    return batch


def make_update(mask_key: Any, make_loss: Any = DualClipPPOLoss, **blocks: Any) -> PPOUpdate:
    loss = make_loss(make_actor(), make_critic(), functional=False)
    loss.loss_mask_key = mask_key
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    keys = {"mask_key": mask_key}
    schedules = {"lr": (optimizer, InterpSchedule([(0, 1e-2), (100, 0.0)]))}
    options: dict[str, Any] = {
        "advantage": GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network, **keys),
        "reward_normalizer": RewardNormalizer(0.9, **keys),
        "scheduler": ParameterScheduler(schedules, **keys),
    }
    return ppo_update(loss, optimizer, minibatch_size=4, epochs=2, seed=0, **options | blocks)


@pytest.mark.parametrize(
    ("make_loss", "recurrent"),
    [(DualClipPPOLoss, False), (DualClipPPOLoss, True), (ClipPPOLoss, False)],
)
def test_a_mask_under_another_name_excludes_the_same_frames(make_loss: Any, recurrent: bool):
    found = []
    for key in (("collector", "mask"), "valid", ("nested", "valid")):
        batcher = SequenceBatcher(4, cut_keys=(), mask_key=key) if recurrent else None
        update = make_update(key, make_loss, batcher=batcher)
        statistics = [update(make_batch(key)) for _ in range(2)]
        found.append([{k: v for k, v in x.items() if "second" not in k} for x in statistics])
    assert found[0][0]["frames"] == 8
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert one == pytest.approx(same, rel=1e-6, nan_ok=True)


KEYS = {"mask_key": "valid"}
BLOCKS = {
    "advantage": lambda: GAE(gamma=0.9, lmbda=0.9, value_network=None, **KEYS),
    "reward_normalizer": lambda: RewardNormalizer(0.9, **KEYS),
    "batcher": lambda: SequenceBatcher(4, cut_keys=(), **KEYS),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_with_another_mask_than_the_loss_raises(name: str):
    with pytest.raises(ValueError, match=rf"'valid' for {name}, but .*'mask'\) for the loss"):
        make_update(("collector", "mask"), **{name: BLOCKS[name]()})
    if name == "advantage":
        with pytest.raises(ValueError, match="'valid' for advantage"):
            make_update(("collector", "mask"), advantage=TensorDictSequential(BLOCKS[name]()))
    update = make_update("valid", **{name: BLOCKS[name]()})
    update.step.loss.loss_mask_key = "auto"  # after construction
    with pytest.raises(ValueError, match="loss_mask_key = 'valid'"):
        update(make_batch("valid"))


def test_the_time_dimension_must_be_the_last():
    update, batch = make_update(("collector", "mask")), make_batch(("collector", "mask"), 0.0)
    first = batch.transpose(0, 1)
    first.names = ["time", None]
    with pytest.raises(ValueError, match="PPOUpdate needs it"):
        update(first)
    assert "raw_reward" not in first["next"].keys()
    rows = LazyStackedTensorDict(*batch.unbind(1), stack_dim=1, stack_dim_name="time")
    assert update(rows)["frames"] == 8
