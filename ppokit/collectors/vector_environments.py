"""Gymnasium's vector environments, and checks of what an environment returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from ppokit.collectors.batch import Record
from ppokit.collectors.spaces import (
    MASK,
    Shape,
    check_array,
)


class VectorEnvs:
    """A gymnasium vector environment.

    In ``SAME_STEP`` mode the step that ends an episode returns the first observation of the next
    one, and the last one in ``infos["final_obs"]``. In ``NEXT_STEP`` mode it returns the last one,
    and the step after it takes no action and returns the first one of the next episode.
    """

    def __init__(self, env: VectorEnv) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            env.close()
            raise ValueError(
                f"{type(env).__name__} has autoreset mode {mode}. Make it with autoreset_mode="
                "AutoresetMode.SAME_STEP or NEXT_STEP: the collector does not reset single members."
            )
        self._env: Any = env
        self._in_next_step = mode is AutoresetMode.NEXT_STEP
        # members to be reset in this step
        self._ended: np.ndarray = np.zeros(env.num_envs, dtype=np.bool_)

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them; a native one may take the first seed only."""
        try:
            self._env.reset(seed=list(seeds))
        except (TypeError, gym.error.Error):
            self._env.reset(seed=seeds[0])

    def reset(self) -> list[tuple[Any, dict[str, Any]]]:
        """Reset all; return observation and info of each."""
        self._ended[:] = False
        return self._each(*self._env.reset())

    def step(self, actions: Any, record: Record, time: int) -> None:
        """Step all, and store the ends of episodes.

        Args:
            actions: an array of all actions, or a list of each environment's.
            record: what is written to.
            time: the step of the batch.
        """
        env, row = self._env, time + 1
        observations, reward, terminated, truncated, infos = env.step(self._join(actions))
        record.rewards[time] = check_reward(reward, record.rewards[time].shape, None)
        flags = np.stack([terminated, truncated])
        if self._in_next_step:
            flags &= ~self._ended
            self._note_resets(record, time)
        record.terminated[time], record.truncated[time] = flags
        self._ended = np.logical_or(*flags)
        if not self._in_next_step and self._ended.any():
            final_infos = self._infos(infos.get("final_info", {}))
            for i in np.flatnonzero(self._ended).tolist():
                final = self._final(infos, i), final_infos[i]
                record.end(time, i, flags[0, i], flags[1, i], *final)
        if record.single_array is not None:
            (leaf,) = record.leaves
            accepted = tuple((env.num_envs, *shape) for shape in leaf.accepted)
            rows = leaf._replace(accepted=accepted).check(observations, None)
            record.single_array[row] = rows.reshape(record.single_array[row].shape)
            return
        for i, (observation, info) in enumerate(self._each(observations, infos)):
            record.write(row, i, observation, info)

    def close(self) -> None:
        """Close all."""
        self._env.close()

    def _note_resets(self, record: Record, time: int) -> None:
        """Note which members this step has reset, whose frames belong to no episode."""
        if record.is_reset is None:
            record.is_reset = np.zeros_like(record.terminated)
        record.is_reset[time] = self._ended
        record.rewards[time][self._ended] = 0
        record.starts += np.flatnonzero(self._ended).tolist()

    def _final(self, infos: Mapping[str, Any], i: int) -> Any:
        if "final_obs" not in infos:
            raise ValueError(
                f"{type(self._env).__name__} says that it resets its members in the same step, but "
                "returns no 'final_obs' in its infos: the value after a truncated episode would be "
                "that of the next one. Use an environment whose autoreset mode is NEXT_STEP."
            )
        return infos["final_obs"][i]

    def _join(self, actions: Any) -> Any:
        """Return the actions of all environments as the vector environment takes them."""
        space = self._env.single_action_space
        if isinstance(actions, np.ndarray):
            return actions.reshape(-1, *space.shape)
        return concatenate(space, actions, create_empty_array(space, self._env.num_envs))

    def _each(self, observations: Any, infos: Any) -> list[tuple[Any, dict[str, Any]]]:
        space, num_envs = self._env.single_observation_space, self._env.num_envs
        return list(zip(_split(space, observations, num_envs), self._infos(infos), strict=True))

    def _infos(self, infos: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the entries of ``infos`` that are stored, for each environment."""
        if MASK not in infos:
            return [{} for _ in range(self._env.num_envs)]
        return [{MASK: mask} for mask in infos[MASK]]


def _split(space: spaces.Space, observations: Any, num_envs: int) -> list[Any]:
    """Return each environment's observation, of the space of one of them."""
    if isinstance(space, spaces.Dict):
        parts = {name: _split(part, observations[name], num_envs) for name, part in space.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(num_envs)]
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, observations, strict=True)
        return list(zip(*(_split(part, x, num_envs) for part, x in parts), strict=True))
    return list(observations)


def check_reward(reward: Any, shape: Shape, env: int | None) -> Any:
    """Return a reward to store; raise a ValueError where it would be stored by broadcasting."""
    if type(reward) is float or type(reward) is np.float64:
        return reward
    accepted = (shape[:-1], shape) if shape[-1:] == (1,) else (shape,)
    return check_array(reward, accepted, "the reward", env).reshape(shape)
