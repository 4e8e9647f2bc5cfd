"""Where a transform stands, which decides what a call of it means."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchrl.envs import EnvBase, Transform


def in_environment(transform: Transform) -> bool:
    """Return whether the transform belongs to an environment."""
    return isinstance(_outermost(transform), EnvBase)


def in_buffer(transform: Transform) -> bool:
    """Return whether the transform belongs to a replay buffer.

    A buffer puts what it gets into a Compose of its own, and that in eval mode.
    """
    holder = _outermost(transform)
    return isinstance(holder, Transform) and holder is not transform and not holder.training


def is_alone(transform: Transform) -> bool:
    """Return whether nothing holds the transform; so it is in ``append_transform(invert=True)``."""
    return _outermost(transform) is transform


def _outermost(transform: Transform) -> Any:
    # Transform.container raises where the outermost holder is no environment.
    holder: Any = transform
    while isinstance(holder, Transform):
        reference = holder.__dict__.get("_container")
        held_by = None if reference is None else reference()
        if held_by is None:
            break
        holder = held_by
    return holder


def version(tensor: Tensor) -> int:
    """Return how often the tensor was written in place; not known of inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
