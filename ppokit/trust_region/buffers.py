"""A replay buffer whose loop is left early.

Its sampler goes on where the loop was left, so the next batch would be seen in part.
"""

from __future__ import annotations

from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement


def check_epoch_is_over(buffer: ReplayBuffer | None) -> None:
    """Raise a ValueError where the buffer is in the middle of an epoch."""
    if buffer is None or not isinstance(sampler := buffer.sampler, SamplerWithoutReplacement):
        return
    if sampler._sample_list is not None and not sampler.ran_out:
        raise ValueError(
            "when='epoch', but the replay buffer is in the middle of an epoch: ask after the loop "
            "over its minibatches, or use when='minibatch'."
        )


def drop_rest_of_epoch(buffer: ReplayBuffer | None) -> None:
    """Let the next minibatch be the first of an epoch."""
    # ReplayBuffer.empty() would do this too, but drops the data, which may still be wanted.
    if buffer is not None:
        with buffer._futures_lock:
            buffer._clear_prefetch_queue_locked()
        buffer.sampler._empty()
