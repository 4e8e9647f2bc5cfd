"""Recurrent networks, and what they leave behind in a batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, ValueOperator

DONE = ("next", "done")
H, C, CRITIC = "recurrent_state_h", "recurrent_state_c", ("critic", "recurrent_state")


def make_networks() -> dict[str, Any]:
    """An actor with an LSTM of two layers behind an encoder, and a critic with a GRU of its own."""
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 3), in_keys=["observation"], out_keys=["code"])
    lstm = LSTMModule(3, 5, num_layers=2, in_key="code", out_key="embed")
    head = TensorDictModule(nn.Linear(5, 2), in_keys=["embed"], out_keys=["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(encoder, TensorDictSequential(lstm, head)),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    gru = GRUModule(
        4,
        6,
        in_keys=["observation", CRITIC, "is_init"],
        out_keys=["critic_embed", ("next", *CRITIC)],
    )
    value = ValueOperator(nn.Linear(6, 1), in_keys=["critic_embed"])
    critic = TensorDictSequential(gru, value)
    for network in (actor, critic):
        network.double()
    return {"actor": actor, "critic": critic, "lstm": lstm, "gru": gru, "encoder": encoder}


def play(networks: dict[str, Any], done: Tensor) -> TensorDictBase:
    """A batch as collectors store it. Rows begin in mid-episode, with a state."""
    rows, steps = done.shape
    random = lambda *shape: torch.randn(rows, *shape, dtype=torch.float64)  # noqa: E731
    state = {H: random(2, 5), C: random(2, 5), CRITIC: random(1, 6)}
    was_done, frames = torch.zeros(rows, 1, dtype=torch.bool), []
    for t in range(steps):
        zeroed = {k: torch.where(was_done.unsqueeze(-1), 0.0, s) for k, s in state.items()}
        frame = TensorDict({"observation": random(4), "is_init": was_done, **zeroed}, [rows])
        with torch.no_grad():
            networks["critic"](networks["actor"](frame))
        state = {key: frame["next"][key] for key in state}
        was_done = done[:, t : t + 1]
        frame[DONE] = was_done
        frame["frame"] = torch.arange(rows) * steps + t
        frame["advantage"], frame["value_target"] = random(1), random(1)
        frames.append(frame)
    batch: Any = torch.stack(frames, 1)
    batch.names = [None, "time"]
    return batch


def some_done(rows: int = 3, steps: int = 23) -> Tensor:
    return torch.rand(rows, steps, generator=torch.Generator().manual_seed(3)) < 0.08


def disturb(networks: dict[str, Any]) -> None:
    """What an optimiser step does."""
    with torch.no_grad():
        for name in ("actor", "critic"):
            for parameter in networks[name].parameters():
                parameter += 0.2 * torch.randn_like(parameter)
