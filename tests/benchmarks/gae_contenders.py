"""GAE by ppokit and by other libraries, on the same batch.

The data are converted to each library's layout before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor
from torchrl.objectives.value import functional as torchrl_functional

from ppokit import functional, kernels
from tests.benchmarks.data import GAMMA, LMBDA, Data
from tests.benchmarks.report import optional
from tests.benchmarks.timing import Call

COPY = "copy of 22 bytes an element"


@dataclass(frozen=True)
class Contender:
    """A function that makes a call for a batch, and one that reads the call's result."""

    about: str
    prepare: Callable[[Data], Call]
    #: the advantage ``[B, T]`` from the call's result; None for the copy
    advantage: Callable[[Any], Tensor] | None
    ours: bool = False


def contenders() -> dict[str, Contender]:
    found = _ppokit() | {
        "torchrl, loop": Contender(
            "`torchrl.objectives.value.functional.generalized_advantage_estimate`",
            partial(_torchrl, torchrl_functional.generalized_advantage_estimate),
            _first,
        ),
        "torchrl, vectorised": Contender(
            "`torchrl.objectives.value.functional.vec_generalized_advantage_estimate`",
            partial(_torchrl, torchrl_functional.vec_generalized_advantage_estimate),
            _first,
        ),
    }
    if optional("stable_baselines3"):
        about = "`RolloutBuffer.compute_returns_and_advantage`, numpy, `[T, B]`"
        found["Stable-Baselines3"] = Contender(
            about, _stable_baselines3, lambda result: torch.from_numpy(result[0]).mT
        )
    if optional("tianshou"):
        about = (
            "`tianshou.algorithm.algorithm_base._gae`, numba, the rows laid end to end, and the "
            "addition that makes the returns"
        )
        found["Tianshou"] = Contender(about, _tianshou, lambda r: torch.from_numpy(r[0]))
    if optional("skrl"):
        about = (
            "`skrl.agents.torch.ppo.ppo.compute_gae`, `[T, B, 1]`; it also standardises the "
            "advantages"
        )
        found["skrl"] = Contender(about, _skrl, lambda r: (r[0] - r[2]).squeeze(-1).mT)
    about = "its formula as a loop in torch over the steps of `[T, B]`"
    found["rl8's rule"] = Contender(about, _rl8, lambda result: result[0].mT)
    about = "`copy_` of 11 bytes an element between two buffers: the bound"
    found[COPY] = Contender(about, _copy, None)
    return found


def _first(result: tuple[Tensor, Tensor]) -> Tensor:
    return result[0].squeeze(-1)


def _ppokit() -> dict[str, Contender]:
    found = {}
    for name in kernels.available():
        about = f"`ppokit.functional.gae`, the kernel {name!r}"
        prepare = partial(_functional, partial(kernels.use, name))
        found[f"ppokit, {name}"] = Contender(about, prepare, _first, ours=True)
    return found


def _functional(within: Any, data: Data) -> Call:
    arguments = (data.reward, data.value, data.next_value, data.done, data.terminated)
    return Call(lambda: functional.gae(*arguments, gamma=GAMMA, lmbda=LMBDA), within)


def _torchrl(function: Any, data: Data) -> Call:
    arguments = (data.value, data.next_value, data.reward, data.done, data.terminated)
    return Call(lambda: function(GAMMA, LMBDA, *arguments))


def _time_major(x: Tensor) -> Tensor:
    return x.squeeze(-1).mT.contiguous()


def _stable_baselines3(data: Data) -> Call:
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

    return Call(run)


def _tianshou(data: Data) -> Call:
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

    return Call(run)


def _skrl(data: Data) -> Call:
    compute_gae = import_module("skrl.agents.torch.ppo.ppo").compute_gae
    value = data.value.transpose(0, 1).contiguous()
    arguments = {
        "rewards": data.reward_and_bootstrap().transpose(0, 1).contiguous(),
        "terminated": data.terminated.transpose(0, 1).contiguous(),
        "truncated": (data.done & ~data.terminated).transpose(0, 1).contiguous(),
        "values": value,
        "last_values": data.next_value[:, -1].clone(),
        "discount_factor": GAMMA,
        "lambda_coefficient": LMBDA,
        "time_limit_bootstrap": True,
    }
    # The returns minus the values are the advantage before skrl standardises it.
    return Call(lambda: (*compute_gae(**arguments), value))


def _rl8(data: Data) -> Call:
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

    return Call(run)


def _copy(data: Data) -> Call:
    source = torch.zeros(11 * data.reward.numel(), dtype=torch.uint8)
    target = torch.ones_like(source)
    return Call(lambda: target.copy_(source))
