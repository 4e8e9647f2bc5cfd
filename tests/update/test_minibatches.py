"""Minibatches, losses that write to them, norms of gradients, groups of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from ppokit import SequenceBatcher, TrainingStep
from tests.blocks import make_minibatch, ppo_update
from tests.update.parts import make_loss, parameters_of


class Plain(TensorDictModuleBase):
    """A loss with given gradients, which keeps its minibatches."""

    def __init__(self, gradients: Sequence[torch.Tensor] = (torch.ones(()),)) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x"], ["loss_any"]
        self.gradients = list(gradients)
        self.weights = nn.ParameterList(torch.ones_like(x.contiguous()) for x in gradients)
        self.seen: list[TensorDictBase] = []

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        self.seen.append(minibatch.clone())
        products = [(w * g).sum() for w, g in zip(self.weights, self.gradients, strict=True)]
        return TensorDict({"loss_any": torch.stack(products).sum()})


class Sizes(Plain):
    """Notes the bytes of the memory that its minibatch is a part of."""

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        self.seen.append(minibatch["x"].untyped_storage().nbytes())
        return TensorDict({"loss_any": self.weights[0].sum()})


@pytest.mark.parametrize("shape", [(84, 84, 4), (4,)])
def test_few_bytes_are_gathered_together(shape: tuple[int, ...]):
    """An epoch over images does not copy the whole batch."""
    loss = Sizes()
    batch = TensorDict({"x": torch.zeros(1024, *shape, dtype=torch.uint8)}, [1024])
    update_plain(loss, batch, minibatch_size=64)
    whole = batch["x"].untyped_storage().nbytes()
    assert len(loss.seen) == 16
    assert max(loss.seen) == whole if len(shape) == 1 else max(loss.seen) <= 2**23 < whole


def update_plain(loss: nn.Module, batch: TensorDictBase | None = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.0)
    batch = TensorDict({"x": torch.arange(10)}, [10]) if batch is None else batch
    return ppo_update(loss, optimizer, **({"epochs": 1} | options))(batch)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("frames", "size"), [(10, 4), (150_000, 20_000)])
def test_each_frame_is_in_one_minibatch_of_an_epoch(frames: int, size: int, shuffle: bool):
    loss, x = Plain(), torch.arange(frames)
    batch = TensorDict({"x": x, "y": {"z": torch.randn(frames, 2)}}, [frames])
    loss.in_keys = ["x", ("y", "z")]
    update_plain(loss, batch, epochs=2, minibatch_size=size, shuffle=shuffle)
    lengths = [size] * (frames // size) + [frames % size]
    assert [len(minibatch) for minibatch in loss.seen] == lengths * 2
    orders = torch.cat(loss.seen).split(frames)
    for order in orders:
        assert torch.equal(order["y", "z"], batch["y", "z"][order["x"]])
        assert torch.equal(order["x"].sort().values, x)
        assert torch.equal(order["x"], x) is not shuffle
    assert torch.equal(orders[0]["x"], orders[1]["x"]) is not shuffle


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"minibatch_size": 5}])
def test_a_loss_that_works_in_place_leaves_the_batch_unchanged(options: dict[str, Any]):
    class InPlace(Plain):
        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            losses = super().forward(minibatch)
            minibatch["x"].add_(100)
            minibatch["more"] = minibatch["x"]
            return losses

    loss, batch = InPlace(), TensorDict({"x": torch.arange(10)}, [10])
    update_plain(loss, batch, epochs=2, **options)
    assert batch["x"].tolist() == list(range(10))
    assert {*batch.keys()} == {"x"} == {key for each in loss.seen for key in each.keys()}
    for epoch in torch.cat([each["x"] for each in loss.seen]).split(10):
        assert sorted(epoch.tolist()) == list(range(10))


@pytest.mark.parametrize("sizes", [(), (0, 1), (31, 1), (5000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_all_gradients(sizes: tuple[int, ...], dtype: torch.dtype):
    gradients = [torch.randn(size, dtype=dtype) for size in (*sizes, 1)]
    gradients.append(torch.randn(6, 4, dtype=dtype).T[1:])  # not contiguous
    expected = torch.cat([x.flatten() for x in gradients]).double().norm().item()
    assert update_plain(Plain(gradients))["grad_norm"] == pytest.approx(expected, rel=1e-6)
    for odd in (math.nan, math.inf):
        odd_one = Plain([*gradients, torch.tensor([1.0, odd])])
        norm = update_plain(odd_one, nonfinite=None)["grad_norm"]
        assert norm == pytest.approx(odd, nan_ok=True)


# -- optimizers ------------------------------------------------------------------------


def test_groups_that_are_added_later_are_clipped():
    found = []
    for later in (False, True):
        loss = make_loss()
        actor, critic = loss.actor_network.parameters(), loss.critic_network.parameters()
        optimizer = torch.optim.SGD(actor if later else [*actor, *critic], lr=1.0, fused=True)
        loss.critic_network.requires_grad_(not later)
        update = ppo_update(loss, optimizer, max_grad_norm=1e-2, epochs=1, seed=0)
        if later:
            loss.critic_network.requires_grad_(True)
            optimizer.add_param_group({"params": critic})
        statistics = update(make_minibatch(loss.actor_network, 32))
        found.append((parameters_of(loss), torch.tensor(statistics["grad_norm"])))
    torch.testing.assert_close(*found)


def test_a_parameter_twice_in_a_group_raises():
    """As the encoder in [*actor.parameters(), *critic.parameters()]: torch would step it twice."""
    loss = make_loss()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([*loss.parameters(), *loss.parameters()], lr=0.1)
    step = TrainingStep(loss, optimizer)
    with pytest.raises(ValueError, match=r"twice in a group.*loss\.parameters\(\)"):
        step(make_minibatch(loss.actor_network, 8, seed=0))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("amp_dtype", [None, torch.float16])
def test_gradients_of_an_interrupted_update_do_not_count(amp_dtype: Any):
    found = []
    for interrupted in (False, True):
        loss = make_loss()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        update = ppo_update(loss, optimizer, amp_dtype=amp_dtype, seed=0, epochs=2)
        batch, order = make_minibatch(loss.actor_network, 32), update.generator.get_state()
        if interrupted:
            loss(batch.clone())["loss_objective"].backward()
            hook = optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                update(batch.clone())
            hook.remove()
            update.generator.set_state(order)
        update(batch.clone())
        found.append(parameters_of(loss))
    assert torch.equal(*found)


@pytest.mark.parametrize("seq_len", [4, 128, None])
@pytest.mark.parametrize("size", [1, 30, 64, 1000])
@pytest.mark.filterwarnings("ignore:minibatch_size=1000 is larger:UserWarning")
def test_a_minibatch_of_sequences_counts_valid_frames(seq_len: int | None, size: int):
    """However long sequences may be: episodes here have 3 to 9 steps."""
    torch.manual_seed(0)
    done = torch.zeros(4, 64, 1, dtype=torch.bool)
    for row in range(4):
        done[row, 2 + row :: 3 + 2 * row] = True
    mask = torch.ones(4, 64, dtype=torch.bool)
    mask[:, -6:] = False
    entries = {
        "x": torch.arange(256).view(4, 64),
        "is_init": done.roll(1, 1),
        "next": {"done": done},
    }
    batch = TensorDict(entries | {"collector": {"mask": mask}}, [4, 64], names=[None, "time"])
    batcher = SequenceBatcher(seq_len)
    sequences, frames = len(batcher(batch)), int(mask.sum())
    loss = Plain()
    loss.in_keys = ["x", ("collector", "mask")]
    statistics = update_plain(loss, batch, minibatch_size=size, batcher=batcher)
    count = min(sequences, math.ceil(frames / size))
    assert statistics["minibatches"] == len(loss.seen) == count
    seen = [part["x"][part["collector", "mask"]] for part in loss.seen]
    assert torch.cat(seen).sort().values.equal(batch["x"][mask])
    assert max(map(len, seen)) <= frames / count + 9
