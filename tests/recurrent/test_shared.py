"""A recurrent network that actor and critic share runs once in the loss with a value head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss, GRUModule, LSTMModule, SequenceBatcher
from tests.blocks import categorical_actor
from tests.recurrent.agents import make_update


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the calls of each module at its ``calls``."""

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return forward(self, *args, **kwargs)

        return run

    for kind in (LSTMModule, GRUModule):
        monkeypatch.setattr(kind, "forward", counted(kind.forward))


CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make_networks(kind: type) -> tuple[Any, Any, Any, Any]:
    """Actor, value head, critic, and the memory."""
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 6), ["observation"], ["code"])
    memory = kind(6, 8, in_key="code", out_key="hidden")
    logits = TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])
    actor = categorical_actor(encoder, memory, logits)
    head = ValueOperator(nn.Linear(8, 1), ["hidden"])
    critic = TensorDictSequential(encoder, memory, head)
    return actor.double(), head.double(), critic, memory


def make_batch(memory: Any) -> TensorDictBase:
    """A batch with dones; its stored ``"hidden"`` must not be used."""
    torch.manual_seed(2)
    done = torch.rand(4, 20, 1) < 0.15
    is_init = torch.cat([torch.ones(4, 1, 1, dtype=torch.bool), done[:, :-1]], 1)
    normal = lambda *shape: torch.randn(4, 20, *shape, dtype=torch.float64)  # noqa: E731
    batch = TensorDict(
        {
            "observation": normal(4),
            "is_init": is_init,
            "hidden": torch.full((4, 20, 8), torch.nan, dtype=torch.float64),
            "action": torch.randint(2, (4, 20)),
            "action_log_prob": -torch.rand(4, 20).double(),
            "advantage": normal(1),
            "value_target": normal(1),
            "next": {"observation": normal(4), "reward": normal(1)},
        },
        [4, 20],
        names=[None, "time"],
    )
    batch["next", "done"], batch["next", "terminated"] = done, done
    for key in memory.in_keys[1:-1]:
        batch[key], batch["next", key] = normal(1, 8), normal(1, 8)
    return batch


def results(loss: Any, minibatch: TensorDictBase) -> tuple[dict[str, Tensor], list[Any]]:
    losses = loss(minibatch.clone()).select("loss_objective", "loss_critic", "loss_entropy")
    options: Any = {"retain_graph": True, "allow_unused": True}
    found = [torch.autograd.grad(x, [*loss.parameters()], **options) for x in losses.values()]
    return losses.detach().to_dict(), found


@pytest.mark.parametrize(
    ("kind", "functional", "separate_losses"),
    [(LSTMModule, False, False), (LSTMModule, True, True), (GRUModule, False, True)],
)
def test_a_shared_network_runs_once_with_the_same_losses(kind, functional, separate_losses):
    """And the same gradients."""
    actor, head, critic, memory = make_networks(kind)
    batch = make_batch(memory)
    sequences = SequenceBatcher(8)(batch)
    assert not sequences["collector", "mask"].all()
    options: Any = {"functional": functional, "separate_losses": separate_losses}
    ours, whole = (DualClipPPOLoss(actor, x, **options) for x in (head, critic))
    found = results(ours, sequences)
    assert memory.calls == 1
    torch.testing.assert_close(found, results(whole, sequences), **CLOSE)
    assert memory.calls == 3
    theirs = results(ClipPPOLoss(actor, head, **options), batch)
    torch.testing.assert_close(results(ours, batch), theirs, **CLOSE)


@pytest.mark.parametrize(("kind", "burn_in"), [(LSTMModule, 3), (GRUModule, 0)])
def test_an_update_with_the_value_head_equals_one_with_the_critic(kind, burn_in):
    found = []
    for has_head in (True, False):
        actor, head, critic, memory = make_networks(kind)
        batch = make_batch(memory).exclude("advantage", "value_target")
        loss = DualClipPPOLoss(actor, head if has_head else critic)
        batcher = SequenceBatcher(5, burn_in=burn_in)
        update = make_update(loss, critic, batcher=batcher, epochs=2)
        update.validate(batch)
        update(batch)
        assert "value_network" not in update.state_dict()
        found.append([p.detach() for p in loss.parameters()])
    torch.testing.assert_close(*found, **CLOSE)
