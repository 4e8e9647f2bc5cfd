"""Running a recurrent network over the runs of a batch: the frames of one episode in one row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence

from ppokit import kernels
from ppokit._keys import get_tensor, valid_mask
from ppokit._recurrent import FIX


def runs_in_one_call(module: Any) -> bool:
    """Return whether the module is in recurrent mode, outside the graphs that torchrl captures."""
    backend = module.recurrent_backend
    return module.recurrent_mode and (
        backend == "pad" or (backend == "auto" and not is_dynamo_compiling())
    )


def check_step(module: Any, tensordict: TensorDictBase) -> None:
    """Raise a KeyError without "is_init"; warn where a step within an episode has no state."""
    if is_dynamo_compiling() or kernels.in_function_transform():
        return
    is_init = get_tensor(tensordict, "is_init", fix=FIX)
    if module.recurrent_mode or not is_init.is_cpu or is_init.all():
        return
    missing = [key for key in module.in_keys[1:-1] if tensordict.get(key, None) is None]
    if missing:
        warnings.warn(
            f"{missing} are not in the batch: the state begins at zero in every step. {FIX}",
            RuntimeWarning,
            stacklevel=3,
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
        otherwise: the parent's method, called for networks and batches that are not supported.
    """
    shape = tensordict.batch_size
    if 0 in shape:
        raise ValueError(f"The batch is empty: it has shape {list(shape)}.")
    if not _is_supported(module, network, tensordict):
        return otherwise(tensordict)
    steps = shape[-1]
    is_init = get_tensor(tensordict, "is_init", fix=FIX)
    if is_init.dtype is not torch.bool or is_init.shape not in (shape, (*shape, 1)):
        raise ValueError(
            f"'is_init' is {is_init.dtype} of shape {list(is_init.shape)}; it must be bool, of "
            f"shape {[*shape, 1]}. {FIX}"
        )
    is_init = is_init.reshape(-1, steps)
    mask, real = valid_mask(tensordict), None
    if mask is not None and not mask.all():
        # The frames after the last valid frame of a row are padding.
        real = mask.reshape(-1, steps).flip(1).cummax(1).values.flip(1)
        is_init = is_init & real
    x, *states = (_rows(tensordict, key) for key in module.in_keys[:-1] if key in tensordict)
    states = [state.to(x.dtype) for state in states]
    knows_states = real is None or not real.any()
    if (knows_states or torch.is_grad_enabled()) and not is_init[:, 1:].any():
        found = _run_rows(network, x, [state[:, 0] for state in states], real)
    else:
        found = _run_packed(network, x, states, pack(is_init, real))
    for key, made in zip(module.out_keys, found, strict=True):
        tensordict.set(key, made if tensordict.ndim == 2 else made.reshape(*shape, *made.shape[2:]))
    return tensordict


def _is_supported(module: Any, network: nn.RNNBase, tensordict: TensorDictBase) -> bool:
    x = tensordict.get(module.in_keys[0], None)
    is_missing = [tensordict.get(key, None) is None for key in module.in_keys[1:-1]]
    if not isinstance(x, Tensor) or tensordict.ndim == 0 or len(set(is_missing)) > 1:
        return False
    if type(network) not in (nn.LSTM, nn.GRU) or network.bidirectional:
        return False
    if list(x.shape) != [*tensordict.batch_size, network.input_size]:
        raise ValueError(
            f"{module.in_keys[0]!r} has shape {list(x.shape)}; for {type(module).__name__} it must "
            f"be {[*tensordict.batch_size, network.input_size]}."
        )
    return not kernels.in_function_transform()


def _rows(tensordict: TensorDictBase, key: Any) -> Tensor:
    """Return an entry ``[B, T, ...]``; one that is expanded over its sequence stays so."""
    x, ndim = tensordict.get(key), tensordict.ndim
    return x.unsqueeze(0) if ndim == 1 else x.flatten(0, ndim - 2)


def _run_rows(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], real: Tensor | None
) -> list[Tensor]:
    """Return the output ``[B, T, H]``, and the states after each row ``[B, T, layers, H]``.

    One call over all rows, padding included, is the fastest in training. The states after rows that
    end in padding are then unknown, and written as 0.
    """
    if real is not None:
        x = x.masked_fill(~real.unsqueeze(-1), 0)
    output, after = _call(network, x, [state.transpose(0, 1) for state in states])
    after = [state.transpose(0, 1).unsqueeze(1) for state in after]
    if real is not None:
        output = output.masked_fill(~real.unsqueeze(-1), 0)
        after = [state.masked_fill(~real[:, -1].view(-1, 1, 1, 1), 0) for state in after]
    before = [state.new_zeros(len(x), x.shape[1] - 1, *state.shape[2:]) for state in after]
    return [output, *(torch.cat(parts, 1) for parts in zip(before, after, strict=True))]


def _run_packed(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], packing: Packing
) -> list[Tensor]:
    """Return the output ``[B, T, H]``, and the states after each run ``[B, T, layers, H]``."""
    frames, starts, ends, sizes = packing
    rows, steps = x.shape[:2]
    packed = x.flatten(0, 1).index_select(0, frames)
    first = [state[starts // steps, starts % steps].transpose(0, 1) for state in states]
    if x.is_cuda:
        output, after = _call(network, PackedSequence(packed, torch.tensor(sizes)), first)
        output = output.data
    else:
        output, after = _run_segments(network, packed, first, sizes)

    def unpack(values: Tensor, places: Tensor) -> Tensor:
        whole = values.new_zeros(rows * steps, *values.shape[1:])
        return whole.index_copy(0, places, values).unflatten(0, (rows, steps))

    return [unpack(output, frames), *(unpack(state.transpose(0, 1), ends) for state in after)]


def _run_segments(
    network: nn.RNNBase, packed: Tensor, states: list[Tensor], sizes: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of packed frames ``[F, H]``, and the last states ``[layers, N, H]``.

    The network is called once for all steps at which the same runs continue. On the CPU, torch
    takes several times as long over packed sequences.
    """
    segments = [(running, len(list(same))) for running, same in groupby(sizes)]
    outputs, ended = [], []
    for part, (running, steps), (going_on, _) in zip(
        packed.split([running * steps for running, steps in segments]),
        segments,
        [*segments[1:], (0, 0)],
        strict=True,
    ):
        x = part.view(steps, running, -1).transpose(0, 1)
        output, states = _call(network, x, states)
        outputs.append(output.transpose(0, 1).flatten(0, 1))
        ended.append([state[:, going_on:] for state in states])
        states = [state[:, :going_on] for state in states]
    return torch.cat(outputs), [torch.cat(parts[::-1], 1) for parts in zip(*ended, strict=True)]


def _call(network: nn.RNNBase, x: Any, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return output and states after the last step; no states stand for zeros."""
    given: Any = tuple(state.contiguous() for state in states)
    if isinstance(network, nn.LSTM):
        output, after = network(x, given or None)
        return output, list(after)
    output, after = network(x, *given)
    return output, [after]


class Packing(NamedTuple):
    """The runs of a batch ``[B, T]``, as in :class:`torch.nn.utils.rnn.PackedSequence`.

    Packed frames are ordered by their step in a run, and among those of one step the longer runs
    come first.
    """

    frames: Tensor  #: the position of each packed frame in the flattened batch ``[F]``
    starts: Tensor  #: the position of the first frame of each run ``[N]``
    ends: Tensor  #: the position of the last frame of each run ``[N]``
    sizes: list[int]  #: number of runs that have a frame at each step; together F


def pack(is_init: Tensor, real: Tensor | None) -> Packing:
    """Return the runs: from a row's start or a True, to the next one or to the row's last frame.

    Args:
        is_init: bool ``[B, T]``.
        real: the frames that are in runs ``[B, T]``, bool, a row's first ones; None for all.

    Example:
        >>> is_init = torch.tensor([[False, True, False], [False, False, False]])
        >>> pack(is_init, None).frames
        tensor([3, 1, 0, 4, 2, 5])
    """
    starts, ends = is_init.clone(), torch.ones_like(is_init)
    starts[:, 0] = True
    ends[:, :-1] = is_init[:, 1:]
    if real is not None:
        starts &= real
        ends[:, :-1] |= ~real[:, 1:]
        ends &= real
    first, last = (x.flatten().nonzero().squeeze(1) for x in (starts, ends))
    lengths, order = (last - first).sort(descending=True, stable=True)
    first, last = first[order], last[order]
    step = torch.arange(int(lengths[0]) + 1, device=first.device).unsqueeze(1)
    running = lengths >= step
    return Packing((first + step)[running], first, last, running.sum(1).tolist())
