"""Updates of actors with several heads, against a loop with torchrl's loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import set_composite_lp_aggregate
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    KLEarlyStopper,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
)
from tests.blocks import ppo_update
from tests.mixed import Mixed, make_mixed_actor, make_recurrent_actor

WARNS = "ignore:You are using a composite distribution, yet:UserWarning"  # torchrl's, if summed
pytestmark = pytest.mark.filterwarnings(WARNS)


summing = pytest.mark.parametrize("summed", [False, True], ids=["each", "summed"])


def make_critic() -> ValueOperator:
    torch.manual_seed(1)
    return ValueOperator(nn.Linear(3, 1), ["observation"])


def collected(actions: str, actor: Any, **options: Any) -> TensorDictBase:
    options = {"num_envs": 2, "frames_per_batch": 64} | options
    with GymCollector(lambda: Mixed(actions), actor, **options) as collector:
        collector.set_seed(0)
        torch.manual_seed(1)
        return collector.rollout()


LOSSES: dict[str, Any] = {"torchrl": ClipPPOLoss, "ours": DualClipPPOLoss}


def plain_loop(loss: Any, batch: TensorDictBase, epochs: int) -> dict[str, float]:
    """Train over the minibatches that PPOUpdate makes with the seed 0."""
    mask = batch.get(("collector", "mask"), None)
    frames = batch.exclude(("collector", "mask")).reshape(-1)
    frames = frames if mask is None else frames[mask.reshape(-1)]
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(5)  # the entropy of a TanhNormal is estimated from samples
    sums, count = {}, 0
    for _ in range(epochs):
        order = torch.randperm(len(frames), generator=generator)
        for part in order.split(20):
            losses = loss(frames[part])
            total = sum(losses[key] for key in losses.keys() if key.startswith("loss_"))
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            count += len(part)
            for key in ("loss_objective", "entropy", "kl_approx", "ESS"):
                sums[key] = sums.get(key, 0.0) + losses[key].item() * len(part)
    return {key: value / count for key, value in sums.items()}


CASES = [("dict", "torchrl", 1, False), ("deep", "torchrl", 2, True), ("dict", "ours", 1, True)]
CASES += [("nested", "ours", 2, False), ("deep", "ours", 2, True)]


@summing
@pytest.mark.parametrize(("actions", "kind", "epochs", "mask"), CASES)
def test_an_update_is_a_loop_with_torchrls_loss(
    actions: str, kind: str, epochs: int, mask: bool, summed: bool
):
    with set_composite_lp_aggregate(summed):
        compare_to_a_loop(actions, kind, epochs, mask, summed)


def compare_to_a_loop(actions: str, kind: str, epochs: int, mask: bool, summed: bool) -> None:
    actor, critic = make_mixed_actor(actions), make_critic()
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(collected(actions, actor))
    if mask:
        batch["collector", "mask"] = torch.rand(2, 32) < 0.8
    theirs = ClipPPOLoss(copy.deepcopy(actor), copy.deepcopy(critic), functional=False)
    theirs.set_keys(action=actor.dist_sample_keys)
    expected = plain_loop(theirs, batch, epochs)
    loss = LOSSES[kind](actor, critic, functional=False)
    if kind == "torchrl" and summed:
        loss.set_keys(action=actor.dist_sample_keys)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    update = ppo_update(loss, optimizer, epochs=epochs, minibatch_size=20, seed=0)
    update.validate(batch)
    torch.manual_seed(5)
    statistics = update(batch)
    for p, q in zip(loss.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)
    for key, value in expected.items():
        assert statistics[key] == pytest.approx(value, abs=1e-5, rel=1e-4)
    assert all(type(value) is float for value in statistics.values())
    names = [name for name in statistics if name.startswith("composite_entropy/")]
    heads = ["/".join(key if isinstance(key, tuple) else (key,)) for key in actor.dist_sample_keys]
    assert set(names) == (set() if summed else {f"composite_entropy/{x}_entropy" for x in heads})
    kls = {name for name in statistics if name.startswith("composite_kl/")}
    has_kls = kind != "torchrl" and not summed
    assert kls == ({f"composite_kl/{x}_kl" for x in heads} if has_kls else set())


@summing
@pytest.mark.parametrize("burn_in", [0, 3])
def test_recurrent_actors_with_several_heads(burn_in: int, summed: bool):
    with set_composite_lp_aggregate(summed):
        actor, critic = make_recurrent_actor(), make_critic()
        batch = collected("nested", actor, categorical_action_encoding=True)
        loss = DualClipPPOLoss(actor, critic, functional=False, dual_clip=3.0)
        update = ppo_update(
            loss,
            torch.optim.SGD(loss.parameters(), lr=0.0),
            stopper=KLEarlyStopper(0.01, when="epoch"),
            advantage=GAE(gamma=0.9, lmbda=0.8, value_network=critic),
            reward_normalizer=RewardNormalizer(0.9),
            batcher=SequenceBatcher(8, burn_in=3 - burn_in),
            minibatch_size=32,
            epochs=2,
        )
        update.batcher.burn_in = burn_in
        update.validate(batch)
        statistics = update(batch)
    assert (statistics["epochs"], statistics["stopped"]) == (2.0, 0.0)
    assert statistics["kl"] == pytest.approx(0.0, abs=1e-8)
    assert statistics["max_ratio"] == pytest.approx(1.0, abs=1e-4)
    if not summed:
        assert statistics["composite_kl/action/gear_kl"] == pytest.approx(0.0, abs=1e-8)


def advantages(actions: str, actor: Any, critic: Any) -> TensorDictBase:
    return GAE(gamma=0.9, lmbda=0.8, value_network=critic)(collected(actions, actor))


# -- validate ----------------------------------------------------------------------------


def make_update(loss: Any) -> PPOUpdate:
    return ppo_update(loss, torch.optim.SGD(loss.parameters(), lr=0.1), minibatch_size=16)


@pytest.mark.parametrize("kind", ["torchrl", "ours"])
@pytest.mark.parametrize("missing", ["action", "log_prob", "renamed", "not stored"])
def test_missing_entries_are_named_before_training(kind: str, missing: str):
    with set_composite_lp_aggregate(False):
        actor, critic = make_mixed_actor("nested"), make_critic()
        actor.module[-1].return_log_prob = missing != "not stored"
        batch = advantages("nested", actor, critic)
        loss: Any = LOSSES[kind](actor, critic)
        update = make_update(loss)
        message = r"\('action', '\w+_log_prob'\) is not in the batch.*return_log_prob=True"
        if missing == "action":
            loss.set_keys(action=[("action", "steer")])
            message = r"reads the action .*steer.*draws .*gear.*set_keys"
        elif missing == "log_prob":
            del batch["action", "gear_log_prob"]
        elif missing == "renamed":
            loss.set_keys(sample_log_prob=["a", "b"])
            message = r"'a' is not in the batch.*set_keys.*gear_log_prob"
        before = [p.clone() for p in loss.parameters()]
        for call in (update.validate, update):
            with pytest.raises(KeyError, match=message):
                call(batch)
        assert all(map(torch.equal, before, loss.parameters()))


def test_torchrls_loss_of_a_summed_log_probability_names_its_fix():
    with set_composite_lp_aggregate(True):
        actor, critic = make_mixed_actor("dict"), make_critic()
        batch = advantages("dict", actor, critic)
        loss: Any = ClipPPOLoss(actor, critic)
        update = make_update(loss)
        with pytest.raises(KeyError, match=r"actor draws .*'steer'.*loss.set_keys\(action="):
            update.validate(batch)
        loss.set_keys(action=["steer", "gear"])
        update.validate(batch)
        assert update(batch)["steps"] > 0
