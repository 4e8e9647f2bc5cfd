"""Gymnasium's vector environments, and checks of what an environment returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from torchrl.envs import GymWrapper

from ppokit.collectors.batch import Record
from ppokit.collectors.spaces import (
    MASK,
    Leaf,
    Shape,
    check_array,
    gym_env,
    whole_numbers,
    with_mask,
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
                "that of the next one. Use an environment whose autoreset mode is NEXT_STEP, or "
                "vectorization='serial' or 'async'."
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


class CheckedEnv(gym.Wrapper):
    """An environment of a vector environment, which stores observations by broadcasting them.

    The last observation of an episode is a copy: the vector environment resets this one before it
    reads that, and an environment may write each observation into the same array.
    """

    def __init__(self, env: Any, leaves: Sequence[Leaf], reward: Shape, number: int) -> None:
        super().__init__(gym_env(env) if isinstance(env, GymWrapper) else env)
        self._wrapper = env  # kept as in SerialEnvs
        self._leaves, self._reward, self._number = list(leaves), reward, number

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, and check the observation."""
        observation, info = parts_of_reset(self.env.reset(**kwargs), self._number)
        self._leaves = with_mask(self._leaves, info)
        self._check(observation, info)
        return observation, info

    def step(self, action: Any) -> Any:
        """Step the environment, and check observation and reward."""
        parts = parts_of_step(self.env.step(action), self._number)
        observation, reward, terminated, truncated, info = parts
        self._check(observation, info)
        reward = np.squeeze(check_reward(reward, self._reward, self._number))
        if terminated or truncated:
            observation = deepcopy(observation)
            info = info | {name: deepcopy(info[name]) for name in (MASK,) if name in info}
        return observation, reward, terminated, truncated, info

    def _check(self, observation: Any, info: dict[str, Any]) -> None:
        for leaf in self._leaves:
            value, stored = leaf.read(observation, info, self._number), whole_numbers(leaf.dtype)
            castable = stored is None or np.can_cast(value.dtype, stored, "same_kind")
            if leaf.encode is None and leaf.path is not None and not castable:
                raise ValueError(
                    f"Environment {self._number} returned the observation {leaf.key!r} as "
                    f"{value.dtype}, and its space declares {stored}: a vector environment does "
                    f"not cast it. Return it as {stored}."
                )


def parts_of_reset(returned: Any, env: int) -> tuple[Any, dict[str, Any]]:
    """Return observation and info."""
    if not (_has(2, returned) and isinstance(returned[1], dict)):
        raise ValueError(
            f"reset() of environment {env} returned {_outline(returned)}, where gymnasium's "
            "returns (observation, info), info a dict. Wrap an environment of the older gym."
        )
    return returned[0], returned[1]


def parts_of_step(returned: Any, env: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return observation, reward, terminated, truncated and info."""
    if not (_has(5, returned) and isinstance(returned[4], dict)):
        raise ValueError(
            f"step() of environment {env} returned {_outline(returned)}, where gymnasium's "
            "returns (observation, reward, terminated, truncated, info), info a dict. Wrap an "
            "environment of the older gym."
        )
    observation, reward, terminated, truncated, info = returned
    if terminated is not False:
        terminated = _flag(terminated, "terminated", env)
    if truncated is not False:
        truncated = _flag(truncated, "truncated", env)
    return observation, reward, terminated, truncated, info


def check_reward(reward: Any, shape: Shape, env: int | None) -> Any:
    """Return a reward to store; raise a ValueError where it would be stored by broadcasting."""
    if type(reward) is float or type(reward) is np.float64:
        return reward
    accepted = (shape[:-1], shape) if shape[-1:] == (1,) else (shape,)
    return check_array(reward, accepted, "the reward", env).reshape(shape)


def _flag(value: Any, name: str, env: int) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    try:
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "biu" and array.item() in (0, 1):
            return bool(array.item())
    except (TypeError, ValueError):  # ragged, or on another device
        pass
    raise ValueError(
        f"Environment {env} returned {name}={value!r}, which is neither True nor False."
    )


def _has(count: int, returned: Any) -> bool:
    return isinstance(returned, tuple | list) and len(returned) == count


def _outline(returned: Any) -> str:
    """Return a tuple's types, or the type of anything else."""
    if not isinstance(returned, tuple | list):
        return f"a {type(returned).__name__}"
    return f"({', '.join(type(part).__name__ for part in returned)})"
