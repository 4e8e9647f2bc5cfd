"""actor_critic with a memory, and its collection on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    PPOUpdate,
    SequenceBatcher,
    TensorActor,
    TrainingStep,
)
from ppokit.networks import actor_critic
from tests.blocks import actor_of
from tests.recurrent.agents import DOORS

MEMORIES = ["lstm", "gru"]
every_memory = pytest.mark.parametrize("memory", MEMORIES)
every_sharing = pytest.mark.parametrize("shared", [True, False])


def collect(env: Any, policy: Any, *, frames: int = 80, **options: Any) -> Any:
    with GymCollector(env, policy, frames_per_batch=frames, num_envs=2, **options) as collector:
        collector.set_seed(0)
        assert "on tensors" in repr(collector)
        return [collector.rollout().clone() for _ in range(2)][-1]


def replay(networks: Any, batch: Any) -> Tensor:
    """The memory's states after each step, by torch's own network in a loop, from the stored."""
    module = next(x for x in networks.actor.modules() if isinstance(x, (LSTMModule, GRUModule)))
    network: Any = module.lstm if isinstance(module, LSTMModule) else module.gru
    encode: Any = networks.actor.module[0][0].module
    keys = module.in_keys[1:-1]
    found = []
    with torch.no_grad():
        features = encode(batch["observation"])
        states = [batch[key][:, 0].transpose(0, 1).contiguous() for key in keys]
        for t in range(batch.shape[1]):
            states = [x.masked_fill(batch["is_init"][:, t].view(1, -1, 1), 0) for x in states]
            given = tuple(states) if len(states) == 2 else states[0]
            _, after = network(features[:, t : t + 1], given)
            states = [*after] if len(states) == 2 else [after]
            found.append(states[0].transpose(0, 1))
    return torch.stack(found, 1)


@every_memory
@every_sharing
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", DOORS])
def test_collected_states_and_the_first_kl(env: str, memory: str, shared: bool):
    torch.manual_seed(0)
    networks = actor_critic(env, (16,), memory=memory, memory_size=8, shared=shared)
    batch = collect(env, networks.policy)
    assert not batch["is_init"][:, 0].any()  # rows continue from the batch before
    key = next(key for key in batch["next"].keys() if key.startswith("recurrent_state"))
    torch.testing.assert_close(batch["next", key], replay(networks, batch), atol=1e-6, rtol=1e-5)
    if env == DOORS:  # a part of the choices is closed
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    loss = DualClipPPOLoss(networks.actor, networks.value)
    before = [p.detach().clone() for p in loss.parameters()]
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-3)),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=networks.critic),
        batcher=SequenceBatcher(8),
        minibatch_size=40,
    )
    assert abs(update(batch)["first_kl"]) < 1e-6
    moved = [not torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True)]
    assert all(moved)


@every_memory
@pytest.mark.parametrize("detach", [None, True, False])
def test_a_detached_critic_trains_no_shared_layer(memory: str, detach: bool | None):
    _, actor, value, critic = actor_critic(
        "CartPole-v1", memory=memory, shared=True, detach_critic=detach
    )
    batch = collect("CartPole-v1", actor)
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    loss = DualClipPPOLoss(actor, value)
    loss(SequenceBatcher(8)(batch))["loss_critic"].backward()
    own = {id(p) for p in value.parameters()}
    assert all(p.grad is not None for p in value.parameters())
    reached = [p.grad is not None for p in loss.parameters() if id(p) not in own]
    assert any(reached) == (detach is False)


def test_an_encoder_without_memory_is_trained_by_both_losses_unless_it_is_detached():
    for detach in (None, True):
        actor, value, _ = actor_critic("CartPole-v1", shared=True, detach_critic=detach)
        features = actor(GymCollector("CartPole-v1", actor, frames_per_batch=8).rollout())
        value(features)["state_value"].sum().backward()
        first = next(actor.parameters())
        assert (first.grad is None) == (detach is True)


def test_images_pass_an_encoder_before_the_memory():
    pair = spaces.Box(0, 255, (40, 40, 3), "uint8"), spaces.Discrete(3)
    networks = actor_critic(pair, (), encoder="nature", memory="lstm", shared=True)
    batch = torch.zeros(2, 40, 40, 3, dtype=torch.uint8)
    lstm: Any = networks.actor.module[0][1]
    assert networks.actor.module[0][0].module(batch).shape == (2, 512)
    assert lstm.lstm.input_size == 512


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "memory": ({"memory": "mamba"}, ValueError, "memory must be one of"),
    "size": ({"memory": "lstm", "memory_size": 0}, ValueError, "memory_size must be numbers"),
    "detach": ({"memory": "lstm", "detach_critic": True}, ValueError, "is for shared=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit_raise(name: str):
    options, kind, said = WRONG[name]
    with pytest.raises(kind, match=said):
        actor_critic("CartPole-v1", **options)


def make_actor(kind: type, **options: Any) -> Any:
    memory = kind(input_size=3, hidden_size=4, in_key="x", out_key="y", **options)
    width = 8 if options.get("bidirectional") else 4
    return actor_of(
        TensorDictSequential(memory, TensorDictModule(nn.Linear(width, 2), ["y"], ["logits"])),
        torch.distributions.Categorical,
    )


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"bias": False}], ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (3, 5)])
def test_one_step_on_tensors_equals_the_module(kind: type, options: Any, shape: tuple[int, ...]):
    torch.manual_seed(0)
    actor = make_actor(kind, **options)
    memory = actor.module[0][0]
    states = [torch.randn(*shape, options.get("num_layers", 1), 4) for _ in memory.in_keys[1:-1]]
    given = [torch.randn(*shape, 3), *states, torch.rand(*shape, 1) < 0.5]
    batch = TensorDict(dict(zip(memory.in_keys, given, strict=True)), shape)
    assert "called on tensors" in repr(TensorActor(actor))
    torch.manual_seed(1)
    expected = actor(batch.copy())
    torch.manual_seed(1)
    found = TensorActor(actor)(batch.copy())
    assert {*found.keys(True, True)} == {*expected.keys(True, True)}
    for key in found.keys(True, True):
        torch.testing.assert_close(found[key], expected[key])


class Doubles(LSTMModule):
    """Doubles its input."""

    def forward(self, tensordict: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        tensordict["x"] = 2 * tensordict["x"]
        return super().forward(tensordict)


OTHERS: dict[str, dict[str, Any]] = {
    "hook": {},
    "subclass": {},
    "dropout": {"num_layers": 2, "dropout": 0.5},
    "bidirectional": {"bidirectional": True},
    "python": {"python_based": True},
}


@pytest.mark.parametrize("how", OTHERS)
def test_modules_that_do_more_are_called_as_they_are(how: str):
    actor = make_actor(Doubles if how == "subclass" else LSTMModule, **OTHERS[how])
    if how == "hook":
        actor.module[0][0].lstm.register_forward_hook(lambda *_: None)
    assert "as a TensorDictModule" in repr(TensorActor(actor))
    assert how != "dropout" or "on tensors" in repr(TensorActor(actor.eval()))


def test_a_critic_before_the_actor_is_called_on_tensors_too():
    networks = actor_critic("CartPole-v1", memory="gru")
    policy: Any = TensorDictSequential(networks.critic, networks.actor)
    torch.manual_seed(0)
    batch = collect("CartPole-v1", policy)
    torch.manual_seed(0)
    expected = collect("CartPole-v1", networks.policy)
    assert {*batch.keys(True, True)} == {*expected.keys(True, True)}
    torch.testing.assert_close(batch["state_value"], expected["state_value"])


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_states_whose_names_begin_with_an_underscore(kind: type):
    """Collectors carry them, and leave them out of the batch, as torchrl's do."""
    found = []
    for name in ("_state", "state"):
        torch.manual_seed(0)
        states = [f"{name}_{i}" for i in range(2 if kind is LSTMModule else 1)]
        keys = ["observation", *states, "is_init"], ["y", *(("next", x) for x in states)]
        memory = kind(input_size=4, hidden_size=4, in_keys=keys[0], out_keys=keys[1])
        head = TensorDictModule(nn.Linear(4, 2), ["y"], ["logits"])
        actor = actor_of(TensorDictSequential(memory, head), torch.distributions.Categorical)
        batch = collect("CartPole-v1", actor, categorical_action_encoding=True)
        assert (states[0] in batch.keys()) == (name == "state")
        given = {x: torch.ones(3, 1, 4) for x in states}
        given |= {"observation": torch.ones(3, 4), "is_init": torch.zeros(3, 1, dtype=torch.bool)}
        step = TensorActor(actor)(TensorDict(given, [3]))
        found.append((batch["y"], step["y"], step["next", states[0]]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_sequences_are_cut_once_and_after_the_advantage(memory: Any):
    """All frames of a sequence hold the state of its first one."""
    torch.manual_seed(0)
    networks = actor_critic("CartPole-v1", (8,), memory=memory, memory_size=4, shared=True)
    with GymCollector("CartPole-v1", networks.policy, frames_per_batch=64) as collector:
        batch = collector.rollout()
    gae, cut = GAE(gamma=0.9, lmbda=0.9, value_network=networks.critic), SequenceBatcher(8)
    sequences = cut(gae(batch))
    for block in (gae, cut):
        with pytest.raises(ValueError, match="given sequences of SequenceBatcher"):
            block(sequences.clone())
    assert cut(cut.unbatch(sequences)).shape == sequences.shape
