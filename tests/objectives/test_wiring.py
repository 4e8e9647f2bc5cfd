"""A loss sees in each call how its networks are wired then."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.hooks import RemovableHandle
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator, recurrent_mode

from ppokit import DualClipPPOLoss, TrainingStep
from tests.blocks import loss_on_path, make_critic, make_minibatch
from tests.objectives.test_fast import assert_same, make_actor, takes_tensors


def make_losses(**options: Any) -> tuple[Any, Any, TensorDict]:
    """The loss without and with the fast path, over the same networks, and a batch for them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = make_critic()
    slow, fast = (
        loss_on_path(actor, critic, functional=False, fast=fast, **options)
        for fast in (False, True)
    )
    return slow, fast, make_minibatch(actor, 16)


def layers(loss: Any) -> nn.Sequential:
    return loss.actor_network[0].module


def replace_network(loss: Any) -> None:
    loss.actor_network[0].module = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor())


def replace_layer(loss: Any) -> None:
    layers(loss)[1] = nn.ReLU()


def add_layer(loss: Any) -> None:
    layers(loss).insert(2, nn.Tanh())


def replace_weight(loss: Any) -> None:
    layers(loss)[0].weight = nn.Parameter(torch.randn(6, 4))


def forget_bias(loss: Any) -> None:
    layers(loss)[0].register_parameter("bias", None)


def freeze_weight(loss: Any) -> None:
    layer = layers(loss)[0]
    weight = layer.weight.detach() / 2
    del layer.weight
    layer.register_buffer("weight", weight)


def parametrize(loss: Any) -> None:
    parametrizations.weight_norm(layers(loss)[0])


def hook_layer(loss: Any) -> RemovableHandle:
    return layers(loss)[1].register_forward_hook(lambda _, args, out: out / 2)


def hook_layer_before(loss: Any) -> RemovableHandle:
    return layers(loss)[0].register_forward_pre_hook(lambda _, args: (args[0] / 2,))


def hook_wrapper(loss: Any) -> RemovableHandle:
    def halve(_: Any, args: Any, out: TensorDict) -> TensorDict:
        return out.set("scale", out["scale"] / 2)

    return loss.actor_network[0].register_forward_hook(halve)


def hook_backward(loss: Any) -> None:
    layers(loss)[2].register_full_backward_hook(lambda _, before, after: (before[0] / 2,))


def override_forward(loss: Any) -> None:
    layer = layers(loss)[1]
    layer.forward = lambda x: x.sin()


def override_forward_of_wrapper(loss: Any) -> None:
    wrapper = loss.actor_network[0]

    def forward(tensordict: TensorDict) -> TensorDict:
        out = type(wrapper).forward(wrapper, tensordict)
        return out.set("scale", out["scale"] / 2)

    wrapper.forward = forward


def read_elsewhere(loss: Any) -> None:
    loss.critic_network.in_keys = ["other"]


def bound_actions(loss: Any) -> None:
    loss.actor_network[1].distribution_kwargs["high"] = 3.0


def replace_critic(loss: Any) -> None:
    loss.critic_network = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])


CHANGES = [
    *(replace_network, replace_layer, add_layer, replace_weight, forget_bias, freeze_weight),
    parametrize,
    *(hook_layer, hook_layer_before, hook_wrapper, hook_backward, override_forward),
    *(override_forward_of_wrapper, read_elsewhere, bound_actions),
]
# Compiled, a change takes seconds.
IN_EACH_RUN = (replace_weight, hook_layer, override_forward_of_wrapper, read_elsewhere)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_networks_is_seen(change: Callable[[Any], None]):
    slow, fast, batch = make_losses()
    batch["other"] = batch["observation"] + 1
    before = fast(batch)
    change(fast)
    assert_same(slow, fast, batch, tolerance=3e-6)
    assert takes_tensors(fast)
    torch.manual_seed(0)
    after = fast(batch)
    if change not in (hook_backward, parametrize):
        changed = "loss_critic" if change is read_elsewhere else "kl"
        assert after[changed] != before[changed]


def test_a_global_hook_is_seen():
    slow, fast, batch = make_losses()
    fast(batch)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out / 2 if isinstance(module, nn.Tanh) else None
    )
    try:
        assert_same(slow, fast, batch, tolerance=3e-6)
    finally:
        handle.remove()
    assert_same(slow, fast, batch, tolerance=3e-6)


def test_the_networks_of_the_loss_can_be_replaced():
    slow, fast, batch = make_losses()
    fast(batch)
    replace_critic(fast)
    slow.critic_network = fast.critic_network
    assert_same(slow, fast, batch, tolerance=3e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", "sum"),
        ("reduction", "none"),
        ("normalize_advantage", True),
        ("loss_critic_type", "l2"),
        ("entropy_bonus", False),
        ("samples_mc_entropy", 5),
        ("separate_losses", True),
        ("log_explained_variance", False),
        ("loss_mask_key", "valid"),
        ("clip_epsilon", 0.01),
    ],
)
def test_settings_can_be_changed(name: str, value: Any):
    slow, fast, batch = make_losses()
    batch["valid"] = torch.arange(16) < 10
    fast(batch)
    for loss in (slow, fast):
        setattr(loss, name, value)
    assert_same(slow, fast, batch, tolerance=3e-6)


def test_parameters_that_separate_losses_turn_into_buffers():
    torch.manual_seed(0)
    body = TensorDictModule(nn.Linear(4, 5), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Linear(5, 2), ["hidden"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(body, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(body, ValueOperator(nn.Linear(5, 1), in_keys=["hidden"]))
    batch = make_minibatch(actor, 16)
    slow, fast = (
        loss_on_path(actor, critic, separate_losses=True, fast=fast) for fast in (False, True)
    )
    assert_same(slow, fast, batch, tolerance=3e-6)


def test_names_of_entries_can_be_changed():
    slow, fast, batch = make_losses()
    fast(batch)
    batch.rename_key_("advantage", "gain")
    for loss in (slow, fast):
        loss.set_keys(advantage="gain")
    assert_same(slow, fast, batch, tolerance=3e-6)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_has_a_plan_of_its_own(how: Callable[[Any], Any]):
    slow, fast, batch = make_losses()
    fast(batch)
    copied = how(fast)
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.add_(1)
    assert_same(how(slow), how(fast), batch, tolerance=3e-6)
    torch.manual_seed(0)
    expected = make_losses()[1](batch)["loss_critic"]
    assert torch.equal(copied(batch)["loss_critic"], expected)


def test_the_losses_can_be_run_backward_one_by_one():
    slow, fast, batch = make_losses(entropy_bonus=False)
    found = []
    for loss in (slow, fast):
        loss.zero_grad()
        out = loss(batch)
        out["loss_critic"].backward()
        assert all(p.grad is None for p in loss.actor_network.parameters())
        out["loss_objective"].backward()
        found.append([p.grad.clone() for p in loss.parameters()])
    torch.testing.assert_close(*found)


# -- past the wrappers of torch and torchrl --------------------------------------------


class Asking(nn.Linear):
    """Tells in which modes it was called."""

    modes: set[Any]

    def forward(self, input: Tensor) -> Tensor:
        self.modes.add((exploration_type(), recurrent_mode()))
        return super().forward(input)


def test_modules_see_torchrls_modes():
    actor = make_actor("categorical")
    network = Asking(4, 1)
    network.modes = set()
    critic = ValueOperator(network, in_keys=["observation"])
    fast = DualClipPPOLoss(actor, critic, functional=False)
    fast(make_minibatch(actor, 16))
    assert network.modes == {(ExplorationType.DETERMINISTIC, True)}


def test_a_forward_of_ones_own_is_called():
    class Doubled(DualClipPPOLoss):
        def forward(self, tensordict: Any) -> Any:
            return super().forward(tensordict).apply(lambda x: 2 * x)

    actor, critic = make_actor("categorical"), make_critic()
    batch = make_minibatch(actor, 16)
    once = DualClipPPOLoss(actor, critic, functional=False)(batch)
    doubled = Doubled(actor, critic, functional=False)
    torch.testing.assert_close(doubled(batch)["loss_critic"], 2 * once["loss_critic"])


def test_a_forward_of_one_loss_alone_is_called():
    _, fast, batch = make_losses()
    forward = fast.forward
    fast.forward = lambda batch: forward(batch).apply(lambda x: 2 * x)
    expected = forward(batch)["loss_critic"]
    torch.testing.assert_close(fast(batch)["loss_critic"], 2 * expected)


def test_global_hooks_see_the_loss():
    _, fast, batch = make_losses()
    called = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(module)
    )
    try:
        fast(batch)
    finally:
        handle.remove()
    assert fast in called


def test_hooks_on_the_loss_are_called():
    _, fast, batch = make_losses()
    called = []
    fast.register_forward_hook(lambda *_: called.append("after"))
    fast.register_forward_pre_hook(lambda *_: called.append("before"))
    fast(batch)
    assert called == ["before", "after"]


def test_the_loss_takes_its_entries_as_arguments():
    _, fast, batch = make_losses(entropy_bonus=False)
    fast.in_keys = ["observation", "action", "action_log_prob", "advantage", "value_target"]
    entries = {key: batch[key] for key in fast.in_keys}
    fast.select_out_keys("loss_objective")
    assert torch.equal(fast(**entries), fast(batch)["loss_objective"])


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_graph_is_captured_of_what_the_networks_are_then():
    torch._dynamo.reset()
    slow, fast, batch = make_losses(entropy_bonus=False)
    replace_layer(fast)
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    expected = slow(batch)
    torch.testing.assert_close(compiled(batch)["loss_objective"], expected["loss_objective"])


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_wrapped_loss_notices_another_layer():
    torch._dynamo.reset()
    _, loss, batch = make_losses(entropy_bonus=False)
    compiled = torch.compile(loss, backend="eager")
    before = compiled(batch)["loss_objective"]
    replace_layer(loss)
    after = compiled(batch)["loss_objective"]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, copy.deepcopy(loss)(batch)["loss_objective"])


# torch: looking at what a backward hook wraps
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:The training step runs eagerly. a module:RuntimeWarning")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=[] if change in IN_EACH_RUN else pytest.mark.slow)
        for change in CHANGES
    ],
)
def test_a_compiled_step_notices_a_change(change: Callable[[Any], None]):
    slow, fast, batch = make_losses(entropy_bonus=False)
    batch["other"] = batch["observation"] + 1
    eager, step = (
        TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.0), compile=options)
        for loss, options in ((slow, False), (fast, {"backend": "eager"}))
    )
    step(batch)
    before = step(batch)
    assert "compiled" in step.extra_repr()
    change(fast)
    torch.testing.assert_close(step(batch).to_dict(), eager(batch).to_dict())
    if change not in (hook_backward, parametrize):
        changed = "loss_critic" if change is read_elsewhere else "kl"
        assert step(batch)[changed] != before[changed]


def test_global_hooks_come_and_go():
    _, loss, batch = make_losses(entropy_bonus=False)
    before = loss(batch)["kl"]
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
    for _ in range(3):
        loss(batch)
        assert called
        called.clear()
    handle.remove()
    assert torch.equal(loss(batch)["kl"], before)
    assert not called


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_torchrls_modes_hold_in_a_graph():
    torch._dynamo.reset()
    seen = []

    class Mode(nn.Module):
        def forward(self, x: Any) -> Any:
            deterministic = exploration_type() is ExplorationType.DETERMINISTIC
            return x * (2 if deterministic and recurrent_mode() else 1)

    actor = make_actor("normal")
    actor[0].module = nn.Sequential(Mode(), actor[0].module)
    loss, batch = DualClipPPOLoss(actor, make_critic(), functional=False), make_minibatch(actor, 8)
    expected = loss(batch)
    compiled = torch.compile(loss, backend=lambda graph, _: seen.append(graph) or graph)
    torch.testing.assert_close(compiled(batch).to_dict(), expected.to_dict())
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compile_of_nn_module_is_not_bypassed():
    slow, fast, batch = make_losses(entropy_bonus=False)
    for loss in (slow, fast):
        torch._dynamo.reset()
        graphs, expected = [], loss(batch)
        loss.compile(backend=lambda graph, _, own=graphs: own.append(graph) or graph)
        for own in (loss, copy.deepcopy(loss)):  # the copy is not compiled
            torch.testing.assert_close(own(batch).to_dict(), expected.to_dict())
        assert len(graphs) == 1
