"""A recurrent network over what a TensorDict holds, past what is padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ppokit import kernels
from ppokit._keys import get_tensor, valid_mask
from ppokit._watch import has_hooks
from ppokit.recurrent.gru import PackedGRU
from ppokit.recurrent.lstm import PackedLSTM
from ppokit.recurrent.packing import Pack, Unpack, pack

_FIX = "Append torchrl's InitTracker() to the environment, or collect with GymCollector."


def runs_here(module: Any) -> bool:
    """Return whether the module runs over whole rows, and not in a graph of torchrl's."""
    backend = module.recurrent_backend
    return module.recurrent_mode and (
        backend == "pad" or (backend == "auto" and not is_dynamo_compiling())
    )


@torch.compiler.disable
def run(
    module: Any,
    network: nn.RNNBase,
    tensordict: TensorDictBase,
    otherwise: Callable[[TensorDictBase], TensorDictBase],
) -> TensorDictBase:
    """Write what the network makes of a TensorDict ``[*B, T]``, and its states after each step.

    Under ``torch.compile`` it runs eagerly, between two graphs.

    Args:
        module: whose keys count.
        network: an LSTM or GRU.
        tensordict: what is read and written to.
        otherwise: to call where the layers of this package do not do all that the network does.
    """
    if not _is_served(module, network, tensordict):
        return otherwise(tensordict)
    shape, steps = tensordict.batch_size, tensordict.batch_size[-1]
    is_init = get_tensor(tensordict, "is_init", fix=_FIX).reshape(-1, steps)
    mask = valid_mask(tensordict)
    packing = pack(is_init, None if mask is None else mask.reshape(-1, steps))
    if not packing.sizes:  # nothing but padding
        return otherwise(tensordict)
    x = tensordict.get(module.in_keys[0]).flatten(0, len(shape) - 1)
    packed: Any = Pack.apply(x, packing.frames)
    states = [_first(tensordict, key, packing.starts) for key in module.in_keys[1:-1]]
    after: list[list[Any]] = []
    for layer in range(network.num_layers):
        names = [f"{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        parameters = [getattr(network, name, None) for name in names]
        first = [_of_layer(state, layer, network, packed, packing.sizes[0]) for state in states]
        if isinstance(network, nn.LSTM):
            made: Any = PackedLSTM.apply(packed, *first, *parameters, packing.sizes)
        else:
            made = (PackedGRU.apply(packed, *first, *parameters, packing.sizes),)
        packed = made[0]
        frames = (Unpack.apply(state, packing.frames, len(x)) for state in made)
        after.append([state.unflatten(0, shape) for state in frames])
    tensordict.set(module.out_keys[0], after[-1][0])
    for nth, key in enumerate(module.out_keys[1:]):
        layers = [states[nth] for states in after]
        tensordict.set(key, torch.stack(layers, -2) if len(layers) > 1 else layers[0].unsqueeze(-2))
    return tensordict


def _is_served(module: Any, network: nn.RNNBase, tensordict: TensorDictBase) -> bool:
    x = tensordict.get(module.in_keys[0], None)
    return (
        kernels.direct_kernel() is not None
        and kernels.has_wide_vectors()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cpu")
        and isinstance(x, Tensor)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == network.weight_ih_l0.dtype
        and type(network) in (nn.LSTM, nn.GRU)
        and not (network.bidirectional or network.proj_size)
        and not (network.dropout and network.training)
        and not has_hooks(network)
        and tensordict.ndim > 0
        and x.numel() > 0
    )


def _first(tensordict: TensorDictBase, key: Any, starts: Tensor) -> Tensor | None:
    """Return the state before the first step of each run ``[N, layers, H]``."""
    state = tensordict.get(key, None)
    if state is None:
        return None
    ndim, steps = tensordict.ndim, tensordict.batch_size[-1]
    if ndim == 1:
        return state[starts]
    # By two indices: a state that is expanded over its sequence stays so.
    rows = state if ndim == 2 else state.flatten(0, ndim - 2)
    return rows[starts // steps, starts % steps]


def _of_layer(state: Tensor | None, layer: int, network: Any, like: Tensor, rows: int) -> Tensor:
    if state is None:
        return like.new_zeros(rows, network.hidden_size)
    return state[:, layer].to(like.dtype)
