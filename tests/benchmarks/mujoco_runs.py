"""The runs of the MuJoCo benchmark and of the search for its setting."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.learning_arms import (
    MUJOCO,
    Ppokit,
    StableBaselines3,
    Task,
    frames_per_second,
    train,
)
from tests.benchmarks.report import commit

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5")
TASKS += ("Reacher-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5")
SB3 = "Stable-Baselines3"
EVALUATE_EVERY, CURVE_EPISODES = 20, 10  # batches, episodes

FALLING_KL = {"recompute": True, "adaptive": True, "target_kl": (0.02, 0.001)}
OPTIONS: dict[str, dict[str, Any]] = {
    "classic setting": {},
    "recomputed advantages": {"recompute": True},
    "adaptive learning rate": {"adaptive": True},
    "recomputed and adaptive": {"recompute": True, "adaptive": True},
    "target KL 0.02 to 0.001": FALLING_KL,
    "target KL 0.02 to 0.001, capped": FALLING_KL | {"highest": 3e-4},
    "layer norm": {"layer_norm": True},
    "value network of 2x256": {"critic_hidden": (256, 256)},
}
OURS, FALLING = "ppokit", "ppokit, falling rate"
ARM_OPTIONS = {OURS: "target KL 0.02 to 0.001, capped", FALLING: "recomputed advantages"}


def make(settings: Task, arm: str, seed: int) -> Any:
    """Return an arm; Stable-Baselines3 has neither recomputed advantages nor the adaptive rate."""
    if arm == SB3:
        return StableBaselines3(settings, seed)
    option = ARM_OPTIONS.get(arm, arm.removeprefix("search: "))
    return Ppokit(settings, seed, compiled=True, **OPTIONS[option])


def run(
    task: str, arm: str, seed: int, frames: int, seconds: float | None = None
) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    settings, started = Task(**{**vars(MUJOCO), "env": task, "frames": frames}), commit()
    contender = make(settings, arm, seed)
    if seconds is not None:
        return {"commit": started} | frames_per_second(contender, seconds)
    points = {"every": EVALUATE_EVERY, "episodes": CURVE_EPISODES}
    return {"commit": started} | train(contender, settings, seed, **points)
