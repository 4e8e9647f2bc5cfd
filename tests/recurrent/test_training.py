"""Recurrent actors and critics, separate or shared, from collection to the update."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import InitTracker
from torchrl.modules import GRUModule, LSTMModule, ValueOperator, set_recurrent_mode

from ppokit import GAE, DualClipPPOLoss, PPOUpdate, SequenceBatcher, TrainingStep
from ppokit import GRUModule as OwnGRUModule
from tests.blocks import Given, actor_of, outcome
from tests.recurrent.agents import (
    DOORS,
    Agent,
    collect_ours,
    collect_theirs,
    collected,
    make_agent,
    make_core,
    make_head,
    make_loss,
    make_update,
)

MASK, DONE, TERMINATED = ("collector", "mask"), ("next", "done"), ("next", "terminated")
SETUPS = [
    ("ours", "Pendulum-v1", LSTMModule, False),
    ("ours", "CartPole-v1", GRUModule, True),
    ("torchrl's", "CartPole-v1", LSTMModule, False),
    ("torchrl's", "Pendulum-v1", GRUModule, True),
    ("ours", DOORS, LSTMModule, False),
    ("torchrl's", DOORS, GRUModule, False),
]
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)


def given(setup: tuple) -> tuple[Agent, TensorDictBase]:
    """Networks, and the second batch, whose rows continue from the first."""
    agent, batches = collected(*setup)
    batch = batches[-1]
    assert not batch["is_init"][:, 0].all()
    assert (batch[DONE] & ~batch[TERMINATED])[:, :-1].any()
    return copy.deepcopy(agent), batch.clone()


def values_step_by_step(agent: Agent, batches: list[Any]) -> tuple[Tensor, Tensor]:
    """Values before and after the steps of the last batch, by torch's own network in a loop."""
    module, value = agent.critic[0], agent.critic[1].module
    network = module.lstm if isinstance(module, LSTMModule) else module.gru
    whole: Any = torch.cat([batch.select("observation", "next") for batch in batches], 1)
    found = torch.zeros(2, *whole.shape, 1)
    for row in range(len(whole)):
        state = None
        for t in range(whole.shape[1]):
            frame = whole[row, t]
            embed, after = network(frame["observation"][None], state)
            found[0, row, t] = value(embed[0])
            # Another step, from what was seen last: the value that a truncated step bootstraps from
            following, _ = network(frame["next", "observation"][None], after)
            if not frame[TERMINATED]:
                found[1, row, t] = value(following[0])
            state = None if frame[DONE] else after
    before, after = found[:, :, -batches[-1].shape[1] :]
    return before, after


@every_setup
@pytest.mark.parametrize("shifted", [None, False, True, "target"])
@torch.no_grad()
def test_values_equal_a_step_by_step_run(setup, shifted):
    agent, batch = given(setup)
    value, next_value = values_step_by_step(agent, collected(*setup)[1])
    options: dict[str, Any] = {} if shifted == "target" else {"shifted": shifted}
    gae, critic = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic, **options), agent.critic
    if shifted == "target":
        parameters = TensorDict.from_module(critic).clone()
        gae(batch, params=parameters, target_params=parameters.clone())
    else:
        gae(batch)
    torch.testing.assert_close(batch["state_value"], value, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch["next", "state_value"], next_value, rtol=0, atol=1e-5)


@every_setup
@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_first_minibatches_replay_the_collected_batch(setup, burn_in):
    agent, batch = given(setup)
    loss, batcher = make_loss(agent), SequenceBatcher(5, burn_in=burn_in)
    update = make_update(loss, agent.critic, batcher=batcher, lr=0.0)
    update.validate(batch)
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
    seen = 0
    for minibatch in batcher.minibatches(batcher(batch), 3):
        ready = batcher.refresh(minibatch, agent.actor, agent.critic)
        mask = ready[MASK]
        seen += int(mask.sum())
        with set_recurrent_mode(True), torch.no_grad():
            log_prob = agent.actor.get_dist(ready.clone()).log_prob(ready["action"])
            value = agent.critic(ready.clone())["state_value"]
        for found, stored in ((log_prob, "action_log_prob"), (value, "state_value")):
            torch.testing.assert_close(found[mask], ready[stored][mask], rtol=0, atol=1e-5)
    assert seen == batch.numel()
    statistics = update(batch)
    assert 0 <= statistics["kl"] < 1e-10
    assert abs(statistics["max_ratio"] - 1) < 1e-5


@every_setup
def test_an_update_trains_every_parameter_of_both(setup):
    agent, batch = given(setup)
    loss = make_loss(agent, loss_critic_type="l2")
    batcher = SequenceBatcher(5, burn_in=3 if setup[0] == "ours" else 0)
    update = make_update(loss, agent.critic, batcher=batcher, epochs=8, max_grad_norm=0.5)
    parameters = dict(loss.named_parameters())
    assert len(parameters) == sum(
        len(list(part.parameters()))
        for part in (*agent.cores.values(), agent.actor[0][1], agent.critic[1])
    )
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    error = value_error(agent, batch)
    statistics = update(batch)
    assert statistics["frames"] == batch.numel()
    assert statistics["minibatches"] == 8 * math.ceil(len(batcher(batch)) / 6)  # of 30 // 5 each
    for name, parameter in parameters.items():
        assert parameter.isfinite().all(), name
        assert (parameter - before[name]).abs().max() > 1e-6, name
    assert value_error(agent, batch) < error
    assert 0 < statistics["kl"] < 0.5


@torch.no_grad()
def value_error(agent: Agent, batch: TensorDictBase) -> float:
    """Of the critic as it is now, run from the states that were stored at the row's start."""
    batch = batch.clone()
    if "value_target" not in batch.keys():
        batch = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
    value_target = batch["value_target"]
    with set_recurrent_mode(True):
        value = agent.critic(batch)["state_value"]
    return (value - value_target).square().mean().item()


# -- missing entries

AGENT = make_agent("CartPole-v1", GRUModule)


MISTAKES: dict[str, Callable[[Any], TensorDictBase]] = {
    "no critic": lambda collecting: collecting("CartPole-v1", AGENT.actor)[-1],
    "no primer": lambda collecting: collecting(
        "CartPole-v1", AGENT.policy, transforms=[InitTracker()]
    )[-1],
    "no starts": lambda collecting: collecting("CartPole-v1", AGENT.policy)[-1].exclude("is_init"),
}


@pytest.mark.parametrize(
    ("mistake", "collecting", "key"),
    [
        ("no critic", collect_ours, "critic_state"),
        ("no critic", collect_theirs, "critic_state"),
        ("no primer", collect_theirs, "(critic|actor)_state"),
        ("no starts", collect_ours, "is_init"),
        ("no starts", collect_theirs, "is_init"),
    ],
)
def test_a_missing_state_is_named_by_every_block(mistake, collecting, key):
    batch, loss = MISTAKES[mistake](collecting), make_loss(AGENT)
    update = make_update(loss, AGENT.critic)
    message = (
        rf"'{key}' is not in the batch.*GymCollector, or append InitTracker\(\) and the module's "
        r"make_tensordict_primer\(\).*TensorDictSequential\(critic, actor\)"
    )
    ready = batch.clone()
    for name in ("advantage", "value_target"):
        ready[name] = torch.randn(*batch.shape, 1)
    without_gae = PPOUpdate(update.step, batcher=SequenceBatcher(5, cut_keys=()))
    blocks: list[Any] = [(x, batch) for x in (update.advantage, update, update.validate)]
    for block, given_batch in [*blocks, (loss, ready), (without_gae, ready)]:
        with pytest.raises(KeyError, match=message):
            block(given_batch.clone())
    if mistake == "no primer":
        with pytest.raises(KeyError, match=r"'actor_state'.*make_tensordict_primer\(\)"):
            SequenceBatcher(5, state_keys=["actor_state"])(batch)


def test_losses_and_batchers_that_do_not_fit_together_raise():
    agent, batch = given(SETUPS[1])
    with pytest.raises(ValueError, match=r"actor_network is recurrent.*batcher=SequenceBatcher"):
        make_update(make_loss(agent), agent.critic, batcher=None)
    batcher, plain = SequenceBatcher(8, burn_in=4), Given(lambda weight, _: {})
    update = make_update(make_loss(agent, functional=True), agent.critic, batcher=batcher)
    with pytest.raises(ValueError, match=r"burn_in .* build the loss with functional=False"):
        update(batch)
    step = TrainingStep(plain, torch.optim.SGD(plain.parameters()))
    with pytest.raises(TypeError, match="burn_in needs networks with a recurrent state"):
        PPOUpdate(step, batcher=batcher)(batch)


def test_an_advantage_normalized_per_minibatch_gets_sequences_of_any_length():
    padded = []
    for normalize in (False, True):
        agent, batch = given(SETUPS[1])
        loss = make_loss(agent, normalize_advantage=normalize)
        update = make_update(loss, agent.critic, batcher=SequenceBatcher(8), minibatch_size=16)
        padded.append(update(batch)["padded"])
    assert 0 < padded[0] < padded[1]


def test_two_states_under_one_key_raise():
    cores = [make_core(LSTMModule, 4, "same") for _ in range(2)]
    head, distribution = make_head("CartPole-v1", "same_embed")
    actor = actor_of(TensorDictSequential(cores[0], head), **distribution)
    value = ValueOperator(nn.Linear(8, 1), in_keys=["same_embed"])
    critic = TensorDictSequential(cores[1], value)
    with pytest.raises(ValueError, match=r"keep their state at 'same_state_h'.*names of its own"):
        DualClipPPOLoss(actor, critic)
    policy = TensorDictSequential(critic, actor)
    with pytest.raises(ValueError, match=r"keep their state at 'same_state_h'.*names of its own"):
        collect_ours("CartPole-v1", policy)
    # Two modules around one network have one state.
    cores[1].lstm = cores[0].lstm
    DualClipPPOLoss(actor, critic)
    assert len(collect_ours("CartPole-v1", policy)) == 2


class Renamed(TensorDictModuleBase):
    """Calls a recurrent module with entries of other names, as one for several agents does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = OwnGRUModule(input_size=4, hidden_size=8, in_key="x", out_key="embed")
        self.in_keys = ["observation", f"{name}_state", "is_init"]
        self.out_keys = [f"{name}_embed", ("next", f"{name}_state")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        keys = ["x", *self.inner.in_keys[1:]]
        given = {new: tensordict[key] for new, key in zip(keys, self.in_keys, strict=True)}
        found = self.inner(TensorDict(given, tensordict.batch_size))
        for key, new in zip(self.out_keys, self.inner.out_keys, strict=True):
            tensordict[key] = found[new]
        return tensordict


def test_states_within_a_module_with_names_of_its_own_are_its_own():
    def loss(names: tuple[str, str]) -> DualClipPPOLoss:
        head, distribution = make_head("CartPole-v1", f"{names[0]}_embed")
        actor = actor_of(TensorDictSequential(Renamed(names[0]), head), **distribution)
        value = ValueOperator(nn.Linear(8, 1), in_keys=[f"{names[1]}_embed"])
        return DualClipPPOLoss(actor, TensorDictSequential(Renamed(names[1]), value))

    loss(("actor", "critic"))
    with pytest.raises(ValueError, match=r"keep their state at 'same_state'.*'same_embed'"):
        loss(("same", "same"))


class Cell(nn.Module):
    """A recurrent cell without torchrl's interface."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return state, state


def test_a_recurrent_module_without_a_primer_raises_with_the_fix():
    core = TensorDictModule(Cell(), ["observation", "state"], ["embed", ("next", "state")])
    head, distribution = make_head("CartPole-v1", "embed")
    policy = actor_of(TensorDictSequential(core, head), **distribution)
    with pytest.raises(KeyError, match=r"reads \['state'\].*make_tensordict_primer"):
        collect_ours("CartPole-v1", policy)


# -- in a graph --------------------------------------------------------------------------


def test_a_compiled_loss_uses_a_mask_that_appears_later():
    torch._dynamo.reset()
    agent = make_agent("CartPole-v1", GRUModule, recurrent_backend="pad")
    (batch,) = collect_ours("CartPole-v1", agent.policy, batches=1, frames=240)
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
    with torch.no_grad():  # some steps after the batch was collected
        for parameter in agent.policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    eager, loss = make_loss(copy.deepcopy(agent)), make_loss(agent)
    compiled = torch.compile(loss, backend="eager")
    masked = batch.clone()
    assert "collector" in masked.keys()
    masked["collector", "mask"] = torch.arange(batch.shape[1]).expand(batch.shape) < 100
    for minibatch in (batch, masked):
        results = [outcome(each, minibatch) for each in (compiled, eager)]
        assert all(gradient.any() for gradient in results[0][1])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_steps_that_a_recurrent_critic_cannot_take_raise():
    agent, batch = given(SETUPS[0])
    with pytest.raises(ValueError, match=r"'advantage' is not in the batch.*recurrent critic.*GAE"):
        make_loss(agent)(batch.clone())
    batch["steps_to_next_obs"] = torch.full(batch.shape, 3).unsqueeze(-1)
    with pytest.raises(ValueError, match="'steps_to_next_obs' skips several"):
        GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
