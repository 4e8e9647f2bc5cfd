"""Memory does not grow over a thousand updates."""

from __future__ import annotations

import gc
import resource
import sys

import pytest
import torch

from ppokit import GymCollector, KLEarlyStopper, PPOUpdate, RewardNormalizer, TrainingStep
from tests.update.parts import make_parts

UPDATES, WARM_UP = 1_000, 500  # the allocator fills its pools at first


def peak() -> float:
    """Return the peak memory of this process, in MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.slow
def test_memory_does_not_grow():
    loss, gae, optimizer = make_parts()
    update = PPOUpdate(
        TrainingStep(loss, optimizer, stopper=KLEarlyStopper(0.02), max_grad_norm=0.5),
        advantage=gae,
        reward_normalizer=RewardNormalizer(0.99),
        epochs=2,
        minibatch_size=32,
    )
    collector = GymCollector(
        "CartPole-v1",
        loss.actor_network,
        frames_per_batch=64,
        total_frames=64 * (UPDATES + WARM_UP),
        num_envs=2,
        categorical_action_encoding=True,
    )
    collector.set_seed(0)
    number, memory, tensors, stops = 0, 0.0, 0, 0.0
    for number, batch in enumerate(collector):
        stops += update(batch)["stopped"]
        if number == WARM_UP - 1:
            tensors, memory = count_tensors(), peak()  # counting takes memory, too
    assert number == WARM_UP + UPDATES - 1
    assert stops > 0
    assert count_tensors() <= tensors
    assert peak() - memory < 2, f"{peak() - memory:.1f} MiB more after {UPDATES} updates"
