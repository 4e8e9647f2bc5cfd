"""Observations and actions, named and encoded as torchrl's ``GymWrapper`` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from operator import getitem
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import FilterObservation
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import (
    Binary,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Stacked,
    TensorSpec,
)
from torchrl.envs import GymWrapper

from ppokit._batch import as_key, key_parts

MASK = "action_mask"

Shape = tuple[int, ...]
Info = Mapping[str, Any]  #: beside an observation


class Leaf(NamedTuple):
    """An entry of the observation, and how to read it from the result of ``step`` or ``reset``."""

    key: NestedKey
    shape: Shape
    dtype: torch.dtype
    path: tuple[str, ...] | None  #: names in a Dict observation; None for an entry of ``info``
    accepted: tuple[Shape, ...]  #: the shapes that the environment may return
    encode: Callable[[Any], np.ndarray] | None
    choices: np.ndarray | None = None  #: how many there are of each number, counted from 0

    def read(self, observation: Any, info: Info, env: int) -> Any:
        """Return the entry, encoded, or raise a ValueError naming environment number ``env``."""
        try:
            value = info[MASK] if self.path is None else reduce(getitem, self.path, observation)
        except (KeyError, IndexError, TypeError) as error:
            whole = "info" if self.path is None else f"observation {observation!r}"
            raise ValueError(
                f"Environment {env} returned no {self.key!r} in its {whole}: return it always."
            ) from error
        value = self.check(value, env)
        if self.encode is None:
            return value
        return self.encode(value.astype(np.int64) if value.dtype.kind == "u" else value)

    def check(self, value: object, env: int | None) -> np.ndarray:
        """Return an array; raise a ValueError where it would be stored as something else."""
        array = check_array(value, self.accepted, f"the observation {self.key!r}", env)
        stored = whole_numbers(self.dtype)
        if stored is not None and array.dtype != stored:
            if self.encode is None:
                _check_whole(array, stored, self.key, env)
            elif array.dtype.kind == "f":  # others are checked where they are encoded
                _check_whole(array, np.dtype(np.int64), self.key, env)
        if self.choices is not None:
            is_wrong = (array < 0) | (array >= self.choices)
            if is_wrong.any():
                raise ValueError(
                    f"{name_of(env)} returned the observation {self.key!r} with "
                    f"{array[is_wrong].flat[0]}, and its space has {self.choices.tolist()} "
                    "choices, counted from 0. Return one of them, or declare more."
                )
        return array


@cache
def whole_numbers(dtype: torch.dtype) -> np.dtype | None:
    """Return numpy's dtype of whole numbers; None for others."""
    return None if dtype.is_floating_point else torch.empty(0, dtype=dtype).numpy().dtype


def _check_whole(array: np.ndarray, stored: np.dtype, key: NestedKey, env: int | None) -> None:
    """Raise a ValueError unless the numbers are whole and fit what they are stored as."""
    with np.errstate(invalid="ignore"):
        fits = (array.astype(stored) == array) & (array == np.round(array))
    if not fits.all():
        raise ValueError(
            f"{name_of(env)} returned the "
            f"observation {key!r} with {array[~fits].flat[0]}, of {array.dtype}, but its space "
            f"declares {stored}. Declare a Box of floats, or return what the space holds."
        )


def name_of(env: int | None) -> str:
    """Return how an error calls environment number ``env``; None is a vector environment."""
    return "A vector environment" if env is None else f"Environment {env}"


def check_array(value: object, accepted: Sequence[Shape], name: str, env: int | None) -> np.ndarray:
    """Return an array of one of these shapes; ``env`` None is a whole vector environment."""
    if type(value) is np.ndarray and value.shape in accepted and value.dtype.kind in "fiub":
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # ragged, or on another device
        array = np.asarray(None)
    if array.dtype.kind not in "fiub" or array.shape not in accepted:  # a None is stored as NaN
        kind = "None" if value is None else f"{array.dtype} of shape {list(array.shape)}"
        shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(accepted))
        raise ValueError(
            f"{name_of(env)} returned {name} as {kind}, but its space declares numbers of shape "
            f"{shapes}. Return that shape from every reset and step, or declare the other one."
        )
    return array


class OnlySpaces(gym.Env):
    """The spaces of one of the environments of a native vector environment."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


def _holds_arrays(space: spaces.Space, *others: type) -> bool:
    """Return whether a space has numbers alone, or its Dicts these others; graphs have neither."""
    if isinstance(space, spaces.Tuple):
        return all(map(_holds_arrays, space.spaces))
    if isinstance(space, spaces.Dict):
        return all(_holds_arrays(part, *others) for part in space.values())
    kinds = spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete
    return isinstance(space, (*kinds, *others))


def _advice(space: spaces.Space) -> str:
    """Return how to remove what cannot be encoded from an observation."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {}
    kept = [name for name, x in parts.items() if _holds_arrays(x)]
    if kept and len(kept) < len(parts):
        return (
            f"Remove what is no array: gymnasium.wrappers.FilterObservation(env, {kept}). "
            f"actor_critic leaves it out with in_keys={kept}, and GymCollector where the policy "
            "does not read it."
        )
    if _holds_arrays(space):
        return "Wrap the environment: gymnasium.wrappers.FlattenObservation or DtypeObservation."
    return "Encode it in an environment wrapper: gymnasium.wrappers.TransformObservation."


def wrap(
    env: object, categorical_action_encoding: bool, reads: Collection[NestedKey] | None = None
) -> GymWrapper:
    """Return torchrl's wrapper of an environment.

    Entries of a Dict with graphs or sequences are left out, unless ``reads`` names them.
    """
    if isinstance(env, GymWrapper) and not env.batch_size and env.wrapper_frame_skip == 1:
        return env
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"make_env returned {env!r}; it must return a single gymnasium.Env, or an undecorated "
            "torchrl GymEnv without batch size or frame skip. Use gymnasium wrappers, or "
            "observation_transform."
        )
    space = env.observation_space
    if reads is not None and isinstance(space, spaces.Dict):
        names = {key_parts(key)[0] for key in reads}
        kept = [k for k, x in space.items() if k in names or _holds_arrays(x, spaces.Text)]
        env = FilterObservation(env, kept) if 0 < len(kept) < len(space) else env
    try:
        return GymWrapper(env, categorical_action_encoding=categorical_action_encoding)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"torchrl has no encoding for observation space {env.observation_space} with action "
            f"space {env.action_space}: {error} {_advice(env.observation_space)} If it is "
            "the action, use gymnasium.wrappers.TransformAction; of a Tuple, to give its parts "
            'names: TransformAction(env, lambda action: tuple(action.values()), spaces.Dict({"part0'
            '": env.action_space[0], ...})).'
        ) from error


def gym_env(wrapper: GymWrapper) -> Any:
    """Return the gymnasium environment of torchrl's wrapper, with gymnasium's own wrappers."""
    return wrapper._env


def observation_leaves(
    wrapper: GymWrapper,
    info: Info,
    dtype: torch.dtype | None = None,
    reads: Collection[tuple[str, ...]] = (),
) -> list[Leaf]:
    """Return the entries of an observation, with the action mask that ``info`` may hold.

    Floating-point entries have this dtype; None is the environment's. Others than arrays are left
    out, unless ``reads`` names them.
    """
    space = gym_env(wrapper).observation_space
    specs = {key_parts(key): spec for key, spec in wrapper.observation_spec.items(True, True)}
    arrays = [key for key, spec in specs.items() if isinstance(spec.dtype, torch.dtype)]
    read = [key for key in specs if any(key[: len(x)] == x for x in reads)]
    kept = {*arrays, *read} or specs
    leaves = [_leaf(as_key(key), specs[key], space) for key in specs if key in kept]
    if dtype is not None:
        leaves = [x._replace(dtype=dtype) if x.dtype.is_floating_point else x for x in leaves]
    choice = gym_env(wrapper).action_space
    if MASK in info and isinstance(choice, spaces.Discrete):
        check_array(info[MASK], [(int(choice.n),)], f"an {MASK!r} of {choice} in info", 0)
    if MASK in info and MASK not in [leaf.key for leaf in leaves]:
        with suppress(ValueError):  # gymnasium's masks of several choices are no arrays
            if (mask := np.asarray(info[MASK])).dtype.kind in "fiub":
                leaves.append(Leaf(MASK, mask.shape, torch.bool, None, (mask.shape,), None))
    return leaves


def _leaf(key: NestedKey, spec: TensorSpec, space: spaces.Space) -> Leaf:
    path: list[str] = []
    whole = space
    if isinstance(space, spaces.Dict):
        for name in key_parts(key):
            # torchrl calls a "state" by the name of "observation" where there is no such entry
            inner = cast("spaces.Dict", space)
            renamed = name not in inner.spaces and name == "observation"
            path.append("state" if renamed else name)
            space = inner[path[-1]]
    if not isinstance(spec.dtype, torch.dtype):
        raise TypeError(f"Observation {key!r} is no array: {space}. {_advice(whole)}")
    shape = tuple(spec.shape)
    if isinstance(space, spaces.Box):  # torchrl stores a number as an array of one
        return Leaf(key, shape, spec.dtype, tuple(path), (space.shape, shape), None)
    found = _shape_of(space)
    if isinstance(spec, Stacked) or found is None:  # a Tuple of unlike parts, or of Dicts
        raise TypeError(
            f"torchrl has no encoding for observation {key!r}, {space}. {_advice(space)}"
        )
    encode = lambda value: np.asarray(spec.encode(value, ignore_device=True))  # noqa: E731
    return Leaf(key, shape, spec.dtype, tuple(path), (found,), encode, _choices(space))


def _choices(space: spaces.Space) -> np.ndarray | None:
    """Return how many choices each number of a space has; None of others."""
    if isinstance(space, spaces.Tuple):
        parts = [_choices(part) for part in space.spaces]
        return None if any(x is None for x in parts) else np.stack(parts)  # pyright: ignore
    if isinstance(space, spaces.MultiBinary):
        return np.full(space.shape, 2)
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec
    return np.asarray(space.n) if isinstance(space, spaces.Discrete) else None


def _shape_of(space: spaces.Space) -> Shape | None:
    """Return the shape of what a space holds, a Tuple's (like) parts stacked; None of Dicts."""
    if isinstance(space, spaces.Tuple):
        part = _shape_of(space.spaces[0])
        return None if part is None else (len(space.spaces), *part)
    return space.shape


def check_starts(space: spaces.Space) -> None:
    """Raise for integers that do not start at 0: torchrl's specs start there."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            check_starts(part)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
        raise ValueError(
            f"{space} starts at {space.start}, and torchrl's encoding starts at 0. Wrap the "
            "environment in gymnasium.wrappers.TransformAction or TransformObservation."
        )


class ActionPart(NamedTuple):
    """One array of an action: torchrl's key of it, and its place in what the environments take."""

    key: NestedKey
    path: tuple[str, ...]  #: names in a Dict action; empty where the action is one array
    space: spaces.Space
    spec: TensorSpec
    is_choice: bool  #: of one of several, as an index or one-hot
    joined: bool  #: whether a vector environment takes it in one array
    are_rows: bool  #: whether each environment takes a row of the values as it is

    def decode(self, values: Tensor) -> Any:
        """Return what each environment takes, from values ``[n, ...]``."""
        if self.are_rows:  # copies, because an environment may write to its action
            return list(values.detach().cpu().numpy().copy())
        if self.is_choice and values.ndim == 1 and not self.joined:
            return (values.long() if values.is_floating_point() else values).tolist()  # indices
        array = cast("np.ndarray", self.spec.to_numpy(values, safe=False))
        if isinstance(self.space, spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
            array = array.astype(self.space.dtype, copy=False)  # a Bernoulli's bits are floats
        if self.is_choice and array.ndim == 1 and not self.joined:
            return array.tolist()
        part = self.space[0] if isinstance(self.space, spaces.Tuple) else self.space
        if type(part) is spaces.Box and part.shape == ():  # torchrl has arrays of one for numbers
            array = array.squeeze(-1)
        array = array.copy()
        return array if self.joined else [array[i, ...] for i in range(len(array))]


class Actions:
    """The shapes and the encoding of actions, which the environments take one by one."""

    def __init__(self, wrapper: GymWrapper, *, joined: bool = False) -> None:
        self._space = space = gym_env(wrapper).action_space
        check_starts(space)
        joined, self.parts = joined and space.shape is not None, []  # a Dict or a Tuple has none
        for key, spec in wrapper.full_action_spec.items(True, True):
            path = key_parts(key) if isinstance(space, spaces.Dict) else ()
            is_choice = type(spec) in (Categorical, OneHot)  # not of their subclasses
            of_part = reduce(getitem, path, self._space)
            are_rows = type(of_part) is spaces.Box and of_part.shape != () and not joined
            part = path, of_part, spec, is_choice, joined, are_rows
            self.parts.append(ActionPart(as_key(key), *part))

    def keys(self, written: Collection[NestedKey]) -> list[NestedKey]:
        """Return where a policy that writes these entries has the parts of the action.

        The parts of a Dict are where torchrl has them, ``"gear"``, or at ``("action", "gear")``.
        """
        keys = [part.key for part in self.parts]
        if not all(key in written for key in keys):
            if not isinstance(self._space, spaces.Dict):
                names = repr(keys[0])
            else:
                names = f"{keys}, nor these within 'action'"
                keys = [as_key(("action", *key_parts(key))) for key in keys]
            if not all(key in written for key in keys):
                raise KeyError(
                    f"The policy wrote no {names}, but {list(map(str, written))}. Set its out_keys."
                )
        return keys

    def check(self, values: Mapping[NestedKey, Tensor], num_envs: int) -> None:
        """Raise a ValueError unless the parts have the shapes that the environments expect."""
        for part, (key, value) in zip(self.parts, values.items(), strict=True):
            expected, fix = [num_envs, *part.spec.shape], "as actor_critic(env) does."
            if part.spec.domain == "discrete":
                fix = "or choose between one-hot and indices by categorical_action_encoding."
            if list(value.shape) != expected:
                raise ValueError(
                    f"The policy's {key!r} has shape {list(value.shape)}; for {num_envs} "
                    f"environment(s) with {part.space} it must be {expected}. Use a distribution "
                    f"for that space, {fix}"
                )

    def check_choices(self, batch: TensorDictBase, written: Collection[NestedKey]) -> None:
        """Raise a ValueError where a policy has chosen what its space does not have."""
        for part, key in zip(self.parts, self.keys(written), strict=True):
            kind, action = type(part.spec), batch[key]
            if kind in (OneHot, MultiOneHot):
                sizes = part.spec
                sizes = [sizes.space.n] if kind is OneHot else [x.n for x in sizes.space]
                groups = action.split(sizes, -1)
                is_right = [((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1) for x in groups]
                is_wrong = ~torch.stack(is_right).all(0)
            elif kind is Binary:
                is_wrong = (action != 0) & (action != 1)
            elif kind in (Categorical, MultiCategorical):
                is_one = kind is Categorical
                most = part.spec.n if is_one else part.spec.nvec.to(action.device)
                is_wrong = (action < 0) | (action >= most) | (action % 1 != 0)
            else:
                if not part.spec.dtype.is_floating_point and (action % 1 != 0).any():
                    raise ValueError(f"{part.space} has whole numbers, the policy's {key!r} not.")
                continue
            if is_wrong.any():
                raise ValueError(
                    f"The policy chose {action[is_wrong][0].tolist()} in {key!r}, and the space is "
                    f"{part.space}, counted from 0: use a distribution of choices, and a network "
                    "with an output for each."
                )

    def decode(self, values: Sequence[Tensor]) -> Any:
        """Return the action of each environment, from its parts ``[n, ...]``."""
        columns = [part.decode(x) for part, x in zip(self.parts, values, strict=True)]
        if not isinstance(self._space, spaces.Dict):
            return columns[0]
        actions: list[dict[str, Any]] = [{} for _ in columns[0]]
        for part, column in zip(self.parts, columns, strict=True):
            for action, value in zip(actions, column, strict=True):
                for name in part.path[:-1]:
                    action = action.setdefault(name, {})
                action[part.path[-1]] = value
        return actions
