"""Burn-in: computing the states of networks after the first frames of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from ppokit._batch import STATE_FIX, as_key, get_tensor, state_keys
from ppokit._calls import leaves
from ppokit.sequences.cutting import Lengths, gather, next_key


@torch.no_grad()
def burned_in_states(
    sequences: TensorDictBase, steps: Tensor, networks: Sequence[nn.Module], device: torch.device
) -> dict[NestedKey, Tensor]:
    """Return the states ``[N, ...]`` of the networks after the first ``steps`` ``[N]``.

    ``sequences`` ``[N, L]`` hold the stored states before their first step, on a device; ``steps``
    are on the host. Those with equally many run together, without padding: there are few such
    numbers.
    """
    numbers = [n for n in steps.unique().tolist() if n > 0]
    rows_of = ((n, (steps == n).nonzero().squeeze(-1)) for n in numbers)
    groups = [(n, rows.to(device, non_blocking=True)) for n, rows in rows_of]
    states: dict[NestedKey, Tensor] = {}
    for network in networks:
        modules = TensorDictSequential(*leaves(network))
        if not (keys := [as_key(key) for key in state_keys(modules)]):
            raise ValueError(
                f"{type(network).__name__} has no recurrent state: it reads no key for which it "
                'writes ("next", key). Pass networks with an LSTMModule or GRUModule.'
            )
        modules = modules.select_subsequence(out_keys=[next_key(key) for key in keys])
        for key in modules.in_keys:
            get_tensor(sequences, key, fix=STATE_FIX)
        for key in keys:
            states[key] = sequences.get(key)[:, 0].clone()
        for n, rows in groups:
            window = sequences.select(*modules.in_keys)[:, :n][rows]
            with set_recurrent_mode(True):
                window = modules(window)
            for key in keys:
                states[key][rows] = window.get(next_key(key))[:, -1]
    return states


def without_burn_in(
    sequences: TensorDictBase, lengths: Lengths, device: torch.device
) -> tuple[TensorDictBase, Tensor]:
    """Return the frames after burn-in, padded again, and the mask of real ones, on the device."""
    steps = lengths.burn_in.unsqueeze(-1)
    end = torch.maximum(lengths.end.unsqueeze(-1), steps + 1)
    kept = steps + torch.arange(int((end - steps).max()))
    rows = torch.arange(len(kept)).unsqueeze(-1) * sequences.shape[1]
    places = rows + kept.minimum(end - 1), kept < end
    index, real = (x.to(device, non_blocking=True) for x in places)
    return gather(sequences, index), real
