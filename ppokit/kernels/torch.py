"""The scan in plain torch: any device, any float dtype.

The recursion ``y_t = x_t + a_t * y_{t-1}`` is associative in its maps: composing the maps of two
neighbouring steps gives a map of the same form. There are several algorithms:

- few numbers: every step is composed with the one 1, 2, 4, ... steps before it (Hillis & Steele,
  1986, "Data parallel algorithms"): the fewest calls;
- many numbers: step by step within blocks, all blocks of all rows at once, then over the blocks;
- on accelerators, or where something is not finite: neighbours are paired, which halves the length
  (Blelloch, 1990, "Prefix Sums and Their Applications", section 1.4), with care at the cuts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_FEW = 16_384  # elements up to which a call costs more than its work
_BLOCK = 4  # steps in a block
_STEPS = 8  # steps that are not worth a division into blocks


def linear_scan(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool, dim: int) -> Tensor:
    """Return the result of :func:`ppokit.kernels.operator.linear_scan`, in any memory layout."""
    shape = x.movedim(dim, -1).shape
    x, decay = (tensor.movedim(dim, -1).reshape(-1, shape[-1]) for tensor in (x, decay))
    initial = initial.reshape(-1, 1)
    y = None
    if x.device.type == "cpu":
        y = _scan_finite(x, decay, initial, reverse)
        # A cut multiplies by 0: the product is NaN if the factor is not finite.
        if not math.isfinite(y.sum().item()):
            y = None
    if y is None:
        if reverse:
            x, decay = x.flip(-1), decay.flip(-1)
        first = _compose(x[:, :1], decay[:, :1], initial)
        y = _scan_pairs(torch.cat([first, x[:, 1:]], dim=-1), decay)
        y = y.flip(-1) if reverse else y
    return y.reshape(shape).movedim(-1, dim)


def _scan_finite(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    steps = x.shape[-1]
    if x.numel() <= _FEW and steps > 2:
        return _scan_doubling(x, decay, initial, reverse)
    if steps <= _STEPS:
        return _scan_steps(x, decay, initial.squeeze(-1), reverse)
    # Padding comes last in the order of the scan, where nothing depends on it.
    padding = -steps % _BLOCK
    if padding:
        sides = (padding, 0) if reverse else (0, padding)
        x, decay = F.pad(x, sides), F.pad(decay, sides)
    x, decay = (tensor.unflatten(-1, (-1, _BLOCK)) for tensor in (x, decay))
    ends = _scan_finite(*_compose_steps(x, decay, reverse), initial, reverse)
    before = [ends[:, 1:], initial] if reverse else [initial, ends[:, :-1]]
    y = _scan_steps(x, decay, torch.cat(before, dim=-1), reverse).flatten(1)
    return y.narrow(1, padding if reverse else 0, steps)


def _in_order(x: Tensor, reverse: bool) -> tuple[Tensor, ...]:
    steps = x.unbind(-1)
    return steps[::-1] if reverse else steps


def _scan_steps(x: Tensor, decay: Tensor, y: Tensor, reverse: bool) -> Tensor:
    """Return the scan along the last dimension, from ``y`` before the first step."""
    result = torch.empty_like(x)
    tensors = (_in_order(tensor, reverse) for tensor in (x, decay, result))
    for x_t, decay_t, out in zip(*tensors, strict=True):
        y = torch.addcmul(x_t, decay_t, y, out=out)
    return result


def _compose_steps(x: Tensor, decay: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return all the steps of the last dimension as one: its x, and its decay."""
    (y, *xs), (product, *decays) = (_in_order(tensor, reverse) for tensor in (x, decay))
    for x_t, decay_t in zip(xs, decays, strict=True):
        y = torch.addcmul(x_t, decay_t, y)
        product = product * decay_t
    return y, product


def _scan_doubling(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    rows, steps = x.shape
    # y and the products of decays, twice, each with room for the steps before the first.
    room = 1 << (steps - 1).bit_length() - 1
    start, backward = (0, 1) if reverse else (room, -1)
    old, new = x.new_zeros(2, 2, rows, room + steps).unbind(0)
    old_here, new_here = old.narrow(-1, start, steps), new.narrow(-1, start, steps)
    (y, reach), (new_y, new_reach) = old_here.unbind(0), new_here.unbind(0)
    y.copy_(x)
    reach.copy_(decay)
    first = slice(steps - 1, None) if reverse else slice(0, 1)
    y[:, first].addcmul_(reach[:, first], initial)
    stride = 1
    while stride < steps:
        torch.mul(old.narrow(-1, start + backward * stride, steps), reach, out=new_here)
        new_y.add_(y)
        old, old_here, y, reach, new, new_here, new_y, new_reach = (
            *(new, new_here, new_y, new_reach),
            *(old, old_here, y, reach),
        )
        stride *= 2
    return y


def _scan_pairs(x: Tensor, decay: Tensor) -> Tensor:
    steps = x.shape[-1]
    if steps == 1:
        return x
    even, odd = slice(0, steps - 1, 2), slice(1, None, 2)
    pair_x = _compose(x[..., odd], decay[..., odd], x[..., even])
    y_odd = _scan_pairs(pair_x, _product(decay[..., odd], decay[..., even]))
    # An even step continues from the odd one before it; step 0 has none.
    y_even = _compose(x[..., 2::2], decay[..., 2::2], y_odd[..., : (steps - 1) // 2])
    y = torch.empty_like(x)
    y[..., 0] = x[..., 0]
    y[..., odd] = y_odd
    y[..., 2::2] = y_even
    return y


def _compose(x: Tensor, decay: Tensor, previous: Tensor) -> Tensor:
    # 0 * inf is NaN: without the cut, one bad frame would leak into the episode before or after it.
    return torch.where(decay == 0, x, torch.addcmul(x, decay, previous))


def _product(a: Tensor, b: Tensor) -> Tensor:
    # 0.1 ** 64 is 0 in float32, and a 0 is a cut: only a factor of 0 may make one, or a NaN would
    # stop within its own episode. Beside any other product the addend is lost in rounding.
    return torch.addcmul(a * b, a.sign(), b.sign(), value=torch.finfo(a.dtype).tiny)
