"""Running a recurrent network over the runs of a batch: the frames of one episode in one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence

from ppokit import kernels
from ppokit._keys import get_tensor, valid_mask
from ppokit.recurrent import gru

_FIX = "Append torchrl's InitTracker() to the environment, or collect with GymCollector."


def runs_in_one_call(module: Any) -> bool:
    """Return whether the module is in recurrent mode, outside the graphs that torchrl captures."""
    backend = module.recurrent_backend
    return module.recurrent_mode and (
        backend == "pad" or (backend == "auto" and not is_dynamo_compiling())
    )


@torch.compiler.disable
def run_recurrent(
    module: Any,
    network: nn.RNNBase,
    tensordict: TensorDictBase,
    otherwise: Callable[[TensorDictBase], TensorDictBase],
) -> TensorDictBase:
    """Write the network's output for a TensorDict ``[*B, T]``, and the state after each run.

    Under ``torch.compile`` it runs eagerly, between two graphs.

    Args:
        module: the module that names the keys.
        network: its LSTM or GRU.
        tensordict: the batch, read and written to.
        otherwise: the parent's method, called where this function does not support the network or
            the batch.
    """
    if not _is_supported(module, network, tensordict):
        return otherwise(tensordict)
    shape, steps = tensordict.batch_size, tensordict.batch_size[-1]
    starts = get_tensor(tensordict, "is_init", fix=_FIX).reshape(-1, steps).clone()
    starts[:, 0] = True
    mask, real = valid_mask(tensordict), None
    if mask is not None:  # what comes after the last valid frame of a row is padding
        real = mask.reshape(-1, steps).flip(1).cummax(1).values.flip(1)
        starts &= real
    if not starts.any():  # nothing but padding
        return otherwise(tensordict)
    x, *states = (_rows(tensordict, key) for key in module.in_keys[:-1] if key in tensordict)
    states = [state.to(x.dtype) for state in states]
    if gru.runs_natively(network, x) or starts[:, 1:].any():
        output, after, ends = _run_packed(network, x, states, pack(starts, real))
    else:
        output, after, ends = _run_padded(network, x, states, real)
    tensordict.set(module.out_keys[0], output.unflatten(0, shape))
    for key, state in zip(module.out_keys[1:], after, strict=True):
        state = state.transpose(0, 1)
        whole = state.new_zeros(shape.numel(), *state.shape[1:]).index_copy(0, ends, state)
        tensordict.set(key, whole.unflatten(0, shape))
    return tensordict


def _is_supported(module: Any, network: nn.RNNBase, tensordict: TensorDictBase) -> bool:
    x = tensordict.get(module.in_keys[0], None)
    given = [tensordict.get(key, None) is None for key in module.in_keys[1:-1]]
    return (
        isinstance(x, Tensor)
        and tensordict.ndim > 0
        and x.numel() > 0
        and x.ndim == tensordict.ndim + 1
        and type(network) in (nn.LSTM, nn.GRU)
        and not network.bidirectional
        and len(set(given)) == 1  # all states, or none
        and not kernels.in_function_transform()
    )


def _rows(tensordict: TensorDictBase, key: Any) -> Tensor:
    """Return an entry ``[B, T, ...]``; one that is expanded over its sequence stays so."""
    x, ndim = tensordict.get(key), tensordict.ndim
    return x.unsqueeze(0) if ndim == 1 else x.flatten(0, ndim - 2)


def _run_padded(
    network: Any, x: Tensor, states: list[Tensor], real: Tensor | None
) -> tuple[Tensor, Sequence[Tensor], Tensor]:
    """Run over rows of one run each: padding is faster than packing, where it is little.

    Return the output ``[B * T, H]``, states after some runs ``[layers, N, H]``, and where those end
    ``[N]``. torch returns no state but the one after the padding, so that rows with padding have
    none.
    """
    rows, steps = x.shape[:2]
    if real is not None:
        x = x.masked_fill(~real.unsqueeze(-1), 0)
    first = [state[:, 0].transpose(0, 1) for state in states]
    output, after = _call(network, x, first)
    ends = torch.arange(rows, device=x.device)
    if real is not None:
        output = output.masked_fill(~real.unsqueeze(-1), 0)
        ends = real[:, -1].nonzero().squeeze(1)
        after = [state[:, ends] for state in after]
    return output.flatten(0, 1), after, ends * steps + steps - 1


def _run_packed(
    network: Any, x: Tensor, states: list[Tensor], packing: Packing
) -> tuple[Tensor, Sequence[Tensor], Tensor]:
    """Run over packed runs; return the same, with the states after all runs."""
    frames, starts, ends, sizes = packing
    rows, steps = x.shape[:2]
    packed = x.flatten(0, 1).index_select(0, frames)
    first = [state[starts // steps, starts % steps].transpose(0, 1) for state in states]
    if gru.runs_natively(network, x):
        output, layers = gru.run_packed(network, packed, first[0] if first else None, sizes)
        order = torch.arange(len(frames))
        last = order.new_empty(rows * steps).index_copy(0, frames, order)[ends]
        after = [torch.stack([states[last] for states in layers])]
    else:
        sequence, after = _call(network, PackedSequence(packed, torch.tensor(sizes)), first)
        output = sequence.data
    whole = output.new_zeros(rows * steps, output.shape[1])
    return whole.index_copy(0, frames, output), after, ends


def _call(network: Any, x: Any, states: list[Tensor]) -> tuple[Any, Sequence[Tensor]]:
    """Call an LSTM or a GRU; return the output, and a list of the states."""
    if isinstance(network, nn.LSTM):
        return network(x, tuple(map(Tensor.contiguous, states)) or None)
    output, state = network(x, states[0].contiguous() if states else None)
    return output, [state]


class Packing(NamedTuple):
    """The runs of a batch ``[B, T]`` for :class:`torch.nn.utils.rnn.PackedSequence`.

    Packed frames are ordered by their step in a run, and among those of one step the longer runs
    come first.
    """

    frames: Tensor  #: the position of each packed frame in the flattened batch ``[F]``
    starts: Tensor  #: the position of the first frame of each run ``[N]``
    ends: Tensor  #: the position of the last frame of each run ``[N]``
    sizes: list[int]  #: number of runs that have a frame at each step; together F


def pack(starts: Tensor, real: Tensor | None) -> Packing:
    """Return the runs: from each True of ``starts`` to the next one, or to the row's last frame.

    Args:
        starts: bool ``[B, T]``, with at least one True.
        real: the frames up to the last valid one of each row ``[B, T]``, bool; None for all.

    Example:
        >>> starts = torch.tensor([[True, True, False], [True, False, False]])
        >>> pack(starts, None)
        Packing(frames=tensor([3, 1, 0, 4, 2, 5]), starts=tensor([3, 1, 0]), ends=tensor([5, 2, 0]), sizes=[3, 2, 1])
    """
    goes_on = torch.zeros_like(starts)
    goes_on[:, :-1] = ~starts[:, 1:]
    if real is not None:
        goes_on[:, :-1] &= real[:, 1:]
    last = ~goes_on if real is None else real & ~goes_on
    first, end = (x.flatten().nonzero().squeeze(1) for x in (starts, last))
    lengths, order = (end - first).sort(descending=True, stable=True)
    first, end = first[order], end[order]
    step = torch.arange(int(lengths[0]) + 1, device=first.device)
    running = lengths >= step.unsqueeze(1)
    return Packing((first + step.unsqueeze(1))[running], first, end, running.sum(1).tolist())
