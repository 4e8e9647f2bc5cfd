"""What a loss reads of a batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

_NAMES = ("advantage", "value_target", "value", "action", "sample_log_prob")


def keys_of_loss(loss: Any, batch: TensorDictBase) -> list[NestedKey]:
    """Return the entries of the batch that the loss reads.

    torchrl's losses name more than they need: what computes an advantage where there is none.

    Raises:
        KeyError: the batch lacks one.
    """
    own = getattr(loss, "tensor_keys", None)
    advantage = getattr(own, "advantage", "advantage")
    needed = [advantage] if own is not None else [*loss.in_keys]
    missing = [key for key in needed if batch.get(key, None) is None]
    if missing:
        there = sorted(map(str, batch.keys(True, True)))
        fix = "Pass advantage=GAE(...) to PPOUpdate" if advantage in missing else "Store it"
        raise KeyError(
            f"{type(loss).__name__} reads {', '.join(map(repr, missing))}, which the batch lacks. "
            f"There is: {', '.join(there)}. {fix}, or correct the loss's in_keys."
        )
    entries = getattr(loss, "entries", None)
    if entries is not None:
        return entries(batch)
    names = [*loss.in_keys, *(getattr(own, name, name) for name in _NAMES)]
    return [key for key in dict.fromkeys(names) if batch.get(key, None) is not None]
