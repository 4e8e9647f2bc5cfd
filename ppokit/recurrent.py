"""LSTMModule and GRUModule: torchrl's recurrent modules without splitting batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeGuard, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence
from torchrl.modules import GRUModule as TorchRLGRUModule
from torchrl.modules import LSTMModule as TorchRLLSTMModule

from ppokit import kernels
from ppokit._batch import STATE_FIX, get_tensor, takes_tensordict, valid_mask
from ppokit._state import WholeState
from ppokit.functional._checks import check_bool
from ppokit.kernels.operator import run_lstm

_Module = TorchRLLSTMModule | TorchRLGRUModule


class _Unsplit(WholeState):
    #: the network's, in the graph of a training step: Dynamo looks at no ``nn.LSTM``
    graph_weights: Sequence[Tensor] = ()

    @takes_tensordict
    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the output and the states after each run into the TensorDict, and return it."""
        module, parent = cast("_Module", self), cast(Any, super()).forward
        backend = module.recurrent_backend
        if module.recurrent_mode and self.graph_weights:
            return _run_in_graph(module, self.graph_weights, tensordict)
        # The other backends are in the graphs that torchrl captures.
        if module.recurrent_mode and (
            backend == "pad" or (backend == "auto" and not is_dynamo_compiling())
        ):
            return _run(module, tensordict, parent)  # pyright: ignore[reportCallIssue]
        _check_step(module, tensordict)
        return parent(tensordict)


class LSTMModule(_Unsplit, TorchRLLSTMModule):
    r"""torchrl's :class:`~torchrl.modules.LSTMModule`, without splitting batches.

    With :math:`i_t, f_t, o_t` the gates of :class:`torch.nn.LSTM`,

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \qquad h_t = o_t \odot \tanh(c_t).

    Losses set the recurrent mode; GAE evaluates each step from its stored state. In this mode a run
    is the frames of one episode in one row. torchrl pads all runs to one length. This module calls
    ``nn.LSTM`` once for all steps
    at which the same runs go on. In training, if no episode starts within a row, it calls
    ``nn.LSTM`` once for all rows, padding included.

    Frames after a row's last True at ``("collector", "mask")`` are padding: the module ignores
    them, and their output is 0. ``("next", state)`` holds the state after the last step of each
    run, and zeros elsewhere. If gradients are recorded, it is also 0 after a row that ends in
    padding.

    The parent's code runs with two directions, ``python_based=True``, ``recurrent_backend="scan"``
    or ``"triton"``, under ``vmap`` and outside the recurrent mode. ``torch.compile`` leaves the
    module out of its graphs, but :class:`~ppokit.TrainingStep` has one layer in its own. Arguments,
    keys, parameters and ``state_dict`` are the parent's.

    Args:
        *args: those of the parent.
        **kwargs: those of the parent.

    Shape:
        - the input: ``[*B, T, I]``, float32 or float64.
        - states: ``[*B, T, layers, H]``, of which those at a row's first step and where ``is_init``
          is True are read; zeros where there are none.
        - ``"is_init"``: bool ``[*B, T, 1]``. A single step begins at zero there, and ignores a
          stored state.

    Raises:
        KeyError: there is no ``"is_init"``. (A missing state within an episode warns, on the CPU.)

    References:
        Hochreiter and Schmidhuber, 1997, "Long Short-Term Memory"; Gers, Schmidhuber and Cummins,
        2000, "Learning to Forget".

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> from ppokit import LSTMModule
        >>> lstm = LSTMModule(input_size=3, hidden_size=4, in_key="x", out_key="features")
        >>> starts = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3), "is_init": starts}, [2, 5])
        >>> with set_recurrent_mode(True):
        ...     lstm(batch)["features"].shape
        torch.Size([2, 5, 4])
    """


class GRUModule(_Unsplit, TorchRLGRUModule):
    r"""torchrl's :class:`~torchrl.modules.GRUModule`, without splitting batches.

    With :math:`r_t, z_t` the gates of :class:`torch.nn.GRU`,

    .. math:: n_t = \tanh(x_n + r_t \odot h_n), \qquad h_t = n_t + z_t \odot (h_{t-1} - n_t).

    It differs from the parent as :class:`LSTMModule` does, and has the same shapes.

    Args:
        *args: those of the parent.
        **kwargs: those of the parent.

    Raises:
        KeyError: there is no ``"is_init"``. (A missing state within an episode warns, on the CPU.)

    References:
        Cho et al., 2014, "Learning Phrase Representations using RNN Encoder-Decoder", section 2.3,
        with the reset gate after the product, as in torch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> from ppokit import GRUModule
        >>> gru = GRUModule(input_size=3, hidden_size=4, in_key="x", out_key="features")
        >>> starts = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3), "is_init": starts}, [2, 5])
        >>> with set_recurrent_mode(True):
        ...     gru(batch)["next", "recurrent_state"].shape
        torch.Size([2, 5, 1, 4])
    """


def is_memory(module: nn.Module) -> TypeGuard[_Module]:
    """Return whether a module is an LSTMModule or a GRUModule of this file."""
    return isinstance(module, _Unsplit)


def no_graph_of(module: _Module, amp_dtype: torch.dtype | None) -> str | None:
    """Return why the graph of a training step cannot hold a recurrent module, or None."""
    network = module.lstm if isinstance(module, TorchRLLSTMModule) else module.gru
    if type(network) is not nn.LSTM or network.num_layers > 1 or network.bidirectional:
        return "is no nn.LSTM of one layer, the one that a graph can hold"
    if not network.bias or network.proj_size or not torch.backends.mkldnn.is_available():
        return "has no biases, or proj_size, or torch has no oneDNN"
    weights, backend = [*module.parameters()], module.recurrent_backend
    if backend not in ("pad", "auto") or not all(p.requires_grad for p in weights):
        return f"has frozen weights, or recurrent_backend={backend!r}"
    if amp_dtype is not None or torch.is_autocast_enabled("cpu"):
        return "is in mixed precision"
    is_plain = all(p.is_cpu and p.dtype is torch.float32 for p in weights)
    return None if is_plain else "is not in float32 on the CPU"


def _check_step(module: _Module, tensordict: TensorDictBase) -> None:
    """Raise a KeyError without "is_init"; warn where a step within an episode has no state."""
    if is_dynamo_compiling() or kernels.in_function_transform():
        return
    fix = (
        "At inference pass True at the first step of an episode and else False, [*B, 1], and as "
        f"states the entries ('next', state) of the step before. {STATE_FIX}"
    )
    is_init = get_tensor(tensordict, "is_init", fix=fix)
    if module.recurrent_mode or not is_init.is_cpu or is_init.all():
        return
    missing = [key for key in module.in_keys[1:-1] if tensordict.get(key, None) is None]
    if missing:
        warnings.warn(
            f"{missing} are not in the batch: the state begins at zero in every step. {STATE_FIX}",
            RuntimeWarning,
            stacklevel=3,
        )


def _run_in_graph(
    module: _Module, weights: Sequence[Tensor], tensordict: TensorDictBase
) -> TensorDictBase:
    """Write the output as :func:`_run` does, by an operator of a graph, and no states."""
    x, is_init, real, states = _read(module, tensordict, valid_mask(tensordict))
    states = states or [x.new_zeros(*x.shape[:2], 1, weights[1].shape[1])] * 2
    if real is not None:
        x = x.masked_fill(~real.unsqueeze(-1), 0)
    steps_first = (y.transpose(0, 1) for y in (x, is_init, *(z.squeeze(2) for z in states)))
    output = run_lstm(*steps_first, *weights)[0].transpose(0, 1)
    if real is not None:
        output = output.masked_fill(~real.unsqueeze(-1), 0)
    key, *others = module.out_keys
    for other in others:  # whoever reads one misses it, and the step is made eagerly
        if other in tensordict.keys(True):
            tensordict.del_(other)
    return tensordict.set(key, output)


@torch.compiler.disable
def _run(
    module: _Module, tensordict: TensorDictBase, parent: Callable[[TensorDictBase], TensorDictBase]
) -> TensorDictBase:
    """Write output and states for a TensorDict ``[*B, T]``, eagerly, or let the parent do it."""
    network: nn.RNNBase = module.lstm if isinstance(module, TorchRLLSTMModule) else module.gru
    shape = tensordict.batch_size
    if 0 in shape:
        raise ValueError(f"The batch is empty: it has shape {list(shape)}.")
    is_missing = {tensordict.get(key, None) is None for key in module.in_keys[1:-1]}
    is_plain = type(network) in (nn.LSTM, nn.GRU) and not network.bidirectional
    is_batch = shape and isinstance(tensordict.get(module.in_keys[0], None), Tensor)
    if not (is_batch and is_plain) or len(is_missing) > 1 or kernels.in_function_transform():
        return parent(tensordict)
    mask = valid_mask(tensordict)
    x, is_init, real, states = _read(
        module, tensordict, None if mask is None or mask.all() else mask
    )
    knows_states = real is None or not real.any()
    if (knows_states or torch.is_grad_enabled()) and not is_init[:, 1:].any():
        found = _run_rows(network, x, [state[:, 0] for state in states], real)
    else:
        found = _run_packed(network, x, states, is_init, real)
    return _write(module, tensordict, found)


def _read(
    module: _Module, tensordict: TensorDictBase, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Return input, episode starts, frames that are no padding or None, and states ``[N, T]``."""
    is_init = get_tensor(tensordict, "is_init", fix=STATE_FIX)
    entries = [tensordict.get(key) for key in module.in_keys[:-1] if key in tensordict]
    # Sizes of a TensorDict are constants of a graph; those of its entries are not.
    shape = entries[0].shape[:-1] if is_dynamo_compiling() else tensordict.batch_size
    check_bool("is_init", is_init)
    if (is_init.squeeze(-1) if is_init.ndim > len(shape) else is_init).shape != shape:
        raise ValueError(
            f"'is_init' has shape {list(is_init.shape)}; it is one flag for each frame of "
            f"{list(shape)}, with a trailing 1. torchrl's InitTracker writes it."
        )
    rows, steps = shape[:-1].numel(), shape[-1]
    is_init, real = is_init.reshape(rows, steps), None
    if mask is not None:
        # The frames after the last valid frame of a row are padding.
        real = mask.reshape(rows, steps).flip(1).cummax(1).values.flip(1)
        is_init = is_init & real
    x, *states = (entry.reshape(rows, steps, *entry.shape[len(shape) :]) for entry in entries)
    return x, is_init, real, [state.to(x.dtype) for state in states]


def _write(module: _Module, tensordict: TensorDictBase, found: Sequence[Tensor]) -> TensorDictBase:
    """Write output and states ``[N, T, ...]`` into the TensorDict ``[*B, T]``, and return it."""
    shape = tensordict.batch_size
    for key, made in zip(module.out_keys, found, strict=True):
        tensordict.set(key, made if tensordict.ndim == 2 else made.reshape(*shape, *made.shape[2:]))
    return tensordict


def _run_rows(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], real: Tensor | None
) -> list[Tensor]:
    """Return output ``[B, T, H]`` and last states ``[B, T, layers, H]``, 0 after padding."""
    if real is not None and not x.detach().sum().isfinite():  # a gradient of 0 times NaN is NaN
        x = x.masked_fill(~real.unsqueeze(-1), 0)
    output, after = _call(network, x, [state.transpose(0, 1) for state in states])
    after = [state.transpose(0, 1).unsqueeze(1) for state in after]
    if real is not None:
        # Not by a product: the gradient of padding may not be finite.
        output = output.masked_fill(~real.unsqueeze(-1), 0)
        after = [state.masked_fill(~real[:, -1].view(-1, 1, 1, 1), 0) for state in after]
    before = (0, 0, 0, 0, x.shape[1] - 1, 0)
    return [output, *(nn.functional.pad(state, before) for state in after)]


def _run_packed(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], is_init: Tensor, real: Tensor | None
) -> list[Tensor]:
    """Return the output ``[B, T, H]``, and the states after each run ``[B, T, layers, H]``."""
    frames, starts, ends, sizes = _pack(is_init, real)
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
    """Return the output of packed frames ``[F, H]``, and the last states ``[layers, N, H]``."""
    # On the CPU, torch takes several times as long over packed sequences.
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


def _call(network: nn.RNNBase, x: object, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return output and states after the last step; no states stand for zeros."""
    given = tuple(state.contiguous() for state in states)
    if isinstance(network, nn.LSTM):
        output, after = network(x, given or None)
        return output, list(after)
    output, after = network(x, *given)
    return output, [after]


def _pack(is_init: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return the runs of a batch ``[B, T]``, as in :class:`torch.nn.utils.rnn.PackedSequence`.

    A run goes from a row's start, or a True of ``is_init``, to the next one or to the row's last
    frame; only ``real`` frames ``[B, T]``, a row's first ones, are in runs (None: all). Returns
    the positions in the flattened batch of the packed frames ``[F]``, by their step in a run,
    longer runs first, and of the first and the last frame of each run ``[N]``; and the number of
    runs that have a frame at each step.
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
    return (first + step)[running], first, last, running.sum(1).tolist()
