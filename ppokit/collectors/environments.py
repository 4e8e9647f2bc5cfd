"""The environments of a collector: one after the other, or gymnasium's vector environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias, cast

import gymnasium as gym
import numpy as np
import torchrl.envs.libs.utils as torchrl_gym
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from tensordict.utils import NestedKey
from torch import nn
from torchrl.envs import GymEnv, GymWrapper

from ppokit._checks import whole
from ppokit.collectors.batch import Record
from ppokit.spaces import (
    MASK,
    Info,
    OnlySpaces,
    Shape,
    check_array,
    gym_env,
    name_of,
    wrap,
)

# torchrl keeps the error of a missing gym, whose traceback keeps alive what the caller had.
if torchrl_gym.IMPORT_ERROR is not None:
    torchrl_gym.IMPORT_ERROR.__traceback__ = None

_GYMNASIUM = str(Path(gym.__file__).parent)
_NUMBERS = float, int, np.float64
MakeEnv: TypeAlias = str | Callable[[], object]
Observed: TypeAlias = list[tuple[object, Info]]  #: observation and info of each environment


class SerialEnvs:
    """Environments in this process, stepped one after the other in a plain loop."""

    def __init__(self, wrappers: Sequence[GymWrapper]) -> None:
        self._wrappers = wrappers  # torchrl closes the environment of a wrapper that is collected
        self._envs = [gym_env(wrapper) for wrapper in wrappers]

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them."""
        for i, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            try:
                env.reset(seed=seed)
            except TypeError as error:
                raised_in = extract_tb(error.__traceback__)[-1].filename
                if not raised_in.startswith((__file__, _GYMNASIUM)):
                    raise  # by the environment's own code
                raise TypeError(
                    f"Environment {i}: reset(seed={seed}) raised: {error}. {_OLD}"
                ) from error

    def reset(self) -> Observed:
        """Reset all; return observation and info of each."""
        return [checked("reset", env.reset(), 2, i) for i, env in enumerate(self._envs)]

    def step(self, actions: Sequence[object], record: Record, time: int) -> None:
        """Step all, and reset those whose episode is over."""
        rewards, reward_shape, row = record.rewards[time], record.reward_shape, time + 1
        array, leaf = record.single_row(row), record.leaves[0]
        shape, dtype = leaf.accepted[0], None if array is None else array.dtype
        largest = record.largest_reward
        for i, env in enumerate(self._envs):
            returned = env.step(actions[i])
            if type(returned) is not tuple or len(returned) != 5 or type(returned[4]) is not dict:
                returned = checked("step", returned, 5, i)
            observation, reward, terminated, truncated, info = returned
            if not (type(reward) in _NUMBERS and -largest <= reward <= largest):
                reward = check_reward(reward, reward_shape, rewards.dtype, i)
            rewards[i] = reward
            if type(terminated) is not bool or type(truncated) is not bool:
                terminated = check_flags(terminated, "terminated", (), i)
                truncated = check_flags(truncated, "truncated", (), i)
            if terminated or truncated:
                record.end(time, i, terminated, truncated, observation, info)
                observation, info = checked("reset", env.reset(), 2, i)
            if array is None:
                record.write(row, i, observation, info)
            elif (
                type(observation) is np.ndarray
                and observation.dtype is dtype
                and observation.shape == shape
            ):
                array[i] = observation
            else:
                array[i] = leaf.check(observation, i)
            if record.infos:
                record.write_info(row, i, info)

    def close(self) -> None:
        """Close all, also if one of them fails to."""
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)


class VectorEnvs:
    """A gymnasium vector environment.

    In ``SAME_STEP`` mode the step that ends an episode returns the first observation of the next
    one, and the last one in ``infos["final_obs"]``. In ``NEXT_STEP`` mode it returns the last one,
    and the step after it takes no action and returns the first one of the next episode.
    """

    def __init__(self, env: VectorEnv, info_keys: Collection[str]) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            env.close()
            raise ValueError(
                f"{type(env).__name__} has autoreset mode {mode}. Make it with autoreset_mode="
                "AutoresetMode.SAME_STEP or NEXT_STEP."
            )
        self._env: Any = env
        self._info_keys = info_keys
        self._in_next_step = mode is AutoresetMode.NEXT_STEP
        # members to be reset in this step
        self._ended: np.ndarray = np.zeros(env.num_envs, dtype=np.bool_)

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which resets them; a native one may take the first seed only."""
        try:
            self._env.reset(seed=list(seeds))
        except (TypeError, gym.error.Error):
            self._env.reset(seed=seeds[0])

    def reset(self) -> Observed:
        """Reset all; return observation and info of each."""
        self._ended[:] = False
        return self._each(*checked("reset", self._env.reset(), 2, None))

    def step(self, actions: object, record: Record, time: int) -> None:
        """Step all with an array of all actions, or a list of each environment's."""
        env, space, row = self._env, self._env.single_action_space, time + 1
        if isinstance(actions, np.ndarray):
            joined = actions.reshape(env.num_envs, *space.shape)
        else:
            joined = concatenate(space, actions, create_empty_array(space, env.num_envs))
        returned = checked("step", env.step(joined), 5, None)
        observations, reward, terminated, truncated, infos = returned
        rewards, shape = record.rewards[time], (env.num_envs,)
        rewards[...] = check_reward(reward, rewards.shape, rewards.dtype, None)
        ends = {"terminated": terminated, "truncated": truncated}
        flags = np.stack([check_flags(x, name, shape, None) for name, x in ends.items()])
        if self._in_next_step:
            flags &= ~self._ended  # of members that this step has reset, no frame is in an episode
            if record.is_reset is None:
                record.is_reset = np.zeros_like(record.terminated)
            record.is_reset[time] = self._ended
            record.rewards[time][self._ended] = 0
            record.starts += np.flatnonzero(self._ended).tolist()
        record.terminated[time], record.truncated[time] = flags
        self._ended = np.logical_or(*flags)
        if not self._in_next_step and self._ended.any():
            if "final_obs" not in infos:
                raise ValueError(
                    f"{type(env).__name__} says that it resets its members in the same step, but "
                    "returns no 'final_obs'. Use one whose autoreset mode is NEXT_STEP."
                )
            if self._info_keys and "final_info" not in infos:
                raise ValueError(
                    f"{type(env).__name__} returns no 'final_info' where an episode ends, and so "
                    f"no {[*self._info_keys]} of its last step. Make it with autoreset_mode="
                    "AutoresetMode.NEXT_STEP, or leave info_keys out."
                )
            final_infos = self._infos(infos.get("final_info", {}))
            for i in np.flatnonzero(self._ended).tolist():
                final = infos["final_obs"][i], final_infos[i]
                record.end(time, i, flags[0, i], flags[1, i], *final)
        if record.infos:
            for i, info in enumerate(self._infos(infos)):
                record.write_info(row, i, info)
        if (array := record.single_row(row)) is not None:
            (leaf,) = record.leaves
            accepted = tuple((env.num_envs, *shape) for shape in leaf.accepted)
            rows = leaf._replace(accepted=accepted).check(observations, None)
            array[...] = rows.reshape(array.shape)
            return
        for i, (observation, info) in enumerate(self._each(observations, infos)):
            record.write(row, i, observation, info)

    def close(self) -> None:
        """Close all."""
        self._env.close()

    def _each(self, observations: object, infos: object) -> Observed:
        observed = [*iterate(self._env.observation_space, observations)]
        if len(observed) != self._env.num_envs:
            raise ValueError(
                f"{type(self._env).__name__} returned {len(observed)} observations for "
                f"{self._env.num_envs} environments. A batch_size below num_envs steps some of "
                "them at a time: make it with batch_size=num_envs."
            )
        return list(zip(observed, self._infos(infos), strict=True))

    def _infos(self, infos: Any) -> list[Info]:
        """Return the entries of ``infos`` that may be stored, for each environment."""
        if not isinstance(infos, Mapping):
            return [*infos]
        count = self._env.num_envs
        there = {
            key: infos.get(f"_{key}", [True] * count)
            for key in (MASK, *self._info_keys)
            if key in infos
        }

        for key in self._info_keys:
            value = infos.get(key, {})
            is_array = isinstance(value, list | tuple) or np.ndim(value) > 0
            if not (isinstance(value, Mapping) or (is_array and len(value) == count)):
                raise ValueError(
                    f"A vector environment returned {key!r} in info as {value!r}; return an "
                    f"array of {count} entries, one for each member, or leave it out of info_keys."
                )

        def entry(key: str, member: int) -> object:
            return infos[key] if isinstance(infos[key], Mapping) else infos[key][member]

        return [{k: entry(k, i) for k, flags in there.items() if flags[i]} for i in range(count)]


_OLD = (
    "In gymnasium, reset(seed=None, options=None) returns (observation, info), and step(action) "
    "returns (observation, reward, terminated, truncated, info), with a dictionary as info. For "
    "environments of gym, use shimmy.GymV21CompatibilityV0."
)


def checked(method: str, returned: object, count: int, env: int | None) -> Any:
    """Return what gymnasium's step or reset returns, or raise a TypeError for anything else."""
    is_tuple = isinstance(returned, tuple | list)
    infos = (Mapping,) if env is not None else (Mapping, list)  # of DictInfoToList
    if is_tuple and len(returned) == count and isinstance(returned[-1], infos):
        return returned
    kinds = [type(x).__name__ for x in returned] if is_tuple else type(returned).__name__
    raise TypeError(f"{name_of(env)}: {method} returned {kinds}. {_OLD}")


def check_flags(value: object, name: str, shape: Shape, env: int | None) -> np.ndarray | bool:
    """Return a flag, or for a shape an array of them; raise a TypeError for anything else."""
    array = np.asarray(None if isinstance(value, list | tuple) and not shape else value)
    is_right = array.dtype.kind in "biuf" and array.size == math.prod(shape)
    if not (is_right and ((array == 0) | (array == 1)).all()):
        raise TypeError(
            f"{name_of(env)}: step returned {value!r} as {name}. A flag is True or False: return "
            "bool(...), or an array of one for each member of a vector environment."
        )
    return array.astype(np.bool_).reshape(shape) if shape else bool(array.item())


def check_reward(reward: object, shape: Shape, dtype: np.dtype, env: int | None) -> np.ndarray:
    """Return a reward to store; raise a ValueError where it would be stored as something else."""
    accepted = (shape[:-1], shape) if shape[-1:] == (1,) else (shape,)
    if type(reward) is int:  # of any size
        reward = float(max(min(reward, 10**300), -(10**300)))
    array = check_array(reward, accepted, "the reward", env).reshape(shape)
    sizes, largest = np.abs(array, dtype=np.float64), float(np.finfo(dtype).max)
    if not sizes.max() <= largest and (is_lost := np.isfinite(array) & (sizes > largest)).any():
        raise ValueError(
            f"{name_of(env)} returned the reward {array[is_lost].flat[0]}, which is infinite in "
            f"{dtype}. Scale the rewards in the environment."
        )
    return array


Envs: TypeAlias = SerialEnvs | VectorEnvs


def make_envs(
    make_env: MakeEnv | Sequence[MakeEnv] | VectorEnv,
    num_envs: int,
    encoding: bool,
    reads: Collection[NestedKey],
    info_keys: Collection[str],
    *,
    whole_episodes: bool,
) -> tuple[Envs, GymWrapper, int]:
    """Return the environments, torchrl's wrapper of the first, and how many there are."""
    is_list = isinstance(make_env, list | tuple) and not callable(make_env)
    makers: list[Any] = [*cast("Sequence[MakeEnv]", make_env)] if is_list else [make_env]
    if not makers:
        raise ValueError("make_env is an empty list: give one id or function per environment.")
    for maker in makers:
        is_maker = callable(maker) and not isinstance(maker, nn.Module)  # which would be a policy
        if not (is_maker or isinstance(maker, str if is_list else str | VectorEnv)):
            raise TypeError(
                "make_env must be the id of an environment, a function that makes one, a list of "
                f"these, or a gymnasium VectorEnv; got {type(maker).__name__}."
            )
    first = makers[0] if isinstance(makers[0], VectorEnv) else _make(makers[0], encoding)
    if isinstance(first, VectorEnv):
        if is_list:
            first.close()
            raise TypeError("A list holds single environments; pass one VectorEnv by itself.")
        if whole_episodes:
            first.close()
            raise ValueError(
                "trajs_per_batch needs an id or a function: a step of a vector environment may "
                "belong to no episode."
            )
        _check_count(num_envs, first.num_envs)
        single = OnlySpaces(first.single_observation_space, first.single_action_space)
        return VectorEnvs(first, info_keys), wrap(single, encoding, reads), first.num_envs
    wrappers: list[GymWrapper] = []
    try:
        wrappers.append(wrap(first, encoding, reads))
        if is_list:
            _check_count(num_envs, len(makers))
        others = makers[1:] if is_list else makers * (num_envs - 1)
        for i, maker in enumerate(others, 1):
            wrappers.append(wrap(_make(maker, encoding), encoding, reads))
            for name in ("observation_space", "action_space"):
                space, expected = (getattr(gym_env(x), name) for x in (wrappers[i], wrappers[0]))
                if space != expected:
                    raise ValueError(
                        f"Environment {i} has {name} {space}, and environment 0 has {expected}. "
                        "Wrap them to have the same."
                    )
        if len({id(gym_env(x).unwrapped) for x in wrappers}) < len(wrappers):
            raise ValueError(
                "make_env returned one environment twice, and each row needs its own. Make a new "
                "one in each call."
            )
    except BaseException:
        SerialEnvs(wrappers).close()
        raise
    return SerialEnvs(wrappers), wrappers[0], len(wrappers)


def _check_count(num_envs: int, count: int) -> None:
    if num_envs not in (1, count):
        raise ValueError(
            f"make_env holds {count} environments, and num_envs is {num_envs}: leave num_envs out."
        )


def _make(make_env: MakeEnv, categorical_action_encoding: bool) -> object:
    if not isinstance(make_env, str):
        return make_env()
    with suppress(IndexError, KeyError, RuntimeError, TypeError, ValueError):  # of an encoding
        return GymEnv(make_env, categorical_action_encoding=categorical_action_encoding)
    return gym.make(make_env, disable_env_checker=True)


def seeds_from(seed: int, count: int, static: bool) -> list[int]:
    """Return the seeds that ``SerialEnv.set_seed`` gives: each is drawn from the one before it."""
    seeds = [whole(0).check(seed, "seed")]
    while len(seeds) < count:
        drawn = np.random.default_rng(seeds[-1]).bytes(8)
        seeds.append(seed if static else int.from_bytes(drawn, "big") % (2**32 - 1))
    return seeds
