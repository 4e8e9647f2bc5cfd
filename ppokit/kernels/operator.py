"""Operators of graphs: ``torch.ops.ppokit.linear_scan``, and ``torch.ops.ppokit.lstm`` at the end.

The scan serves compile, autograd, vmap and export. It is one operator for every T, so a compiled
graph does not unroll time. Its gradient is the same scan in the other direction: it is
differentiable to any order, in O(T) memory. It runs in C, or in torch on other devices and without
a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ppokit import kernels

_library = torch.library.Library("ppokit", "DEF")
_library.define(
    "linear_scan(Tensor x, Tensor decay, Tensor initial, bool reverse, int dim) -> Tensor"
)


def linear_scan(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool, dim: int) -> Tensor:
    """Return ``y_t = x_t + decay_t * y_{t-1}`` along ``dim``, contiguous; reversed ``y_{t+1}``.

    ``x`` and ``decay`` are ``[*B, T, *F]`` with ``T >= 1``, float32 or float64; ``initial`` is
    ``y`` before the first step (or after the last), without ``dim``.
    """
    # torch.func and forward-mode derivatives ignore the derivatives that are registered for
    # operators, the latter silently.
    if kernels.in_function_transform() or kernels.in_forward_mode():
        return _scan_in_torch(x, decay, initial, reverse, dim)
    return torch.ops.ppokit.linear_scan(x, decay, initial, reverse, dim)


def _run(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool, dim: int) -> Tensor:
    y = kernels.fused_scan(x, decay, initial, reverse, dim)
    return _scan_in_torch(x, decay, initial, reverse, dim) if y is None else y


def _scan_in_torch(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool, dim: int) -> Tensor:
    shape = x.movedim(dim, -1).shape
    x, decay = (tensor.movedim(dim, -1).reshape(-1, shape[-1]) for tensor in (x, decay))
    if reverse:
        x, decay = x.flip(-1), decay.flip(-1)
    first = _compose(x[:, :1], decay[:, :1], initial.reshape(-1, 1))
    y = _scan_pairs(torch.cat([first, x[:, 1:]], dim=-1), decay)
    y = y.flip(-1) if reverse else y
    return y.reshape(shape).movedim(-1, dim).contiguous()


def _scan_pairs(x: Tensor, decay: Tensor) -> Tensor:
    """Return the scan along the last dimension from 0 (Blelloch, 1990, section 1.4).

    The maps ``y -> x_t + decay_t * y`` of two neighbouring steps compose to a map of the same form,
    which halves the length.
    """
    steps = x.shape[-1]
    if steps == 1:
        return x
    even, odd = slice(0, steps - 1, 2), slice(1, None, 2)
    pair_x = _compose(x[..., odd], decay[..., odd], x[..., even])
    y_odd = _scan_pairs(pair_x, _product(decay[..., odd], decay[..., even]))
    # An even step continues from the odd one before it; step 0 has none.
    y_even = _compose(x[..., 2::2], decay[..., 2::2], y_odd[..., : (steps - 1) // 2])
    y_even = torch.cat([x[..., :1], y_even], -1)
    pairs = torch.stack([y_even[..., : steps // 2], y_odd], -1).flatten(-2)
    return torch.cat([pairs, y_even[..., steps // 2 :]], -1)


def _compose(x: Tensor, decay: Tensor, previous: Tensor) -> Tensor:
    # 0 * inf is NaN: without the cut, one bad frame would leak into the episode before or after it.
    return torch.where(decay == 0, x, torch.addcmul(x, decay, previous))


def _product(a: Tensor, b: Tensor) -> Tensor:
    # 0.1 ** 64 is 0 in float32, and a 0 is a cut: only a factor of 0 may make one, or a NaN would
    # stop within its own episode. Beside any other product the addend is lost in rounding.
    return torch.addcmul(a * b, a.sign(), b.sign(), value=torch.finfo(a.dtype).tiny)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, int], output: Tensor) -> None:
    _, decay, initial, ctx.reverse, ctx.dim = inputs
    ctx.save_for_backward(decay, initial, output)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    decay, initial, y = ctx.saved_tensors
    dim, reverse = ctx.dim, ctx.reverse
    # dL/dx_t = dL/dy_t + decay_{t+1} * dL/dx_{t+1}; initial is the y of a step before the first.
    start = initial.unsqueeze(dim % y.ndim)
    following = _shifted(decay, torch.zeros_like(start), dim, towards_end=reverse)
    grad_x = linear_scan(grad_y, following, torch.zeros_like(initial), not reverse, dim)
    previous = _shifted(y, start, dim, towards_end=not reverse)
    first = -1 if reverse else 0
    grad_initial = decay.select(dim, first) * grad_x.select(dim, first)
    return grad_x, grad_x * previous, grad_initial, None, None


def _shifted(x: Tensor, fill: Tensor, dim: int, *, towards_end: bool) -> Tensor:
    kept = x.narrow(dim, 0 if towards_end else 1, x.shape[dim] - 1)
    return torch.cat([fill, kept] if towards_end else [kept, fill], dim)


_library.impl("linear_scan", _run, "CompositeExplicitAutograd")
# register_fake does the same and searches the sources of all modules: 50 ms at import.
_library.impl("linear_scan", lambda x, *_: x.new_empty(x.shape), "Meta")
torch.library.register_autograd("ppokit::linear_scan", _backward, setup_context=_keep)


# -- an LSTM ---------------------------------------------------------------------------

_library.define(
    "lstm(Tensor x, Tensor starts, Tensor h, Tensor c, Tensor[] weights)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "lstm_backward(Tensor grad, Tensor of_cells, Tensor x, Tensor starts, Tensor h, Tensor c, "
    "Tensor[] weights, Tensor y, Tensor cells, Tensor space) -> Tensor[]"
)
_LSTM = 2  # torch's number of this kind of network


@torch.compiler.allow_in_graph  # Dynamo would lose the gradient under torch.func
def run_lstm(x: Tensor, starts: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> list[Tensor]:
    """Return output and cells ``[T, N, H]`` of torch's LSTM of one layer, and oneDNN's workspace.

    The cells are those at the last step, and before each step at which a row starts; others may be
    0. float32, on the CPU.

    Args:
        x: ``[T, N, I]``.
        starts: where a row starts from its stored states, bool ``[T, N]``.
        h: stored states ``[T, N, H]``, of which those of the first step and of starts are read.
        c: likewise.
        weights: those of :class:`torch.nn.LSTM`, with biases.
    """
    return _Differentiable.apply(x, starts, h, c, *weights)  # with a size that torch has to know


class _Differentiable(torch.autograd.Function):  # what is registered torch.func does not use
    @staticmethod
    def forward(*args: Tensor) -> list[Tensor]:
        return torch.ops.ppokit.lstm(*args[:4], args[4:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, starts, h, c, w_ih, w_hh, b_ih, b_hh, *made = ctx.saved_tensors
        given = *grads[:2], x, starts, h, c, [w_ih, w_hh, b_ih, b_hh], *made
        of_x, *others = torch.ops.ppokit.lstm_backward(*given)
        return of_x, None, *others


def _check_lstm(x: Tensor, starts: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> None:
    """Raise a ValueError for other shapes or dtypes: oneDNN would read behind the tensors."""
    (steps, rows, inputs), units = x.shape, h.shape[-1]
    expected = [(steps, rows), *[(steps, rows, units)] * 2]
    expected += [(4 * units, inputs), (4 * units, units), (4 * units,), (4 * units,)]
    for y, shape in zip((starts, h, c, *weights), expected, strict=True):
        dtype = torch.bool if y is starts else torch.float32
        if y.shape != torch.Size(shape) or y.dtype is not dtype or x.dtype is not torch.float32:
            raise ValueError(
                f"An LSTM in a graph was given {list(y.shape)} {y.dtype} for {list(shape)} {dtype}."
            )


def _pieces(starts: Tensor) -> list[tuple[int, int]]:
    """Return the first step and the end of each piece of the rows within which none starts."""
    inner = starts[1:].any(1).nonzero().flatten().add(1).tolist()
    return [*pairwise((0, *inner, len(starts)))]


def _first(begin: int, starts: Tensor, stored: Tensor, made: Tensor) -> Tensor:
    """Return the state ``[N, H]`` before a piece: the one made a step before, or the stored one."""
    if not begin:
        return stored[0].contiguous()
    return torch.where(starts[begin].unsqueeze(-1), stored[begin], made[begin - 1])


def _run_piece(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return output, last states, and the workspace, which oneDNN makes for gradients only."""
    options = False, [], _LSTM, h.shape[-1], 1, True, False, False, True
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer(x.contiguous(), *weights, h, c, *options)


def _run_lstm(
    x: Tensor, starts: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the cells after each piece, and the workspace if there is one piece."""
    _check_lstm(x, starts, h, c, weights)
    pieces = _pieces(starts)
    y, cells, space = x.new_empty(h.shape), x.new_zeros(h.shape), x
    for begin, end in pieces:
        first = _first(begin, starts, h, y), _first(begin, starts, c, cells)
        y[begin:end], _, cells[end - 1], space = _run_piece(x[begin:end], *first, weights)
    return y, cells, space if len(pieces) == 1 else space.new_empty(0)


def _lstm_gradients(
    grad: Tensor,
    of_cells: Tensor,
    x: Tensor,
    starts: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    y: Tensor,
    cells: Tensor,
    space: Tensor,
) -> list[Tensor]:
    """Return the gradients of input, stored states and weights."""
    pieces, to_h, to_c = _pieces(starts), h.new_zeros(h[0].shape), h.new_zeros(h[0].shape)
    of_x, of_h, of_c, *totals = (z.new_zeros(z.shape) for z in (x, h, c, *weights))
    options = False, _LSTM, h.shape[-1], 1, True, True, False, [], False
    for begin, end in reversed(pieces):
        part, last = slice(begin, end), end - 1
        first = _first(begin, starts, h, y), _first(begin, starts, c, cells)
        if len(pieces) > 1:
            space = _run_piece(x[part], *first, weights)[-1]
        given = x[part].contiguous(), *weights, *first, y[part], y[last], cells[last]
        given = *given, grad[part].contiguous(), to_h, to_c + of_cells[last], *options, space
        of_x[part], *found, to_h, to_c = torch.ops.aten.mkldnn_rnn_layer_backward(*given)
        for total, z in zip(totals, found, strict=True):
            total += z
        is_start = (starts[begin] | (begin == 0)).unsqueeze(-1)
        of_h[begin], of_c[begin] = torch.where(is_start, to_h, 0), torch.where(is_start, to_c, 0)
        to_h, to_c = torch.where(is_start, 0, to_h), torch.where(is_start, 0, to_c)
    return [of_x, of_h, of_c, *totals]


_library.impl("lstm", _run_lstm, "CPU")
_library.impl("lstm_backward", _lstm_gradients, "CPU")


@torch.library.register_fake("ppokit::lstm", lib=_library)
def _(
    x: Tensor, starts: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    _check_lstm(x, starts, h, c, weights)
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(h.shape), x.new_empty(h.shape), x.new_empty(size, dtype=torch.uint8)


_library.impl(
    "lstm_backward",
    lambda grad, of_cells, x, starts, h, c, w, *_: [z.new_empty(z.shape) for z in (x, h, c, *w)],
    "Meta",
)
