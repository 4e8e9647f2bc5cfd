# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""rl8's own cartpole example, run by rl8.

The environment follows ``examples/cartpole/env.py`` of github.com/theOGognf/rl8 at commit
f598c6d1bceaa07a43e083508608cffc2c64becf, which is not in rl8's wheel: five observations (position,
velocity, cosine and sine of the angle, angular velocity), three forces, no end of an episode, and a
reward of minus the distance from rest. Its step is compiled, as there.

argv: arguments as JSON, and the JSON file to write. Arguments are ``seed``, ``num_envs``,
``horizon``, ``target`` (or None), ``total_frames`` and ``chunk``: frames of a minibatch whose
gradients are accumulated, None for the whole batch.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

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


def train(arguments: dict) -> list[dict[str, float]]:
    """Return the mean return of each collection, until the target or so many frames.

    rl8 has its own settings; the environment's step is compiled before the clock starts.
    """
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
    target, rows, frames, started = arguments["target"], [], 0, time.perf_counter()
    while frames < arguments["total_frames"]:
        collected = algorithm.collect()
        frames += collected["env/steps"]
        seconds, value = time.perf_counter() - started, collected["returns/mean"]
        rows.append({"frames": frames, "seconds": seconds, "return": value})
        if target is not None and value >= target:
            break
        algorithm.step()
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = train(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps({"version": version("rl8"), "rows": rows}))
