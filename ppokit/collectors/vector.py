"""Environments that step together: gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from ppokit.collectors.record import Record
from ppokit.collectors.spaces import MASK


class VectorEnvs:
    """A vector environment that resets its members in the step that ends their episode.

    Raises:
        ValueError: it resets them in another step.
    """

    def __init__(self, env: VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            env.close()
            raise ValueError(
                f"{type(env).__name__} has autoreset mode {mode}. With NEXT_STEP, a step is spent "
                "on each reset, and its frame belongs to no episode. Make the environment with "
                "autoreset_mode=AutoresetMode.SAME_STEP, or use vectorization='serial' or 'async'."
            )
        self._env: Any = env

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them; a native one may take the first seed only."""
        try:
            self._env.reset(seed=list(seeds))
        except TypeError:
            self._env.reset(seed=seeds[0])

    def reset(self) -> list[tuple[Any, dict[str, Any]]]:
        """Reset all; return observation and info of each."""
        observations, infos = self._env.reset()
        return list(zip(self._split(observations), self._infos(infos), strict=True))

    def step(self, moves: Sequence[Any], record: Record, time: int) -> None:
        """Step all, and store the ends of episodes."""
        env, space = self._env, self._env.single_action_space
        actions = concatenate(space, moves, create_empty_array(space, env.num_envs))
        observations, reward, terminated, truncated, infos = env.step(actions)
        record.rewards[time] = np.reshape(reward, record.rewards[time].shape)
        done = terminated | truncated
        if done.any():
            final_infos = self._infos(infos.get("final_info", {}))
            for i in np.flatnonzero(done).tolist():
                ended = terminated[i], truncated[i]
                record.end(time, i, *ended, infos["final_obs"][i], final_infos[i])
        if record.only is not None:
            record.only[time + 1] = np.reshape(observations, record.only[time + 1].shape)
            return
        split = zip(self._split(observations), self._infos(infos), strict=True)
        for i, (observation, info) in enumerate(split):
            record.write(time + 1, i, observation, info)

    def close(self) -> None:
        """Close all."""
        self._env.close()

    def _split(self, observations: Any) -> Any:
        return iterate(self._env.observation_space, observations)

    def _infos(self, infos: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what is stored of ``infos``, for each environment."""
        if MASK not in infos:
            return [{} for _ in range(self._env.num_envs)]
        return [{MASK: mask} for mask in infos[MASK]]
