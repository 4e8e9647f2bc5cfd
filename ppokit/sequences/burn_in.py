"""Burn-in: computing the states of networks after the first frames of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from ppokit._calls import leaves
from ppokit._host import to_device_of
from ppokit._keys import STATE_FIX, as_key, get_tensor, state_keys
from ppokit.sequences.cutting import gather, next_key


@torch.no_grad()
def burned_in_states(
    sequences: TensorDictBase, steps: Tensor, networks: Sequence[nn.Module]
) -> dict[NestedKey, Tensor]:
    """Return the states ``[N, ...]`` of the networks after the first ``steps`` ``[N]``.

    ``sequences`` ``[N, L]`` hold the stored states before their first step; ``steps`` are on the
    host. Those with equally many run together, without padding: there are few such numbers.
    """
    like = next(iter(sequences.values(True, True)))
    numbers = [n for n in steps.unique().tolist() if n > 0]
    groups = [(n, to_device_of(like, (steps == n).nonzero().squeeze(-1))) for n in numbers]
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
            window: Any = sequences.select(*modules.in_keys)[:, :n][rows]
            with set_recurrent_mode(True):
                window = modules(window)
            for key in keys:
                states[key][rows] = window.get(next_key(key))[:, -1]
    return states


def without_burn_in(
    sequences: TensorDictBase, steps: Tensor, end: Tensor
) -> tuple[TensorDictBase, Tensor]:
    """Return the frames after the first ``steps`` ``[N]``, padded again, and the mask of real ones.

    The padding of the sequences ``[N, L]`` begins at ``end`` ``[N]``. Both are on the host.
    """
    steps, end = steps.unsqueeze(-1), torch.maximum(end, steps + 1).unsqueeze(-1)
    kept = steps + torch.arange(int((end - steps).max()))
    rows = torch.arange(len(kept)).unsqueeze(-1) * sequences.shape[1]
    like = next(iter(sequences.values(True, True)))
    index, real = (to_device_of(like, x) for x in (rows + kept.minimum(end - 1), kept < end))
    return gather(sequences, index), real
