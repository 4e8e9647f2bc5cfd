"""Running a recurrent network over packed runs of frames, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ppokit import kernels
from ppokit._calls import is_hooked_or_patched
from ppokit._keys import get_tensor, valid_mask
from ppokit.recurrent.cells import PackedGRU, PackedLSTM

_FIX = "Append torchrl's InitTracker() to the environment, or collect with GymCollector."


def uses_packing(module: Any) -> bool:
    """Return whether the module is in recurrent mode, outside the graphs that torchrl captures."""
    backend = module.recurrent_backend
    return module.recurrent_mode and (
        backend == "pad" or (backend == "auto" and not is_dynamo_compiling())
    )


@torch.compiler.disable
def run_packed(
    module: Any,
    network: nn.RNNBase,
    tensordict: TensorDictBase,
    otherwise: Callable[[TensorDictBase], TensorDictBase],
) -> TensorDictBase:
    """Write the network's output for a TensorDict ``[*B, T]``, and its states after each step.

    Under ``torch.compile`` it runs eagerly, between two graphs.

    Args:
        module: the module that names the keys.
        network: its LSTM or GRU.
        tensordict: the batch, read and written to.
        otherwise: the parent's method, called where the cells of this package do not support the
            network or the batch.
    """
    if not _is_supported(module, network, tensordict):
        return otherwise(tensordict)
    shape, steps = tensordict.batch_size, tensordict.batch_size[-1]
    is_init = get_tensor(tensordict, "is_init", fix=_FIX).reshape(-1, steps)
    mask = valid_mask(tensordict)
    packing = pack(is_init, None if mask is None else mask.reshape(-1, steps))
    if not packing.sizes:  # nothing but padding
        return otherwise(tensordict)
    x = tensordict.get(module.in_keys[0]).flatten(0, len(shape) - 1)
    packed = x.index_select(0, packing.frames)
    states = [_first(tensordict, key, packing.starts) for key in module.in_keys[1:-1]]
    after: list[list[Tensor]] = []
    for layer in range(network.num_layers):
        names = [f"{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        parameters = [getattr(network, name, None) for name in names]
        first = [_of_layer(state, layer, network, packed, packing.sizes[0]) for state in states]
        if isinstance(network, nn.LSTM):
            outputs: Any = PackedLSTM.apply(packed, *first, *parameters, packing.sizes)
        else:
            outputs = (PackedGRU.apply(packed, *first, *parameters, packing.sizes),)
        packed = outputs[0]
        after.append([_unpack(state, packing.frames, shape) for state in outputs])
    tensordict.set(module.out_keys[0], after[-1][0])
    for nth, key in enumerate(module.out_keys[1:]):
        layers = [states[nth] for states in after]
        tensordict.set(key, torch.stack(layers, -2) if len(layers) > 1 else layers[0].unsqueeze(-2))
    return tensordict


def _is_supported(module: Any, network: nn.RNNBase, tensordict: TensorDictBase) -> bool:
    x = tensordict.get(module.in_keys[0], None)
    return (
        kernels.direct_kernel() is not None
        and kernels.has_wide_vectors()
        and not kernels.in_function_transform()
        and not torch.is_autocast_enabled("cpu")
        and isinstance(x, Tensor)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == network.weight_ih_l0.dtype
        and type(network) in (nn.LSTM, nn.GRU)
        and not (network.bidirectional or network.proj_size)
        and not (network.dropout and network.training)
        and not is_hooked_or_patched(network)
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


def _unpack(packed: Tensor, frames: Tensor, shape: torch.Size) -> Tensor:
    """Return packed frames ``[F, H]`` at their positions in the batch; 0 in the padding."""
    batch = packed.new_zeros(shape.numel(), packed.shape[1])
    return batch.index_copy(0, frames, packed).unflatten(0, shape)


class Packing(NamedTuple):
    """The runs of a batch ``[B, T]``: consecutive steps of one episode in one row.

    Packed frames are ordered by their step in a run, and among those of one step the longer runs
    come first, as in :class:`torch.nn.utils.rnn.PackedSequence`.
    """

    frames: Tensor  #: the position of each packed frame in the flattened batch ``[F]``
    starts: Tensor  #: the position of the first frame of each run ``[N]``
    sizes: list[int]  #: number of runs that have a frame at each step; together F


def pack(is_init: Tensor, mask: Tensor | None) -> Packing:
    """Return the runs: from a row's start or a True, to the next one or the last valid frame.

    Args:
        is_init: bool ``[B, T]``.
        mask: the valid frames ``[B, T]``, bool; None for all. Frames after a row's last one are in
            no run, frames before it are.

    Example:
        >>> is_init = torch.tensor([[False, True, False], [False, False, False]])
        >>> pack(is_init, None)
        Packing(frames=tensor([3, 1, 0, 4, 2, 5]), starts=tensor([3, 1, 0]), sizes=[3, 2, 1])
    """
    rows, steps = is_init.shape
    step = torch.arange(steps, device=is_init.device)
    starts = is_init.clone()
    starts[:, 0] = True
    ends = torch.full((rows,), steps, device=is_init.device)
    if mask is not None:
        ends = torch.where(mask, step + 1, 0).amax(1)
        starts &= step < ends.unsqueeze(1)
    first = starts.flatten().nonzero().squeeze(1)
    row = first // steps
    # A run ends with its row, or where the next one starts.
    last = (row * steps + ends[row]).minimum(
        torch.cat([first[1:], first.new_full((1,), rows * steps)])
    )
    lengths, order = (last - first).sort(descending=True, stable=True)
    if not len(lengths):  # nothing but padding
        return Packing(first, first, [])
    first = first[order]
    running = lengths > step[: int(lengths[0]), None]
    return Packing((first + step[: len(running), None])[running], first, running.sum(1).tolist())
