"""Burn-in: computing the states of networks after the first frames of a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from ppokit._keys import as_key, get_tensor
from ppokit._recurrent import state_keys
from ppokit.sequences.cutting import gather, next_key

_FIX = (
    "A recurrent network reads it. A state must be stored at every step: append "
    "lstm.make_tensordict_primer() to the environment."
)


@torch.no_grad()
def burned_in_states(
    sequences: TensorDictBase, steps: Tensor, networks: Sequence[nn.Module]
) -> dict[NestedKey, Tensor]:
    """Return the states ``[N, ...]`` that the networks arrive at after the first steps.

    Sequences with equally many such steps run together, without padding: there are few such
    numbers, 0 and the longest one if no burn-in is longer than a sequence.

    Args:
        sequences: ``[N, L]``, with the stored states before their first step.
        steps: how many of their first steps to run ``[N]``, int64; with 0 the state is the stored.
        networks: those that have the states.
    """
    groups = [(n, (steps == n).nonzero().squeeze(-1)) for n in steps.unique().tolist() if n > 0]
    states: dict[NestedKey, Tensor] = {}
    for network in networks:
        keys = [key for key in _state_keys(network) if key not in states]
        modules = _needed(network, [next_key(key) for key in keys])
        reads = _reads(modules)
        for key in reads:
            get_tensor(sequences, key, fix=_FIX)
        for key in keys:
            states[key] = sequences.get(key)[:, 0].clone()
        for n, rows in groups:
            window: Any = sequences.select(*reads)[:, :n][rows]
            with set_recurrent_mode(True):
                for module in modules:
                    window = module(window)
            for key in keys:
                states[key][rows] = window.get(next_key(key))[:, -1]
    return states


def without_burn_in(
    sequences: TensorDictBase, steps: Tensor, end: Tensor, *, leave_out: Collection[NestedKey]
) -> tuple[TensorDict, Tensor]:
    """Return the frames after the first steps ``[N, l]``, padded again, and the mask of real ones.

    Args:
        sequences: ``[N, L]``.
        steps: how many steps to drop of each sequence ``[N]``, int64.
        end: where their padding begins ``[N]``, int64.
        leave_out: entries to drop.
    """
    steps, end = steps.unsqueeze(-1), torch.maximum(end, steps + 1).unsqueeze(-1)
    kept = steps + torch.arange(int((end - steps).max()), device=steps.device)
    rows = torch.arange(len(kept), device=kept.device).unsqueeze(-1) * sequences.shape[1]
    return gather(sequences, rows + kept.minimum(end - 1), leave_out=leave_out), kept < end


def _state_keys(network: nn.Module) -> list[NestedKey]:
    """Return the states that a network reads before a step and writes after it."""
    keys = [as_key(key) for module in _leaves(network) for key in state_keys(module)]
    if not keys:
        raise ValueError(
            f"{type(network).__name__} has no recurrent state: none of its modules reads a key and "
            'writes ("next", key). Pass networks with torchrl\'s LSTMModule or GRUModule in them.'
        )
    return list(dict.fromkeys(keys))


def _needed(network: nn.Module, wanted: list[NestedKey]) -> list[Any]:
    """Return the modules of a network that compute these entries, in their order."""
    needed, modules = set(wanted), []
    for module in reversed(list(_leaves(network))):
        if needed.intersection(module.out_keys):
            needed.update(module.in_keys)
            modules.append(module)
    return modules[::-1]


def _reads(modules: list[Any]) -> list[NestedKey]:
    """Return the keys that modules read and none before them has written."""
    reads: dict[NestedKey, None] = {}
    written: set[NestedKey] = set()
    for module in modules:
        reads |= dict.fromkeys(key for key in module.in_keys if key not in written)
        written.update(module.out_keys)
    return list(reads)


def _leaves(network: Any) -> Iterator[Any]:
    """Yield the modules that a sequence of modules calls in turn."""
    if not isinstance(network, TensorDictSequential):
        yield network
        return
    inner = network.module
    for module in inner.values() if isinstance(inner, nn.ModuleDict) else inner:
        yield from _leaves(module)
