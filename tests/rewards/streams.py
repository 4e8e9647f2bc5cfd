"""Rewards that several tests normalize: made up, or recorded once and played back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv

from ppokit import RewardNormalizer

REWARD, RAW, DONE = ("next", "reward"), ("next", "raw_reward"), ("next", "done")
IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")

# -- made up


def make_batch(
    reward: Any, done: Any = None, ids: Any = None, *, dtype: torch.dtype = torch.float64
) -> TensorDict:
    """A batch ``[B, T]`` from rows of numbers; without ``done`` no episode ends."""
    rewards = torch.as_tensor(reward, dtype=dtype).unsqueeze(-1)
    dones = torch.zeros(rewards.shape[:2]) if done is None else torch.as_tensor(done)
    batch = TensorDict({}, rewards.shape[:2])
    batch[REWARD], batch[DONE] = rewards, dones.bool().unsqueeze(-1)
    if ids is not None:
        batch[IDS] = torch.as_tensor(ids)
    return batch


def ids_of(done: Tensor) -> Tensor:
    """Trajectory ids ``[B, T]``, with a new one after each end."""
    started = torch.cat([torch.zeros(len(done), 1), done[:, :-1].cumsum(-1)], -1).long()
    return started * len(done) + torch.arange(len(done)).unsqueeze(-1)


def make_rollout(
    seed: int,
    envs: int,
    steps: int,
    end_probability: float,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> TensorDict:
    """A rollout whose episodes end at random, with a new trajectory id after each end."""
    generator = torch.Generator().manual_seed(seed)
    reward = scale * torch.randn(envs, steps, generator=generator, dtype=torch.float64)
    done = torch.rand(envs, steps, generator=generator) < end_probability
    return make_batch(reward, done, ids_of(done), dtype=dtype)


@st.composite
def rollouts(draw: st.DrawFn) -> TensorDict:
    return make_rollout(
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 12)),
        draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


class Slow:
    """The running rule in plain Python: a dictionary of R, and a list of all returns."""

    def __init__(self, gamma: float, *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.open: dict[int, float] = {}
        self.seen: list[float] = []

    def __call__(self, batch: TensorDictBase) -> Tensor:
        reward, done = (batch[key].squeeze(-1).tolist() for key in (REWARD, DONE))
        ids = batch[IDS].tolist()
        for b in range(batch.shape[0]):
            for t in range(batch.shape[1]):
                total = reward[b][t] + self.gamma * self.open.pop(ids[b][t], 0.0)
                self.seen.append(total)
                if not done[b][t]:
                    self.open[ids[b][t]] = total
        mean = math.fsum(self.seen) / len(self.seen)
        variance = math.fsum((x - mean) ** 2 for x in self.seen) / len(self.seen)
        spread = math.sqrt(variance + self.epsilon) if variance > 0 else 1.0
        bound = lambda x: max(-self.clip, min(self.clip, x))  # noqa: E731
        scaled = [[[bound(r / spread)] for r in row] for row in reward]
        return torch.tensor(scaled, dtype=torch.float64)


def left_open(normalizer: RewardNormalizer) -> dict[int, list[float]]:
    """The R of the trajectories that are open, by id."""
    pairs = zip(normalizer.open_ids.tolist(), normalizer.open_returns.tolist(), strict=True)
    return {key: returns for key, returns in pairs if key >= 0}


def moments(normalizer: RewardNormalizer) -> Tensor:
    return normalizer.moments[:3].clone()


def assert_state_equal(a: RewardNormalizer, b: RewardNormalizer) -> None:
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), rtol=0, atol=0)


def saved(normalizer: RewardNormalizer) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in normalizer.state_dict().items()}


def assert_unchanged(normalizer: RewardNormalizer, before: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(normalizer.state_dict()), before, rtol=0, atol=0)


def time_pieces(batch: TensorDict, lengths: Sequence[int]) -> Iterator[TensorDict]:
    """Clones, because the normalizer writes into what it is given."""
    yield from (piece.clone() for piece in batch.split(list(lengths), dim=1))


# -- real ones, recorded once


Rows = list[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Of each environment: rewards, and whether it was terminated and truncated, ``[T]`` each."""


@cache
def recorded(env_id: str, envs: int, steps: int, *, max_episode_steps: int = 17) -> Rows:
    """What environments give that are driven at random."""
    rows: Rows = []
    for seed in range(envs):
        env = gymnasium.make(env_id, max_episode_steps=max_episode_steps)
        env.action_space.seed(seed)
        env.reset(seed=seed)
        row = []
        for _ in range(steps):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            row.append((float(reward), terminated, truncated))
            if terminated or truncated:
                env.reset()
        env.close()
        reward, terminated, truncated = zip(*row, strict=True)
        rows.append((np.array(reward, np.float32), np.array(terminated), np.array(truncated)))
    return rows


class Playback(gymnasium.Env):
    """Plays a row back over and over, whatever is done; a reset goes on with the next step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *row: np.ndarray) -> None:
        self.row, self.step_count = row, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward, terminated, truncated = (x[self.step_count % len(x)] for x in self.row)
        self.step_count += 1
        return np.zeros(1, np.float32), float(reward), bool(terminated), bool(truncated), {}


def play(
    row: tuple[np.ndarray, ...], transform: Callable[[], RewardNormalizer] | None = None
) -> EnvBase:
    """One environment."""
    env: EnvBase = GymWrapper(Playback(*row))
    return env if transform is None else TransformedEnv(env, transform())


def play_serial(rows: Rows) -> EnvBase:
    """All of them, one after the other."""
    return SerialEnv(len(rows), [partial(play, row) for row in rows])


def as_batch(rows: Rows) -> TensorDict:
    """The record as one batch ``[B, T]``, with trajectory ids."""
    reward, terminated, truncated = (np.stack(x) for x in zip(*rows, strict=True))
    done = torch.from_numpy(terminated | truncated)
    return make_batch(torch.from_numpy(reward), done, ids_of(done), dtype=torch.float32)


def make_envs(name: str, count: int, transform: Callable[[], Any] | None = None) -> EnvBase:
    """Real environments, seeded."""
    env: EnvBase = SerialEnv(count, lambda: GymEnv(name))
    if transform is not None:
        env = TransformedEnv(env, transform())
    env.set_seed(0)
    torch.manual_seed(0)
    return env
