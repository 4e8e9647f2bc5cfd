"""The runs of the MuJoCo benchmark and of the search for its setting."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.benchmarks.learning_arms import Ppokit, StableBaselines3, evaluate, frames_per_second
from tests.benchmarks.learning_tasks import MUJOCO, Task
from tests.benchmarks.report import commit

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5")
TASKS += ("Reacher-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5")
SB3 = "Stable-Baselines3"
EVALUATE_EVERY = 20  # batches
CURVE_EPISODES, FINAL_EPISODES = 10, 20

OPTIONS: dict[str, dict[str, Any]] = {
    "classic setting": {},
    "recomputed advantages": {"recompute": True},
    "KL stop at 0.03": {"target_kl": 0.02},
    "adaptive learning rate": {"adaptive": True},
    "layer norm": {"layer_norm": True},
    "value network of 2x256": {"critic_hidden": (256, 256)},
    "8 environments of 256 frames": {"num_envs": 8},
}
CHOSEN = "recomputed advantages"


def settings(task: str, frames: int, num_envs: int = 1) -> Task:
    sizes = {"num_envs": num_envs, "steps": MUJOCO.steps // num_envs}
    return Task(**{**vars(MUJOCO), "env": task, "frames": frames, **sizes})


def make(task: str, arm: str, seed: int, frames: int) -> Any:
    """Return an arm; Stable-Baselines3 has no recomputed advantages."""
    if arm == SB3:
        return StableBaselines3(settings(task, frames), seed)
    options = dict(OPTIONS[CHOSEN if arm == "ppokit" else arm.removeprefix("search: ")])
    setting = settings(task, frames, options.pop("num_envs", 1))
    return Ppokit(setting, seed, compiled=True, **options)


def train(task: str, arm: str, seed: int, frames: int) -> dict[str, Any]:
    """Train to the end; return curves of evaluations and training, and the final returns."""
    contender = make(task, arm, seed, frames)
    evaluations, training = [], []
    for number, (so_far, returns) in enumerate(contender.batches(), 1):
        if number % EVALUATE_EVERY and so_far < frames:
            continue
        found = evaluate(task, contender.act, CURVE_EPISODES, 100 + seed)
        evaluations.append((so_far, float(np.mean(found))))
        if returns:
            training.append((so_far, float(np.mean(returns))))
    final = evaluate(task, contender.act, FINAL_EPISODES, seed)
    return {"evaluations": evaluations, "training": training, "final": final}


def run(
    task: str, arm: str, seed: int, frames: int, seconds: float | None = None
) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    started = {"commit": commit()}
    if seconds is None:
        return started | train(task, arm, seed, frames)
    return started | frames_per_second(make(task, arm, seed, 10**9), seconds)
