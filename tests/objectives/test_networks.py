"""The networks of a loss: shared encoders, odd modules, and changes between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import TanhNormal, ValueOperator, recurrent_mode
from torchrl.objectives import ClipPPOLoss

from ppokit import GAE, DualClipPPOLoss, PPOUpdate, TrainingStep
from tests.blocks import IndependentNormal as UnknownNormal
from tests.blocks import actor_of, categorical_actor, make_critic
from tests.marks import slow
from tests.objectives.common import (
    assert_alike,
    assert_same,
    make_actor,
    make_minibatch,
    results,
    shared_networks,
)

every_mode = pytest.mark.parametrize("functional", [False, True], ids=["modules", "functional"])
separate_or_not = pytest.mark.parametrize("separate_losses", [False, True], ids=["one", "separate"])


def both(actor: Any, critic: Any, **options: Any) -> tuple[ClipPPOLoss, DualClipPPOLoss]:
    """torchrl's loss and ppokit's over the very same networks."""
    options = {"functional": False} | options
    return ClipPPOLoss(actor, critic, **options), DualClipPPOLoss(actor, critic, **options)


# -- shared encoders ---------------------------------------------------------------


def stale_minibatch(actor: Any, *shape: int) -> TensorDict:
    """A minibatch whose ``"hidden"`` is NaN, so that nothing may read it."""
    batch = make_minibatch(actor, *shape, dtype=torch.float64)
    batch["hidden"] = torch.full_like(batch["hidden"], torch.nan)
    return batch


class CountsCalls(TorchFunctionMode):
    """Counts how often a linear layer is called."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.calls = layer.weight.data_ptr(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is F.linear and args[1].data_ptr() == self.weight
        return func(*args, **(kwargs or {}))


@separate_or_not
@every_mode
def test_a_value_head_reads_what_the_actor_wrote(functional: bool, separate_losses: bool):
    actor, head, critic = shared_networks(torch.float64)
    batch = stale_minibatch(actor, 16)
    options: Any = {"functional": functional, "separate_losses": separate_losses}
    theirs, ours = both(actor, head, **options)
    whole = DualClipPPOLoss(actor, critic, **options)
    assert_alike(results(ours, batch), results(theirs, batch), tolerance=1e-12)
    assert_alike(results(whole, batch), results(theirs, batch), tolerance=1e-12)
    calls = []
    for loss in (theirs, ours, whole):
        with CountsCalls(actor[0][0].module[0]) as mode:
            loss(batch)
        calls.append(mode.calls)
    assert calls == [1, 1, 2]


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
def test_a_value_head_does_not_read_what_the_delayed_actor_writes():
    actor, head, critic = shared_networks(torch.float64)
    found = []
    for network in (critic, head):
        loss = DualClipPPOLoss(*copy.deepcopy((actor, network)), delay_actor=True, kl_coeff=0.1)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.mul_(1.5)  # the delayed parameters stay
        found.append(results(loss, stale_minibatch(actor, 16)))
    assert_alike(found[1], found[0], tolerance=1e-12)


@every_mode
@pytest.mark.parametrize("of", ["actor", "critic"])
def test_a_head_that_overwrites_the_shared_encoders_output(of: str, functional: bool):
    layers: dict[str, Any] = {of: nn.ReLU(inplace=True)}
    actor, _, critic = shared_networks(encoder=nn.Identity(), **layers)
    batch = make_minibatch(actor, 16)
    assert_same(*both(actor, critic, functional=functional), batch)


def test_a_separate_critic_loss_keeps_what_a_shared_encoder_assigns_to_a_buffer():
    class Counts(nn.Tanh):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(input)

    counter = Counts()
    actor, _, critic = shared_networks(encoder=counter)
    loss = DualClipPPOLoss(actor, critic, separate_losses=True)
    batch, before = make_minibatch(actor, 8), counter.calls.item()
    loss(batch)
    assert counter.calls.item() == before + 2


@every_mode
def test_an_update_trains_and_saves_all_parameters_of_a_shared_encoder_once(functional: bool):
    def make_update(*, has_head: bool) -> PPOUpdate:
        actor, head, critic = shared_networks(torch.float64)
        loss = DualClipPPOLoss(actor, head if has_head else critic, functional=functional)
        step = TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-2))
        gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
        return PPOUpdate(step, advantage=gae, epochs=2, minibatch_size=8, seed=0)

    batch = stale_minibatch(shared_networks(torch.float64)[0], 2, 12)
    batch = batch.exclude("advantage", "value_target")
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
    resumed.load_state_dict(updates[0].state_dict())
    found = []
    for update in (*updates, resumed):  # GAE sees what the loss has learned
        assert update.advantage is not None
        advantage = update.advantage(batch.clone())["advantage"]
        found.append([*update.step.loss.parameters(), advantage])
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-12, atol=1e-12)


# -- modules of all kinds ------------------------------------------------------------


class Feature(nn.Module):
    """Returns a dict, which torchrl writes as a TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": self.layer(x).tanh()}


class Two(nn.Linear):
    """Returns a second output."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), torch.zeros(3)


def module(network: Any, reads: Any, writes: list[Any], **options: Any) -> TensorDictModule:
    return TensorDictModule(network, [reads], writes, **options)


MODULES: dict[str, Callable[[], list[TensorDictModule]]] = {
    "reads a part of an entry": lambda: [
        module(Feature(), "observation", ["feature"]),
        module(nn.Linear(6, 5), ("feature", "a"), ["logits"]),
    ],
    "returns another TensorDict": lambda: [
        module(nn.Linear(4, 5), "observation", ["logits"], inplace="empty")
    ],
    "writes an output nowhere": lambda: [module(Two(4, 5), "observation", ["logits", "_"])],
    "is a function that overwrites its input": lambda: [
        module(nn.Linear(4, 5), "observation", ["raw"]),
        module(lambda x: x.mul_(2), "raw", ["logits"]),
    ],
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_the_actor(name: str):
    actor = categorical_actor(*MODULES[name]())
    batch = make_minibatch(actor, 8)
    with torch.no_grad():  # the batch holds what another policy wrote
        for parameter in actor.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert_same(*both(actor, make_critic()), batch)


@pytest.mark.filterwarnings("ignore:You are using a composite distribution, yet:UserWarning")
def test_the_networks_are_called_once():
    norm = nn.BatchNorm1d(4)
    network: Any = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(), NormalParamExtractor())
    keys: Any = [("params", "action", "loc"), ("params", "action", "scale")]
    with set_composite_lp_aggregate(True):
        options: Any = {"distribution_kwargs": {"distribution_map": {"action": UnknownNormal}}}
        network = TensorDictModule(network, ["observation"], keys)
        actor = actor_of(network, CompositeDistribution, ["params"], **options)
        batch = make_minibatch(actor.eval(), 16)
        actor.train()
        DualClipPPOLoss(actor, make_critic())(batch)
    assert norm.num_batches_tracked == 1


def test_networks_see_torchrls_modes():
    class Asking(nn.Linear):
        modes: set[Any]

        def forward(self, input: Tensor) -> Tensor:
            self.modes.add((exploration_type(), recurrent_mode()))
            return super().forward(input)

    network = Asking(4, 1)
    network.modes = set()
    actor = make_actor("categorical")
    loss = DualClipPPOLoss(actor, ValueOperator(network, in_keys=["observation"]))
    loss(make_minibatch(actor, 16))
    assert network.modes == {(ExplorationType.DETERMINISTIC, True)}


# -- changes between calls ---------------------------------------------------------


def make_losses(**options: Any) -> tuple[Any, Any, TensorDict]:
    """torchrl's loss and ppokit's over the same networks, and a batch for them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), NormalParamExtractor())
    actor = actor_of(TensorDictModule(network, ["observation"], ["loc", "scale"]), TanhNormal)
    batch = make_minibatch(actor, 16)
    batch["other"] = batch["observation"] + 1
    return *both(actor, make_critic(), **options), batch


def layers(loss: Any) -> nn.Sequential:
    return loss.actor_network[0].module


def freeze_weight(loss: Any) -> None:
    layer = layers(loss)[0]
    weight = layer.weight.detach() / 2
    del layer.weight
    layer.register_buffer("weight", weight)


def override_forward_of_wrapper(loss: Any) -> None:
    wrapper = loss.actor_network[0]

    def forward(tensordict: TensorDict) -> TensorDict:
        out = type(wrapper).forward(wrapper, tensordict)
        return out.set("scale", out["scale"] / 2)

    wrapper.forward = forward


def replace_get_dist(loss: Any) -> None:
    loss.actor_network[-1].get_dist = lambda td: UnknownNormal(td["loc"], 2 * td["scale"])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda loss: setattr(layers(loss)[0].weight, "data", torch.randn(6, 4)),
    "frozen weight": freeze_weight,
    "hook": lambda loss: layers(loss)[1].register_forward_hook(lambda _, args, out: out / 2),
    "forward": override_forward_of_wrapper,
    "in_keys": lambda loss: setattr(loss.critic_network, "in_keys", ["other"]),
    "get_dist": replace_get_dist,
}


@pytest.mark.filterwarnings("ignore:The training step runs eagerly. a module:RuntimeWarning")
@pytest.mark.parametrize("change", ["weight", *map(slow, [*CHANGES][1:])])
def test_a_compiled_step_notices_a_change(change: str):
    _, loss, batch = make_losses(entropy_bonus=False)
    eager, step = (
        TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.0), compile=options)
        for options in (False, {"backend": "eager"})
    )
    step(batch)
    before = step(batch)
    assert "compiled" in step.extra_repr()
    CHANGES[change](loss)
    torch.testing.assert_close(step(batch).to_dict(), eager(batch).to_dict())
    changed = "loss_critic" if change == "in_keys" else "kl"
    assert step(batch)[changed] != before[changed]


def test_a_global_hook_is_seen():
    theirs, ours, batch = make_losses()
    called = []

    def halve(module: nn.Module, args: Any, out: Any) -> Any:
        called.append(module)
        return out / 2 if isinstance(module, nn.Tanh) else None

    with nn.modules.module.register_module_forward_hook(halve):
        assert_same(theirs, ours, batch)
    assert ours in called
    assert_same(theirs, ours, batch)


def test_methods_of_subclasses_and_instances_are_called():
    class Halved(DualClipPPOLoss):
        def _critic_loss_inputs(self, target_return, state_value, old_state_value):
            return target_return / 2, state_value / 2, old_state_value

        def _get_entropy(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._get_entropy(*args, **kwargs)

        def forward(self, tensordict: Any) -> Any:
            return super().forward(tensordict).apply(lambda x: 3 * x)

    _, usual, batch = make_losses(loss_critic_type="l1")
    networks = usual.actor_network, usual.critic_network
    halved = Halved(*networks, loss_critic_type="l1")
    expected, out = results(usual, batch)[0], results(halved, batch)[0]
    torch.testing.assert_close(out["loss_critic"], 1.5 * expected["loss_critic"])
    torch.testing.assert_close(out["entropy"], 6 * expected["entropy"])
    forward = usual.forward
    usual.forward = lambda batch: forward(batch).apply(lambda x: 2 * x)
    torch.testing.assert_close(results(usual, batch)[0]["kl"], 2 * expected["kl"])
