"""Sequences of several agents with recurrent states of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.modules import LSTMModule as TorchRLLSTMModule

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GRUModule,
    LSTMModule,
    PPOUpdate,
    SequenceBatcher,
    TrainingStep,
)
from tests import reference
from tests.blocks import actor_of
from tests.objectives.test_agents import KEYS

B, T, A, CELLS = 3, 17, 2, 6
DTYPE = torch.float64


class OfEachAgent(TensorDictModuleBase):
    """A recurrent module for each agent, all with the same parameters.

    Entries of agents are ``[*B, T, A, ...]``. The module has agents as rows, ``[*B, A, T, ...]``.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        names = [name for name in module.in_keys if name != "is_init"]
        self.in_keys = [("agents", name) for name in names] + ["is_init"]
        out, *after = module.out_keys
        self.out_keys = [("agents", out), *(("next", "agents", key[1]) for key in after)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        entries = {key: tensordict[key] for key in self.in_keys}
        starts = entries.pop("is_init").unsqueeze(-2)
        agents = [*tensordict.shape, A]
        rows = TensorDict({key[1]: x for key, x in entries.items()}, agents)
        rows["is_init"] = starts.expand(*agents, 1)
        rows = self.module(rows.transpose(-1, -2).contiguous()).transpose(-1, -2)
        for key, name in zip(self.out_keys, self.module.out_keys, strict=True):
            tensordict[key] = rows[name]
        return tensordict


def make_core(kind: Any, name: str) -> OfEachAgent:
    is_lstm = issubclass(kind, TorchRLLSTMModule)
    states = [f"{name}_h", f"{name}_c"] if is_lstm else [f"{name}_h"]
    return OfEachAgent(
        kind(
            4,
            CELLS,
            in_keys=["observation", *states, "is_init"],
            out_keys=[f"{name}_embed", *(("next", state) for state in states)],
        )
    )


def make_networks(kind: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    keys: Any = [("agents", "logits")]
    logits = TensorDictModule(nn.Linear(CELLS, 3), [("agents", "actor_embed")], keys)
    network = TensorDictSequential(make_core(kind, "actor"), logits)
    actor = actor_of(network, out_keys=[KEYS["action"]])
    value = TensorDictModule(nn.Linear(CELLS, 1), [("agents", "critic_embed")], [KEYS["value"]])
    critic = TensorDictSequential(make_core(kind, "critic"), value)
    return actor.to(DTYPE), critic.to(DTYPE)


def state_keys(actor: Any, critic: Any) -> list[Any]:
    return [key for net in (actor, critic) for key in net.in_keys if key[-1][-2:] in ("_h", "_c")]


def play(actor: Any, critic: Any) -> TensorDict:
    """A batch as collectors store it, with the states before and after each step."""
    torch.manual_seed(1)
    keys = state_keys(actor, critic)
    states = {key: torch.randn(B, A, 1, CELLS, dtype=DTYPE) for key in keys}
    is_init, frames = torch.zeros(B, 1, dtype=torch.bool), []
    observation = torch.randn(B, A, 4, dtype=DTYPE)
    for _ in range(T):
        states = {key: torch.where(is_init.view(B, 1, 1, 1), 0.0, x) for key, x in states.items()}
        group = TensorDict({"observation": observation}, [B, A])
        frame = TensorDict({"agents": group, "is_init": is_init}, [B])
        for key, state in states.items():
            frame[key] = state
        with torch.no_grad():
            actor(critic(frame))
        states = {key: frame[("next", *key)] for key in states}
        terminated, truncated = torch.rand(2, B, 1) < 0.1
        is_init = terminated | truncated
        following = torch.randn(B, A, 4, dtype=DTYPE)
        frame["next", "agents", "observation"] = following
        frame["next", "agents", "reward"] = torch.randn(B, A, 1, dtype=DTYPE)
        frame["next", "done"], frame["next", "terminated"] = is_init, terminated
        anew = torch.randn(B, A, 4, dtype=DTYPE)
        observation = torch.where(is_init.unsqueeze(-1), anew, following)
        frames.append(frame)
    batch: Any = torch.stack(frames, 1)
    batch.names = [None, "time"]
    return batch


def make_gae(critic: Any, **options: Any) -> GAE:
    gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic, **options)
    names = ("advantage", "value_target", "value")
    gae.set_keys(reward=("agents", "reward"), **{name: KEYS[name] for name in names})
    return gae


def test_advantages_of_a_recurrent_critic():
    actor, critic = make_networks(LSTMModule)
    batch = play(actor, critic)
    gae = make_gae(critic)
    following = torch.empty(B, T, A, 1, dtype=DTYPE)
    for step in range(T):  # one step from the state after the step, one at a time
        frame = TensorDict({"is_init": torch.zeros(B, 1, dtype=torch.bool)}, [B])
        frame["agents", "observation"] = batch["next", "agents", "observation"][:, step]
        for key in state_keys(critic, critic):
            frame[key] = batch[("next", *key)][:, step]
        with torch.no_grad():
            following[:, step] = critic(frame)[KEYS["value"]]
    expected = reference.gae(
        batch["next", "agents", "reward"],
        batch[KEYS["value"]],
        following,
        batch["next", "done"].unsqueeze(2).expand(B, T, A, 1),
        batch["next", "terminated"].unsqueeze(2).expand(B, T, A, 1),
        gamma=0.97,
        lmbda=0.9,
        dim=1,
    )
    gae(batch)
    torch.testing.assert_close(batch[KEYS["advantage"]], expected[0])
    torch.testing.assert_close(batch[KEYS["value_target"]], expected[1])


@pytest.mark.parametrize(("kind", "burn_in"), [(GRUModule, 0), (LSTMModule, 2)])
def test_training(kind: Any, burn_in: int):
    """Sequences with padding give what whole rows give; and the update trains."""
    actor, critic = make_networks(kind)
    batch = play(actor, critic)
    loss = DualClipPPOLoss(actor, critic, functional=False, entropy_coeff=0.01)
    loss.set_keys(**KEYS)
    gae = make_gae(critic, average_gae=True)
    batcher = SequenceBatcher(5, burn_in=burn_in, state_keys=state_keys(actor, critic))
    sequences = batcher.refresh(batcher(gae(batch.clone())), actor, critic)
    losses, whole = loss(sequences), loss(gae(batch.clone()))
    for name in ("loss_objective", "loss_critic", "loss_entropy", "kl"):
        torch.testing.assert_close(losses[name], whole[name])
    assert losses["kl"] < 1e-12
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-2)),
        advantage=gae,
        batcher=batcher,
        epochs=8,
        minibatch_size=20,
        seed=0,
    )
    update.validate(batch.clone())
    statistics = update(batch.clone())
    assert all(torch.tensor(value).isfinite() for value in statistics.values())
    assert statistics["kl"] > 1e-5
    after = loss(batcher.refresh(batcher(gae(batch)), actor, critic))
    assert after["loss_objective"] < losses["loss_objective"]
    assert after["loss_critic"] < losses["loss_critic"]
