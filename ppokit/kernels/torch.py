"""The scan in plain torch: any device, any float dtype.

The recursion ``y_t = x_t + a_t * y_{t-1}`` is associative in its maps: composing the maps of two
neighbouring steps gives a map of the same form. Pairing neighbours halves the length, so the whole
scan takes ``2 log2(T)`` vectorised passes and about ``2 T`` multiply-adds (Blelloch, 1990, "Prefix
Sums and Their Applications", section 1.4).
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_scan(x: Tensor, decay: Tensor, initial: Tensor, reverse: bool, dim: int) -> Tensor:
    """Return what :func:`ppokit.kernels.operator.linear_scan` does, in whatever layout."""
    x, decay = x.movedim(dim, -1), decay.movedim(dim, -1)
    if reverse:
        x, decay = x.flip(-1), decay.flip(-1)
    first = _compose(x[..., :1], decay[..., :1], initial.unsqueeze(-1))
    y = _scan(torch.cat([first, x[..., 1:]], dim=-1), decay)
    return (y.flip(-1) if reverse else y).movedim(-1, dim)


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    steps = x.shape[-1]
    if steps == 1:
        return x
    even, odd = slice(0, steps - 1, 2), slice(1, None, 2)
    pair_x = _compose(x[..., odd], decay[..., odd], x[..., even])
    y_odd = _scan(pair_x, _product(decay[..., odd], decay[..., even]))
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
