"""What ``step`` and ``reset`` of an environment return, checked and told apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppokit.collectors.spaces import Shape, check_array


def parts_of_reset(returned: Any, env: int) -> tuple[Any, dict[str, Any]]:
    """Return observation and info.

    Raises:
        ValueError: ``reset`` returned something else than gymnasium's two.
    """
    if not (_has(2, returned) and isinstance(returned[1], dict)):
        raise ValueError(
            f"reset() of environment {env} returned {_outline(returned)}, where gymnasium's "
            "returns (observation, info), info a dict. Wrap an environment of the older gym."
        )
    return returned[0], returned[1]


def parts_of_step(returned: Any, env: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return observation, reward, terminated, truncated and info.

    Raises:
        ValueError: ``step`` returned something else than gymnasium's five.
    """
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
