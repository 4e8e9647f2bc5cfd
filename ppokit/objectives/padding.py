"""Making padding harmless before it meets a network."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor


def fill_padding(tensordict: TensorDictBase, mask: Tensor, keys: list[NestedKey]) -> None:
    """Replace what lies under a False of the mask by a copy of the first valid frame.

    The gradient that padding gets is 0, but 0 * NaN is NaN, and a matrix product spreads it to
    every parameter. A copy of a valid frame is as good as that frame, whatever the type of the
    entry. Episode starts stay as they are: within the padding of a sequence they would slow a
    recurrent network down.
    """
    valid_frame = mask.flatten().int().argmax().reshape(1)

    def fill(x: Tensor) -> Tensor:
        frame = x.flatten(0, mask.ndim - 1).index_select(0, valid_frame)
        keep = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return torch.where(keep, x, frame.reshape((1,) * mask.ndim + frame.shape[1:]))

    present = tensordict.select(*[key for key in keys if key != "is_init"], strict=False)
    tensordict.update(present.apply(fill))
