"""Every way for rewards to reach a normalizer, from a record to batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import RandomPolicy

from ppokit import GymCollector, PPOUpdate, RewardNormalizer
from tests.blocks import Given, ppo_update
from tests.rewards.streams import (
    REWARD,
    Playback,
    Rows,
    Slow,
    as_batch,
    left_open,
    moments,
    play_serial,
    recorded,
    time_pieces,
)

STEPS, BATCH = 30, 10
ENVS = ["CartPole-v1", "Pendulum-v1", "InvertedDoublePendulum-v5"]
Batches = list[TensorDictBase]


def rows_of(env_id: str, envs: int) -> Rows:
    return recorded(env_id, 8, STEPS)[:envs]


def collected(env: EnvBase, postproc: RewardNormalizer | None = None) -> Batches:
    envs = env.batch_size.numel()
    collector = Collector(
        env,
        RandomPolicy(env.full_action_spec),
        frames_per_batch=BATCH * envs,
        total_frames=STEPS * envs,
        postproc=postproc,
    )
    try:
        # A collector may yield the same TensorDict every time.
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def call(rows: Rows, normalizer: RewardNormalizer) -> Batches:
    lengths = [BATCH] * (STEPS // BATCH)
    return [normalizer(piece) for piece in time_pieces(as_batch(rows), lengths)]


def postproc(rows: Rows, normalizer: RewardNormalizer) -> Batches:
    return collected(play_serial(rows), normalizer)


def gym_collector(rows: Rows, normalizer: RewardNormalizer) -> Batches:
    next_row = cycle(rows)
    policy = TensorDictModule(
        lambda x: nn.functional.one_hot(torch.zeros_like(x[..., 0], dtype=torch.int64), 2),
        ["observation"],
        ["action"],
    )
    collector = GymCollector(
        lambda: Playback(*next(next_row)),
        policy,
        frames_per_batch=BATCH * len(rows),
        total_frames=STEPS * len(rows),
        num_envs=len(rows),
        postproc=normalizer,
    )
    return list(collector)


def environment(rows: Rows, normalizer: RewardNormalizer) -> Batches:
    return collected(TransformedEnv(play_serial(rows), normalizer))


def replay_buffer(rows: Rows, normalizer: RewardNormalizer, *, invert: bool = False) -> Batches:
    buffer = ReplayBuffer(storage=LazyTensorStorage(BATCH * len(rows), ndim=2))
    buffer.append_transform(normalizer, invert=invert)
    batches = []
    for batch in collected(play_serial(rows)):
        buffer.empty()
        buffer.extend(batch)
        batches.append(buffer[:].clone())
    return batches


def make_update(normalizer: RewardNormalizer) -> PPOUpdate:
    """An update whose loss is the mean reward times a weight."""
    loss = Given(lambda weight, x: TensorDict({"loss_any": weight * x[REWARD].mean()}), REWARD)
    optimizer = torch.optim.SGD(loss.parameters())
    return ppo_update(loss, optimizer, reward_normalizer=normalizer, epochs=2)


def update(rows: Rows, normalizer: RewardNormalizer) -> Batches:
    step, batches = make_update(normalizer), collected(play_serial(rows))
    for batch in batches:
        step.validate(batch)
        step(batch)
    return batches


ROUTES: dict[str, Callable[[Rows, RewardNormalizer], Batches]] = {
    "batch": call,
    "postproc": postproc,
    "GymCollector": gym_collector,
    "environment": environment,
    "replay buffer": replay_buffer,
    "replay buffer, inverted": partial(replay_buffer, invert=True),
    "PPOUpdate": update,
}


def slow(rows: Rows) -> tuple[Slow, list[float]]:
    """The slow loop over the record, and the R at its end that goes on in each row."""
    loop, batch = Slow(0.99), as_batch(rows)
    loop(batch)
    last = batch["collector", "traj_ids"][:, -1].tolist()
    return loop, [loop.open.get(i, 0.0) for i in last]


def accumulators(normalizer: RewardNormalizer) -> list[float]:
    """R of all that goes on, in whatever order; of rows that have ended it is 0."""
    held = [returns for (returns,) in left_open(normalizer).values()]
    held += normalizer.env_returns.flatten().tolist()
    return sorted(x for x in held if x)


def assert_as_in(rows: Rows, normalizer: RewardNormalizer) -> None:
    loop, at_end = slow(rows)
    seen = torch.tensor(loop.seen, dtype=torch.float64)
    expected = torch.stack([torch.tensor(len(seen)).double(), seen.mean(),
                            (seen - seen.mean()).square().sum()])  # fmt: skip
    torch.testing.assert_close(moments(normalizer), expected, rtol=1e-9, atol=1e-9)
    assert accumulators(normalizer) == pytest.approx(sorted(x for x in at_end if x), abs=1e-6)
