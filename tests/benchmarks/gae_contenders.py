"""GAE by ppokit and by other libraries, on the same batch.

The data are converted to each library's layout before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor
from torchrl.objectives.value import functional as torchrl_functional

from ppokit import functional, kernels
from tests.benchmarks.data import GAMMA, LMBDA, Data
from tests.benchmarks.timing import Call

COPY = "copy of 22 bytes an element"
Prepared = tuple[Call, Callable[[Any], Tensor] | None]
"""The call, and the function that reads the advantage ``[B, T]`` from its result."""


def contenders() -> dict[str, tuple[str, Callable[[Data], Prepared]]]:
    """Return the description of each contender, and the function that prepares its call."""
    module = "torchrl.objectives.value.functional"
    loop, vectorised = "generalized_advantage_estimate", "vec_generalized_advantage_estimate"
    found: dict[str, tuple[str, Callable[[Data], Prepared]]] = {}
    for name in kernels.available():
        about = f"`ppokit.functional.gae`, the kernel {name!r}"
        found[f"ppokit, {name}"] = about, partial(_functional, partial(kernels.use, name))
    found["torchrl, loop"] = f"`{module}.{loop}`", partial(_torchrl, loop)
    found["torchrl, vectorised"] = f"`{module}.{vectorised}`", partial(_torchrl, vectorised)
    if find_spec("stable_baselines3"):
        about = "`RolloutBuffer.compute_returns_and_advantage`, numpy, `[T, B]`"
        found["Stable-Baselines3"] = about, _stable_baselines3
    if find_spec("tianshou"):
        about = (
            "`tianshou.algorithm.algorithm_base._gae`, numba, the rows laid end to end, and the "
        )
        found["Tianshou"] = about + "addition that makes the returns", _tianshou
    found["rl8's rule"] = "its formula as a loop in torch over the steps of `[T, B]`", _rl8
    found[COPY] = "`copy_` of 11 bytes an element between two buffers: the bound", _copy
    return found


def _first(result: tuple[Tensor, Tensor]) -> Tensor:
    return result[0].squeeze(-1)


def _functional(within: Any, data: Data) -> Prepared:
    arguments = (data.reward, data.value, data.next_value, data.done, data.terminated)
    return Call(lambda: functional.gae(*arguments, gamma=GAMMA, lmbda=LMBDA), within), _first


def _torchrl(name: str, data: Data) -> Prepared:
    arguments = (data.value, data.next_value, data.reward, data.done, data.terminated)
    function = getattr(torchrl_functional, name)
    return Call(lambda: function(GAMMA, LMBDA, *arguments)), _first


def _time_major(x: Tensor) -> Tensor:
    return x.squeeze(-1).mT.contiguous()


def _stable_baselines3(data: Data) -> Prepared:
    batch, steps, _ = data.reward.shape
    space = gymnasium.spaces.Box(-1, 1, (1,))
    buffer = import_module("stable_baselines3.common.buffers").RolloutBuffer(
        steps, space, space, "cpu", gae_lambda=LMBDA, gamma=GAMMA, n_envs=batch
    )
    done = _time_major(data.done).numpy()
    buffer.rewards = _time_major(data.reward_and_bootstrap()).numpy()
    buffer.values = _time_major(data.value).numpy()
    buffer.episode_starts[1:] = done[:-1]
    last_values, last_done = data.next_value[:, -1], done[-1]

    def run() -> tuple[np.ndarray, np.ndarray]:
        buffer.compute_returns_and_advantage(last_values, last_done)
        return buffer.advantages, buffer.returns

    return Call(run), lambda result: torch.from_numpy(result[0]).mT


def _tianshou(data: Data) -> Prepared:
    jitted = import_module("tianshou.algorithm.algorithm_base")._gae
    value = data.value.flatten().numpy()
    next_value = torch.where(data.terminated, 0, data.next_value).flatten().numpy()
    reward = data.reward.flatten().double().numpy()  # its buffers hold rewards in float64
    end = data.done.clone()
    end[:, -1] = True
    end = end.flatten().numpy()

    def run() -> tuple[np.ndarray, np.ndarray]:
        advantage = jitted(value, next_value, reward, end, GAMMA, LMBDA)
        return advantage, advantage + value

    return Call(run), lambda result: torch.from_numpy(result[0])


def _rl8(data: Data) -> Prepared:
    reward, value, next_value = map(_time_major, (data.reward, data.value, data.next_value))
    bootstraps, goes_on = (1 - _time_major(x).float() for x in (data.terminated, data.done))

    def run() -> tuple[Tensor, Tensor]:
        advantage = torch.empty_like(reward)
        following = torch.zeros_like(reward[0])
        for t in reversed(range(reward.shape[0])):
            delta = reward[t] + GAMMA * next_value[t] * bootstraps[t] - value[t]
            following = delta + GAMMA * LMBDA * goes_on[t] * following
            advantage[t] = following
        return advantage, advantage + value

    return Call(run), lambda result: result[0].mT


def _copy(data: Data) -> Prepared:
    source = torch.zeros(11 * data.reward.numel(), dtype=torch.uint8, device=data.reward.device)
    target = torch.ones_like(source)
    return Call(lambda: target.copy_(source)), None
