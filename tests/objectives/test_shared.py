"""Actor and critic that share an encoder: the loss takes the value head, or the whole critic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch.overrides import TorchFunctionMode
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import GAE, DualClipPPOLoss, PPOUpdate, TrainingStep
from tests.blocks import loss_on_path, make_minibatch
from tests.objectives.test_fast import losses_and_gradients

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
every_mode = pytest.mark.parametrize("functional", [False, True], ids=["modules", "functional"])
separate_or_not = pytest.mark.parametrize("separate_losses", [False, True], ids=["one", "separate"])


def make_networks() -> tuple[Any, Any, Any]:
    """Actor, value head, and the critic of the actor's encoder and the head."""
    torch.manual_seed(0)
    body = TensorDictModule(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), ["observation"], ["hidden"])
    network = nn.Sequential(nn.Linear(5, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictSequential(body, TensorDictModule(network, ["hidden"], ["loc", "scale"])),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    head = ValueOperator(nn.Linear(5, 1), in_keys=["hidden"])
    return actor.double(), head.double(), TensorDictSequential(body, head)


def stale_minibatch(actor: Any, *shape: int) -> TensorDict:
    """A minibatch whose ``"hidden"`` is of no use to anyone."""
    batch = make_minibatch(actor, *shape, dtype=torch.float64)
    batch["hidden"] = torch.full_like(batch["hidden"], torch.nan)
    return batch


def assert_alike(found: Any, expected: Any) -> None:
    """Compare losses, diagnostics and each loss's gradients."""
    losses = {name: found[0][name] for name in expected[0].keys()}
    torch.testing.assert_close(losses, expected[0].to_dict(), **CLOSE)
    for name, gradients in expected[1].items():
        torch.testing.assert_close(found[1][name], gradients, **CLOSE)


class CountsCalls(TorchFunctionMode):
    """Counts how often a linear layer is called."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.calls = layer.weight.data_ptr(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is F.linear and args[1].data_ptr() == self.weight
        return func(*args, **(kwargs or {}))


def calls_of(layer: nn.Linear, loss: nn.Module, batch: TensorDict) -> int:
    with CountsCalls(layer) as mode:
        loss(batch)
    return mode.calls


@separate_or_not
@every_mode
@pytest.mark.parametrize("fast", [False, True])
def test_a_value_head_learns_what_it_learns_in_torchrls_loss(fast, functional, separate_losses):
    actor, head, critic = make_networks()
    batch = stale_minibatch(actor, 16)
    options: Any = {"functional": functional, "separate_losses": separate_losses}
    theirs = ClipPPOLoss(actor, head, **options)
    ours, whole = (loss_on_path(actor, x, fast=fast, **options) for x in (head, critic))
    expected = losses_and_gradients(theirs, batch)
    assert_alike(losses_and_gradients(ours, batch), expected)
    assert_alike(losses_and_gradients(whole, batch), expected)
    layer = actor[0][0].module[0]
    assert [calls_of(layer, loss, batch) for loss in (theirs, ours, whole)] == [1, 1, 2]


@separate_or_not
@every_mode
@pytest.mark.parametrize("fast", [False, True])
def test_the_losses_may_be_run_backward_one_by_one_where_they_are_separate(
    fast, functional, separate_losses
):
    actor, head, _ = make_networks()
    options: Any = {"functional": functional, "separate_losses": separate_losses}
    loss = loss_on_path(actor, head, fast=fast, **options)
    out = loss(stale_minibatch(actor, 16))
    out["loss_critic"].backward(retain_graph=not separate_losses)
    of_encoder = [p for p in loss.parameters() if p.shape in ((5, 4), (5,))]
    assert [p.grad is None for p in of_encoder] == [separate_losses] * 2
    (out["loss_objective"] + out["loss_entropy"]).backward()
    assert all(p.grad is not None and p.grad.any() for p in of_encoder)


@separate_or_not
@every_mode
@pytest.mark.parametrize("fast", [False, True])
def test_a_value_head_under_a_mask(fast, functional, separate_losses):
    actor, head, _ = make_networks()
    batch = stale_minibatch(actor, 3, 8)
    valid = torch.arange(8) < torch.tensor([[8], [3], [1]])
    options: Any = {"functional": functional, "separate_losses": separate_losses}
    # Another number of samples draws others; torchrl's explained variance has a dimension.
    options |= {"entropy_bonus": False, "log_explained_variance": False}
    expected = losses_and_gradients(ClipPPOLoss(actor, head, **options), batch[valid])
    batch["collector", "mask"] = valid
    batch["observation"][~valid] = torch.nan
    loss = loss_on_path(actor, head, fast=fast, **options)
    assert_alike(losses_and_gradients(loss, batch), expected)


@separate_or_not
def test_a_value_head_in_a_compiled_loss(separate_losses):
    torch._dynamo.reset()
    actor, head, _ = make_networks()
    batch = stale_minibatch(actor, 16)
    options: Any = {"separate_losses": separate_losses, "entropy_bonus": False}
    loss = loss_on_path(actor, head, **options)
    expected = losses_and_gradients(loss, batch)
    compiled: Any = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = losses_and_gradients(compiled, batch)
    torch.testing.assert_close(found[0].to_dict(), expected[0].to_dict(), **CLOSE)
    for name, gradients in expected[1].items():
        for one, other in zip(found[1][name], gradients, strict=True):
            if one is not None:  # zeros of a graph, where an eager loss has none
                other = torch.zeros_like(one) if other is None else other
                torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
def test_a_value_head_reads_nothing_of_a_delayed_actor():
    actor, head, critic = make_networks()
    found = []
    for network in (critic, head):
        loss = DualClipPPOLoss(actor, network, delay_actor=True, kl_coeff=0.1)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.mul_(1.5)  # the delayed parameters stay
        found.append(losses_and_gradients(loss, stale_minibatch(actor, 16)))
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.div_(1.5)
    assert_alike(found[1], found[0])
    assert found[0][1]["loss_critic"][0].any()


@every_mode
def test_an_update_trains_and_saves_all_parameters_once(functional):
    def make_update(*, has_head: bool) -> PPOUpdate:
        actor, head, critic = make_networks()
        loss = DualClipPPOLoss(actor, head if has_head else critic, functional=functional)
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-2))
        gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
        return PPOUpdate(step, advantage=gae, epochs=2, minibatch_size=8, seed=0)

    batch = stale_minibatch(make_networks()[0], 2, 12).exclude("advantage", "value_target")
    done = torch.zeros(2, 12, 1, dtype=torch.bool)
    observation, reward = torch.randn(2, 12, 4).double(), torch.randn(2, 12, 1).double()
    ends = {"done": done, "terminated": done}
    batch["next"] = {"observation": observation, "reward": reward} | ends
    updates = [make_update(has_head=has_head) for has_head in (True, False)]
    for update in updates:
        torch.manual_seed(0)
        update.validate(batch)
        update(batch.clone())
    resumed = make_update(has_head=True)
    state = updates[0].state_dict()
    assert "value_network" not in state
    resumed.load_state_dict(state)
    # GAE sees what the loss has learned.
    found = [
        [*update.step.loss.parameters(), get_advantage(update, batch)]
        for update in (*updates, resumed)
    ]
    torch.testing.assert_close(found[1:], [found[0]] * 2, **CLOSE)


def get_advantage(update: PPOUpdate, batch: TensorDict) -> torch.Tensor:
    assert update.advantage is not None
    return update.advantage(batch.clone())["advantage"]
