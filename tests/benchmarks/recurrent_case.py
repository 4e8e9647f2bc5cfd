"""A recurrent network, and a batch with its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl import modules as torchrl_modules
from torchrl.modules import set_recurrent_mode

import ppokit

FEATURES, HIDDEN, SEQ_LEN, MINIBATCHES = 64, 128, 32, 8
MASK = ("collector", "mask")
KINDS: dict[type[nn.RNNBase], tuple[str, Sequence[str]]] = {
    nn.LSTM: ("LSTM", ("recurrent_state_h", "recurrent_state_c")),
    nn.GRU: ("GRU", ("recurrent_state",)),
}


@dataclass
class Case:
    """A network, in ppokit's module and in torchrl's, and a batch with its recurrent states."""

    network: nn.RNNBase
    module: Any
    of_torchrl: Any
    batch: TensorDict

    @cached_property
    def sequences(self) -> TensorDictBase:
        return ppokit.SequenceBatcher(SEQ_LEN)(self.batch)

    @classmethod
    def draw(cls, rows: int, steps: int, dones: float, kind: type[nn.RNNBase] = nn.LSTM) -> Case:
        torch.manual_seed(0)
        network = kind(FEATURES, HIDDEN, batch_first=True)
        name, keys = KINDS[kind]
        names: dict[str, Any] = {
            "in_keys": ["features", *keys],
            "out_keys": ["hidden", *(("next", key) for key in keys)],
        }
        done = torch.rand(rows, steps, 1) < dones
        is_init = torch.cat([torch.ones(rows, 1, 1, dtype=torch.bool), done[:, :-1]], 1)
        ids = is_init.flatten().cumsum(0).view(rows, steps)
        features = torch.randn(rows, steps, FEATURES)
        batch = TensorDict(
            {
                "features": features,
                "is_init": is_init,
                **dict(zip(keys, _states(network, features, is_init), strict=True)),
                "next": {"done": done},
                "collector": {"traj_ids": ids},
            },
            [rows, steps],
            names=[None, "time"],
        )
        names[name.lower()] = network
        modules = [getattr(of, f"{name}Module")(**names) for of in (ppokit, torchrl_modules)]
        return cls(network, *modules, batch)


@torch.no_grad()
def _states(network: nn.RNNBase, features: Tensor, is_init: Tensor) -> list[Tensor]:
    """Return the states before each step ``[B, T, 1, H]``."""
    is_lstm = isinstance(network, nn.LSTM)
    state: Any = [torch.zeros(1, len(features), HIDDEN) for _ in range(1 + is_lstm)]
    seen = []
    for x, begins in zip(features.unbind(1), is_init.unbind(1), strict=True):
        state = [torch.where(begins, 0, part) for part in state]
        seen.append([part.transpose(0, 1) for part in state])
        after = network(x.unsqueeze(1), tuple(state) if is_lstm else state[0])[1]
        state = after if is_lstm else [after]
    return [torch.stack(parts, 1) for parts in zip(*seen, strict=True)]


def check(case: Case) -> float:
    """Return the distance of the outputs from those of the run that wrote the states."""
    batcher = ppokit.SequenceBatcher(SEQ_LEN)
    worst = 0.0
    with torch.no_grad(), set_recurrent_mode(True):
        expected = case.of_torchrl(case.batch.copy())["hidden"].flatten(0, 1)
        for part in batcher.minibatches(case.sequences, MINIBATCHES):
            mask = part[MASK]
            found = case.module(part)["hidden"][mask]
            error = (found - expected[part["sequence", "index"][mask]]).abs().max()
            worst = max(worst, float(error))
    return worst
