"""A loss compiled in place calls its graph at once, but never one that something else asks for."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from ppokit import DualClipPPOLoss
from tests.blocks import make_actor, make_critic, make_minibatch

pytestmark = pytest.mark.filterwarnings(
    # torch._dynamo makes an instance of each autograd function that it traces.
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
    # tensordict asks for an option of torch._dynamo that is deprecated.
    "ignore:torch._dynamo.config.inline_inbuilt_nn_mod:FutureWarning",
    # torch._dynamo: looking at what comes into a graph.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


def make_loss(critic: nn.Module | None = None, **options: Any) -> tuple[Any, TensorDict]:
    """A compiled loss that has run once, and its batch."""
    torch._dynamo.reset()
    actor, value = make_actor("categorical"), make_critic()
    if critic is not None:
        value.module = critic
    loss = DualClipPPOLoss(actor, value, **{"functional": False} | options)
    batch = make_minibatch(actor, 16)
    loss.compile(backend="eager")
    call(loss, batch)
    return loss, batch


def is_asked(loss: Any, batch: TensorDictBase) -> bool:
    """Whether torch._dynamo was asked; what comes out is right in any case."""
    captured, asked = loss._compiled_outputs, []
    compiled = captured._compiled
    captured._compiled = lambda *args: asked.append(1) or compiled(*args)
    try:
        out = call(loss, batch)
    finally:
        captured._compiled = compiled
    expected = copy.deepcopy(loss)(batch)
    torch.testing.assert_close(out, expected.to_dict())
    return bool(asked)


def call(loss: Any, batch: TensorDictBase) -> dict[str, Tensor]:
    """Call what is compiled, also where the loss itself would go through torch's wrappers."""
    loss._current_plan()
    return loss._compiled_outputs(batch)


def test_a_second_call_goes_to_the_graph():
    loss, batch = make_loss(clip_value=0.2, critic_loss_clip=9.0, kl_coeff=0.1)
    assert not is_asked(loss, batch)
    assert not is_asked(loss, make_minibatch(loss.actor_network, 16, seed=1))
    loss.clip_epsilon, loss.entropy_coeff = 0.3, 0.5
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1)
    assert not is_asked(loss, batch)
    gradients = [
        torch.autograd.grad(
            sum(x for name, x in one(batch).items() if name.startswith("loss_")),
            list(one.parameters()),
        )
        for one in (loss, copy.deepcopy(loss))
    ]
    torch.testing.assert_close(*gradients)


def with_mask(batch: TensorDict) -> TensorDict:
    batch["shifted_valid"] = torch.arange(16) < 9
    return batch


def with_nested_mask(batch: TensorDict) -> TensorDict:
    batch["collector", "mask"] = torch.arange(16) < 9
    return batch


def in_double(batch: TensorDict) -> TensorDict:
    batch["advantage"] = batch["advantage"].double()
    return batch


def from_elsewhere(batch: TensorDict) -> TensorDict:
    batch["observation"] = batch["observation"].t().contiguous().t()
    return batch


def with_one_tensor_twice(batch: TensorDict) -> TensorDict:
    batch["value_target"] = batch["advantage"]
    return batch


@pytest.mark.parametrize(
    "change",
    [
        with_mask,
        pytest.param(in_double, marks=pytest.mark.slow),
        pytest.param(from_elsewhere, marks=pytest.mark.slow),
        pytest.param(with_one_tensor_twice, marks=pytest.mark.slow),
    ],
)
def test_another_batch_is_another_question(change: Callable[[TensorDict], TensorDict]):
    loss, batch = make_loss()
    assert is_asked(loss, change(batch.clone()))
    assert not is_asked(loss, batch)
    assert is_asked(loss, batch[:7].clone())
    assert is_asked(loss, TensorDict({**batch, "more": torch.zeros(16)}, [16]))


def test_masks_within_what_the_collector_wrote():
    loss, batch = make_loss()
    batch["collector", "traj_ids"] = torch.zeros(16, dtype=torch.long)
    assert is_asked(loss, batch)
    assert not is_asked(loss, batch)
    assert is_asked(loss, with_nested_mask(batch))
    assert is_asked(loss, batch)


def test_a_wrapped_loss_notices_a_mask_that_comes_later():
    torch._dynamo.reset()
    actor = make_actor("categorical")
    loss, batch = DualClipPPOLoss(actor, make_critic(), functional=False), make_minibatch(actor, 16)
    batch["collector", "traj_ids"] = torch.zeros(16, dtype=torch.long)
    compiled = torch.compile(loss, backend="eager")
    compiled(batch)
    with_nested_mask(batch)
    assert compiled(batch)["kl"] == copy.deepcopy(loss)(batch)["kl"]


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "in place"])
def test_parameters_of_the_old_policy_that_come_later(in_place: bool):
    torch._dynamo.reset()
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 4), ["observation"], [("policy", "logits")]),
        in_keys={"logits": ("policy", "logits")},
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    loss = DualClipPPOLoss(actor, make_critic(), functional=False, kl_coeff=1.0)
    batch = make_minibatch(actor, 16)
    batch["policy", "logits"] += torch.randn(16, 4)
    without = batch.exclude(("policy", "logits"))
    without["policy", "more"] = torch.zeros(16)
    compiled: Any = torch.compile(loss, backend="eager")
    if in_place:
        compiled = loss
        loss.compile(backend="eager")
    for one in (without, without, batch, batch, without):
        torch.testing.assert_close(compiled(one)["loss_kl"], copy.deepcopy(loss)(one)["loss_kl"])


def test_the_state_of_torch_is_another_question():
    loss, batch = make_loss()
    with torch.no_grad():
        assert is_asked(loss, batch)
        assert not loss(batch)["loss_objective"].requires_grad
    assert not is_asked(loss, batch)
    with torch.compiler.set_stance("force_eager"):
        assert is_asked(loss, batch)
    torch.use_deterministic_algorithms(True)
    try:
        assert is_asked(loss, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss(batch)["loss_objective"].requires_grad


def test_parameters_of_another_kind_are_another_question():
    loss, batch = make_loss(nn.Linear(4, 1, bias=False))
    assert not is_asked(loss, batch)
    weight = loss.critic_network.module.weight
    weight.requires_grad_(False)
    assert is_asked(loss, batch)
    weight.requires_grad_(True)
    assert loss(batch)["loss_critic"].requires_grad
    loss.critic_network.module.bias = nn.Parameter(torch.ones(1))
    assert is_asked(loss, batch)


class Remembering(nn.Module):
    """Does something beside what it returns."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.what, self.scale, self.count, self.log = what, 2.0, 0, []

    def forward(self, input: Tensor) -> Tensor:
        out = self.scale * self.layer(input)
        if self.what == "counts":
            self.count += 1
        elif self.what == "logs":
            self.log.append(1)
        elif self.what == "keeps":
            self.last = out.detach()
        return out


@pytest.mark.parametrize("what", ["counts", "logs", "keeps"])
def test_what_a_network_does_beside_is_done(what: str):
    loss, batch = make_loss(Remembering(what))
    network = loss.critic_network.module
    for done in range(2, 5):
        network.last = None
        call(loss, batch)
        assert what != "counts" or network.count == done
        assert what != "logs" or len(network.log) == done
        assert what != "keeps" or network.last is not None


def test_constants_of_networks_are_watched():
    loss, batch = make_loss(Remembering("nothing"))
    assert not is_asked(loss, batch)
    loss.critic_network.module.scale = 3.0
    assert is_asked(loss, batch)


def test_batch_normalisation_and_dropout():
    loss, batch = make_loss(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    norm = loss.critic_network.module[1]
    before = norm.running_mean.clone()
    loss(batch)
    assert norm.num_batches_tracked == 2
    assert not torch.equal(norm.running_mean, before)
    norm.eval()
    assert is_asked(loss, batch)
    assert norm.num_batches_tracked == 2


@pytest.mark.slow
def test_functional_losses_and_graph_breaks_are_left_to_torch():
    class Breaking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(input)

    for loss, batch in (make_loss(functional=True), make_loss(Breaking(4, 1))):
        assert is_asked(loss, batch)


def test_parameters_in_two_places_are_left_to_torch():
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    loss, batch = make_loss(nn.Sequential(first, second, nn.Linear(4, 1)))
    assert is_asked(loss, batch)


def test_no_batch_is_kept():
    loss, batch = make_loss()
    kept = weakref.ref(batch["observation"])
    del batch
    gc.collect()
    assert kept() is None
    assert loss._compiled_outputs._known
