# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""rl8's own cartpole example, run by rl8; and the speed of its collection and of its step.

The environment is written anew after ``examples/cartpole/env.py`` of github.com/theOGognf/rl8 at
commit f598c6d1bceaa07a43e083508608cffc2c64becf, which is not in rl8's wheel: five observations
(position, velocity, cosine and sine of the angle, angular velocity), three forces, no end of an
episode, and a reward of minus the distance from rest. Its step is compiled, as there.

argv: arguments as JSON, and the JSON file to write. Arguments are ``mode`` ("curve" or "speed"),
``seed``, ``num_envs``, ``horizon``, and of a curve ``target`` and ``steps``, of speed ``rounds``
and ``chunk``: frames of a minibatch whose gradients are accumulated, None for the whole batch; and
``eager`` to compile nothing.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import torch
from rl8 import AlgorithmConfig, Env
from rl8.data import DataKeys
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded

GRAVITY, HALF_LENGTH, POLE, CART, FORCE, TAU = 9.8, 0.5, 0.1, 1.0, 5.0, 0.02
TOTAL = POLE + CART


@torch.compile
def advance(state: torch.Tensor, action: torch.Tensor):
    """Return the state ``[4, N]`` after an Euler step, its observation and its reward."""
    x, speed, angle, spin = state
    force = (action.flatten() - 1) * FORCE
    cos, sin = torch.cos(angle), torch.sin(angle)
    push = (force + POLE * HALF_LENGTH * spin**2 * sin) / TOTAL
    turn = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - POLE * cos**2 / TOTAL))
    pull = push - POLE * HALF_LENGTH * turn * cos / TOTAL
    state = torch.vstack(
        (x + TAU * speed, speed + TAU * pull, angle + TAU * spin, spin + TAU * turn)
    )
    x, speed, angle, spin = state
    cos, sin = torch.cos(angle), torch.sin(angle)
    cost = (cos - 1).abs() + sin.abs() + x.abs() + speed.abs() + spin.abs()
    return state, torch.vstack((x, speed, cos, sin, spin)).T, -cost[:, None]


class CartPole(Env):
    """The cart and the pole, as many as there are environments."""

    max_horizon = 128
    state: torch.Tensor

    def __init__(self, num_envs, /, horizon=None, *, device="cpu"):
        super().__init__(num_envs, horizon, device=device)
        self.observation_spec = Unbounded(5, device=device, dtype=torch.float32)
        self.action_spec = Categorical(3, shape=torch.Size([1]), device=device)

    def reset(self, *, config=None):
        self.state = torch.normal(0, 0.01, size=(4, self.num_envs), device=self.device)
        x, speed, angle, spin = self.state
        return torch.vstack((x, speed, torch.cos(angle), torch.sin(angle), spin)).T

    def step(self, action):
        self.state, observation, reward = advance(self.state, action)
        return TensorDict(
            {DataKeys.OBS: observation, DataKeys.REWARDS: reward},
            batch_size=self.num_envs,
            device=self.device,
        )


def build(arguments: dict):
    """Return rl8's algorithm with its own settings, its environment's step compiled already."""
    torch.manual_seed(arguments["seed"])
    chunk = arguments.get("chunk")
    algorithm = AlgorithmConfig(
        num_envs=arguments["num_envs"],
        horizon=arguments["horizon"],
        sgd_minibatch_size=chunk,
        accumulate_grads=chunk is not None,
        device="cpu",
    ).build(CartPole)
    advance(algorithm.env.state, torch.zeros(arguments["num_envs"], 1, dtype=torch.long))
    return algorithm


def curve(arguments: dict) -> dict:
    """Train until the mean return of a horizon reaches the target; time and frames of each."""
    algorithm = build(arguments)
    rows, frames, started = [], 0, time.perf_counter()
    for _ in range(arguments["steps"]):
        collected = algorithm.collect()
        frames += collected["env/steps"]
        rows.append([frames, time.perf_counter() - started, collected["returns/mean"]])
        if collected["returns/mean"] >= arguments["target"]:
            break
        algorithm.step()
    return {"rows": rows}


def speed(arguments: dict) -> dict:
    algorithm = build(arguments)
    times: dict = {"collect": [], "step": []}
    for number in range(2 + arguments["rounds"]):
        for name in times:
            started = time.perf_counter()
            getattr(algorithm, name)()
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: median(values) for name, values in times.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    if given["eager"]:
        torch.compiler.set_stance("force_eager")
    result = {"curve": curve, "speed": speed}[given["mode"]](given)
    Path(sys.argv[2]).write_text(json.dumps(result))
