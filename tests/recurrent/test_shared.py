"""A memory that actor and critic share, in the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import DualClipPPOLoss, GRUModule, LSTMModule, SequenceBatcher


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the calls of each module at its ``calls``, without a hook or a class of another."""

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return forward(self, *args, **kwargs)

        return run

    for kind in (LSTMModule, GRUModule):
        monkeypatch.setattr(kind, "forward", counted(kind.forward))


both = pytest.mark.parametrize("kind", [LSTMModule, GRUModule])


def make_loss(memory: Any, **options: Any) -> DualClipPPOLoss:
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 6), ["observation"], ["code"])
    head = TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(encoder, memory, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(encoder, memory, ValueOperator(nn.Linear(8, 1), ["hidden"]))
    return DualClipPPOLoss(actor, critic, functional=False, **options)


def make_memory(kind: type, **options: Any) -> Any:
    torch.manual_seed(1)
    return kind(6, 8, in_key="code", out_key="hidden", **options)


def make_minibatch(memory: Any) -> TensorDictBase:
    """Sequences with padding, cut from a batch with ends."""
    torch.manual_seed(2)
    done = torch.rand(4, 20, 1) < 0.15
    is_init = torch.cat([torch.ones(4, 1, 1, dtype=torch.bool), done[:, :-1]], 1)
    layers = (memory.lstm if isinstance(memory, LSTMModule) else memory.gru).num_layers
    states = {key: torch.randn(4, 20, layers, 8) for key in memory.in_keys[1:-1]}
    batch = TensorDict(
        {
            "observation": torch.randn(4, 20, 4),
            "is_init": is_init,
            "action": torch.randint(2, (4, 20)),
            "action_log_prob": -torch.rand(4, 20),
            "advantage": torch.randn(4, 20, 1),
            "value_target": torch.randn(4, 20, 1),
            **states,
            "next": {"done": done},
        },
        [4, 20],
        names=[None, "time"],
    )
    return SequenceBatcher(8)(batch)


def results(loss: DualClipPPOLoss, minibatch: TensorDictBase) -> tuple[TensorDictBase, list[Any]]:
    torch.manual_seed(0)
    losses = loss(minibatch.clone())
    total = sum(value for key, value in losses.items() if str(key).startswith("loss_"))
    return losses.detach(), list(torch.autograd.grad(total, [*loss.parameters()]))


@both
def test_it_runs_once_and_learns_what_it_learned_when_it_ran_twice(kind: type):
    memory = make_memory(kind)
    minibatch = make_minibatch(memory)
    found = results(make_loss(memory), minibatch)
    assert memory.calls == 1
    expected = results(make_loss(memory, fast=False), minibatch)
    assert memory.calls == 3
    for key in expected[0].keys():
        torch.testing.assert_close(found[0][key], expected[0][key], rtol=1e-4, atol=1e-5)
    for pair in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@both
def test_with_dropout_it_runs_for_each(kind: type):
    memory = make_memory(kind, num_layers=2, dropout=0.5)
    minibatch = make_minibatch(memory)
    loss = make_loss(memory)
    loss(minibatch)
    assert memory.calls == 2
    loss.eval()
    loss(minibatch)
    assert memory.calls == 3
    loss.train()
    loss(minibatch)
    assert memory.calls == 5


@both
def test_with_a_hook_it_runs_for_each(kind: type):
    memory = make_memory(kind)
    minibatch = make_minibatch(memory)
    loss = make_loss(memory)
    loss(minibatch)
    hook = memory.register_forward_hook(lambda *_: None)
    loss(minibatch)
    assert memory.calls == 3
    hook.remove()


def test_two_memories_run_each():
    memory, other = make_memory(LSTMModule), make_memory(GRUModule)
    loss = make_loss(memory)
    value = ValueOperator(nn.Linear(8, 1), ["hidden"])
    encoder = TensorDictModule(nn.Linear(4, 6), ["observation"], ["code"])
    critic = TensorDictSequential(encoder, other, value)
    loss = DualClipPPOLoss(loss.actor_network, critic, functional=False)
    minibatch = make_minibatch(memory)
    minibatch["recurrent_state"] = minibatch["recurrent_state_h"]
    loss(minibatch)
    assert (memory.calls, other.calls) == (1, 1)
