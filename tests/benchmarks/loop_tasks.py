"""Tasks and contenders of the benchmark of whole training loops, and their timing.

This module does not import torchrl: the process of a contender imports only what it needs, because
every imported module slows the garbage collector down.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

MINIBATCH = 64  # frames
GAMMA, LMBDA = 0.99, 0.95
CLIP, DUAL_CLIP, ENTROPY = 0.2, 5.0, 1e-4  # the tutorial's
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0

TUTORIAL, SB3, CLEANRL = "TorchRL's tutorial", "Stable-Baselines3", "CleanRL-style"
EXCHANGED = "TorchRL's tutorial, ppokit's step"
PPOKIT, COLLECTOR, COMPILED = "ppokit", "ppokit, torchrl's Collector", "ppokit, compiled"
FLOOR = "floor"

FLOOR_PARTS = ("environment", "acting", "networks", "clip", "optimizer")
FEWEST = 3  # batches of a measurement


@dataclass(frozen=True)
class Task:
    """An environment, the networks, and the size of a batch."""

    env: str
    num_envs: int
    frames: int  #: of a batch
    layers: int = 3  #: hidden ones of actor and critic
    width: int = 256  #: of each
    epochs: int = 10

    @property
    def name(self) -> str:
        count = f"{self.num_envs} environment{'s' if self.num_envs > 1 else ''}"
        return f"{self.env}, {count}, {self.layers}x{self.width}"

    @property
    def hidden(self) -> tuple[int, ...]:
        return (self.width,) * self.layers

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.frames // MINIBATCH)


TASKS = (
    Task("InvertedDoublePendulum-v5", 1, 1_000),
    Task("CartPole-v1", 1, 1_000),
    Task("CartPole-v1", 8, 8 * 128),
    Task("Pendulum-v1", 8, 8 * 128),
    Task("CartPole-v1", 8, 8 * 128, layers=2, width=64),
    Task("Pendulum-v1", 8, 8 * 128, layers=2, width=64),
)
QUICK_TASKS = (
    Task("InvertedDoublePendulum-v5", 1, 100, epochs=2),
    Task("CartPole-v1", 8, 8 * 16, epochs=2),
)


CONTENDERS: dict[str, tuple[str, str, dict[str, bool]]] = {
    TUTORIAL: (
        "the loop of TorchRL's PPO tutorial: `Collector` over a `TransformedEnv` of `GymEnv` (of "
        "`SerialEnv` for several) with `ObservationNorm`, `DoubleToFloat` and `StepCounter`; GAE "
        "again in each epoch, `ReplayBuffer`, `ClipPPOLoss`, cosine schedule. It trains on every "
        "frame of a batch, where the tutorial leaves out the last 40 of 1,000",
        "loop_torchrl.Tutorial",
        {},
    ),
    EXCHANGED: (
        "the same, with `TrainingStep(compile=True)` in place of loss, "
        "backward, clipping and optimizer step, and `ClipPPOLoss(functional=False)`",
        "loop_torchrl.Tutorial",
        {"exchanged": True},
    ),
    SB3: (
        "`PPO`, `MlpPolicy`, `DummyVecEnv`; one call of `learn` a batch",
        "loop_peers.StableBaselines3",
        {},
    ),
    CLEANRL: (
        "written in the style of CleanRL's `ppo.py` and `ppo_continuous_action.py`: "
        "`SyncVectorEnv`, tensors `[T, n]`, GAE in a loop over time, minibatches by index; "
        "without its normalising wrappers",
        "loop_peers.CleanRLStyle",
        {},
    ),
    PPOKIT: (
        "`GymCollector`, `GAE`, `DualClipPPOLoss`, `PPOUpdate` and `Adam(fused=True)`, eager",
        "loop_torchrl.Ppokit",
        {},
    ),
    COLLECTOR: (
        "the same with the tutorial's environments and `Collector`, `TensorActor` around its "
        "policy and `auto_register_policy_transforms=False`",
        "loop_torchrl.Ppokit",
        {"torchrl_collector": True},
    ),
    COMPILED: (
        "as ppokit, with `TrainingStep(compile=True)` and `compile_policy=True`: loss, backward, "
        "clipping and Adam are one graph, network, draw and log-probability another",
        "loop_torchrl.Ppokit",
        {"compiled": True},
    ),
}
"""The description of each loop; its class, made for a task and a seed; and further arguments.

A loop has ``run()``, which collects a batch and trains on it, and ``optimizer``.
"""


def measure(task: dict[str, Any], contender: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return frames a second of the loop, and the seconds of its first batch; or the floor."""
    torch.manual_seed(seed)
    size = Task(**task)
    if contender == FLOOR:
        return import_module("tests.benchmarks.loop_floor").measure_floor(size, seed, seconds)
    _, path, options = CONTENDERS[contender]
    module, name = path.split(".")
    loop = getattr(import_module(f"tests.benchmarks.{module}"), name)(size, seed, **options)
    start = time.perf_counter()
    loop.run()  # first calls allocate, and may compile
    first = time.perf_counter() - start
    whole = _run(loop, seconds)
    _check_steps(loop, size, 1 + len(whole))
    return {
        "frames_per_second": size.frames * len(whole) / sum(whole),
        "first_batch_seconds": first,
    }


def _run(loop: Any, seconds: float) -> list[float]:
    took: list[float] = []
    while len(took) < FEWEST or sum(took) < seconds:
        start = time.perf_counter()
        loop.run()
        took.append(time.perf_counter() - start)
    return took


def _check_steps(loop: Any, task: Task, batches: int) -> None:
    """Raise unless the loop has made the same number of optimizer steps as the others."""
    steps = {int(state["step"]) for state in loop.optimizer.state.values()}
    if steps != {batches * task.steps}:
        raise RuntimeError(f"{steps} optimizer steps in {batches} batches of {task.steps}.")
