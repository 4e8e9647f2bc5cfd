"""Environments stepped one after the other, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import gymnasium as gym

from ppokit.collectors.record import Record


class SerialEnvs:
    """Single environments in a plain loop: the least that stepping them can cost."""

    def __init__(self, envs: Sequence[gym.Env]) -> None:
        self._envs = envs

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them."""
        for env, seed in zip(self._envs, seeds, strict=True):
            env.reset(seed=seed)

    def reset(self) -> list[tuple[Any, dict[str, Any]]]:
        """Reset all; return observation and info of each."""
        return [env.reset() for env in self._envs]

    def step(self, moves: Sequence[Any], record: Record, time: int) -> None:
        """Step all, and reset those whose episode is over."""
        rewards, only, row = record.rewards[time], record.only, time + 1
        for i, env in enumerate(self._envs):
            observation, rewards[i], terminated, truncated, info = env.step(moves[i])
            if terminated or truncated:
                record.end(time, i, terminated, truncated, observation, info)
                observation, info = env.reset()
            if only is None:
                record.write(row, i, observation, info)
            else:
                only[row, i] = observation

    def close(self) -> None:
        """Close all, also if one of them fails to."""
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)
