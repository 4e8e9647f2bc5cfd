"""A recurrent network over a batch, and minibatches of sequences, as everyone has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.modules import GRUModule as TorchRLGRUModule
from torchrl.modules import LSTMModule as TorchRLLSTMModule
from torchrl.modules import set_recurrent_mode

from ppokit import GRUModule, LSTMModule, SequenceBatcher
from tests.benchmarks.timing import Call

FEATURES, HIDDEN, SEQ_LEN, MINIBATCHES = 64, 128, 32, 8
FRAMES = 512  # of a minibatch that is drawn
PLAIN = "plain"
Module = TorchRLLSTMModule | TorchRLGRUModule
KINDS: dict[type[nn.RNNBase], tuple[str, Sequence[type[Module]], Sequence[str]]] = {
    nn.LSTM: ("lstm", (LSTMModule, TorchRLLSTMModule), ("recurrent_state_h", "recurrent_state_c")),
    nn.GRU: ("gru", (GRUModule, TorchRLGRUModule), ("recurrent_state",)),
}
MASK = ("collector", "mask")


@dataclass
class Case:
    """A network, in our module and in torchrl's, and a batch with the states it went through."""

    network: nn.RNNBase
    module: Module
    of_torchrl: Module
    batch: TensorDict

    @cached_property
    def sequences(self) -> TensorDictBase:
        """The batch, cut."""
        return SequenceBatcher(SEQ_LEN)(self.batch)

    @classmethod
    def draw(cls, rows: int, steps: int, dones: float, kind: type[nn.RNNBase] = nn.LSTM) -> Case:
        """Return random frames, a share of them done."""
        torch.manual_seed(0)
        network = kind(FEATURES, HIDDEN, batch_first=True)
        name, kinds, keys = KINDS[kind]
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
        modules = (kind(**{name: network}, **names) for kind in kinds)
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


def epochs(case: Case) -> dict[str, Call]:
    """Return forward and backward over each frame of the batch once, as everyone does it."""
    calls = {PLAIN: Call(partial(plain, case)), "ppokit": Call(partial(ours, case))}
    calls["ppokit, cut included"] = Call(partial(cut_and_ours, case))
    calls["ppokit, torchrl's module"] = Call(partial(ours, case, case.of_torchrl))
    calls["torchrl, recurrent mode"] = Call(partial(torchrl, case))
    step_loop = sb3_contrib(case)
    if step_loop is not None:
        calls["SB3-contrib, step loop"] = Call(step_loop)
    return calls


def plain(case: Case) -> None:
    """Run the LSTM over as many frames in sequences that nothing interrupts."""
    frames = case.batch["features"].reshape(-1, SEQ_LEN, FEATURES)
    for part in frames.tensor_split(MINIBATCHES):
        case.network(part)[0].sum().backward()


def ours(case: Case, module: Module | None = None, sequences: TensorDictBase | None = None) -> None:
    """Run it over minibatches of sequences."""
    batcher, module = SequenceBatcher(SEQ_LEN), case.module if module is None else module
    sequences = case.sequences if sequences is None else sequences
    with set_recurrent_mode(True):
        for part in batcher.minibatches(sequences, MINIBATCHES):
            output = module(part)["hidden"]
            (output * part[MASK].unsqueeze(-1)).sum().backward()


def cut_and_ours(case: Case) -> None:
    """Cut the batch, and do the same."""
    ours(case, sequences=SequenceBatcher(SEQ_LEN)(case.batch))


def torchrl(case: Case) -> None:
    """Run torchrl's module over the batch; it resets the state within the rows."""
    with set_recurrent_mode(True):
        case.of_torchrl(case.batch.copy())["hidden"].sum().backward()


def sb3_contrib(case: Case) -> Callable[[], None] | None:
    """Return SB3-contrib's loop over the steps, or None where it is not installed."""
    if not isinstance(case.network, nn.LSTM):
        return None
    try:
        from sb3_contrib.common.recurrent.policies import (  # pyright: ignore
            RecurrentActorCriticPolicy,
        )
    except ImportError:
        return None
    process = RecurrentActorCriticPolicy._process_sequence
    lstm = nn.LSTM(FEATURES, HIDDEN)
    features = case.batch["features"].flatten(0, 1)
    starts = case.batch["is_init"].float().flatten()
    zeros = torch.zeros(1, len(case.batch), HIDDEN)

    def run() -> None:
        process(features, (zeros, zeros), starts, lstm)[0].sum().backward()

    return run


def check(case: Case) -> float:
    """Return how far our outputs are from those of the run that wrote the states."""
    batcher = SequenceBatcher(SEQ_LEN)
    worst = 0.0
    with torch.no_grad(), set_recurrent_mode(True):
        expected = case.of_torchrl(case.batch.copy())["hidden"].flatten(0, 1)
        for part in batcher.minibatches(case.sequences, MINIBATCHES):
            mask = part[MASK]
            found = case.module(part)["hidden"][mask]
            error = (found - expected[part["sequence", "index"][mask]]).abs().max()
            worst = max(worst, float(error))
    return worst


@dataclass(frozen=True)
class Draw:
    """A call that draws so many minibatches."""

    call: Call
    minibatches: int = 1


def draws(case: Case) -> dict[str, Draw]:
    """Return how minibatches of 512 frames are drawn: 16 sequences of 32, or more shorter ones."""
    batcher = SequenceBatcher(SEQ_LEN)
    sequences, places = case.sequences, batcher.places(case.batch)
    number = max(1, case.batch.numel() // FRAMES)

    def from_sequences() -> None:
        for _ in batcher.minibatches(sequences, number):
            pass

    def from_batch() -> None:
        for _ in batcher.minibatches(places, number, batch=case.batch):
            pass

    found = {
        "ppokit": Draw(Call(from_sequences), number),
        "ppokit, from the batch": Draw(Call(from_batch), number),
    }
    options = {"slice_len": SEQ_LEN, "traj_key": ("collector", "traj_ids"), "strict_length": False}
    samplers = SliceSampler(**options, cache_values=True), SliceSamplerWithoutReplacement(**options)
    for sampler in samplers:
        storage = LazyTensorStorage(case.batch.numel())
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=FRAMES)
        buffer.extend(case.batch.reshape(-1))
        found[f"torchrl, {type(sampler).__name__}"] = Draw(Call(buffer.sample))
    return found
