"""Tasks and contenders of the benchmark of whole training loops.

This module does not import torch: the process of a contender imports only what it needs, because
every imported module slows the garbage collector down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

MINIBATCH = 64  # frames
GAMMA, LMBDA = 0.99, 0.95
CLIP, DUAL_CLIP, ENTROPY = 0.2, 5.0, 1e-4  # the tutorial's
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0

TUTORIAL, SB3, CLEANRL = "TorchRL's tutorial", "Stable-Baselines3", "CleanRL-style"
EXCHANGED = "TorchRL's tutorial, ppokit's step"
PPOKIT, COLLECTOR, COMPILED = "ppokit", "ppokit, torchrl's Collector", "ppokit, compiled"
FLOOR = "floor"

FLOOR_PARTS = ("environment", "acting", "networks", "clip", "optimizer")


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


@dataclass(frozen=True)
class Contender:
    """The description of a loop, and a function that makes it for a task and a seed.

    A loop has ``run()``, which collects a batch and trains on it, and ``optimizer``.
    """

    about: str
    make: Callable[[Task, int], Any]
    package: str | None = None  #: a package that must be installed

    @property
    def is_there(self) -> bool:
        return self.package is None or find_spec(self.package.replace("-", "_")) is not None


def _made(module: str, name: str, **options: bool) -> Callable[[Task, int], Any]:
    def make(task: Task, seed: int) -> Any:
        return getattr(import_module(f"tests.benchmarks.{module}"), name)(task, seed, **options)

    return make


CONTENDERS = {
    TUTORIAL: Contender(
        "the loop of TorchRL's PPO tutorial: `Collector` over a `TransformedEnv` of `GymEnv` (of "
        "`SerialEnv` for several) with `ObservationNorm`, `DoubleToFloat` and `StepCounter`; GAE "
        "again in each epoch, `ReplayBuffer`, `ClipPPOLoss`, cosine schedule. It trains on every "
        "frame of a batch, where the tutorial leaves out the last 40 of 1,000",
        _made("loop_torchrl", "Tutorial"),
    ),
    EXCHANGED: Contender(
        "the same, with `TrainingStep(compile=True)` in place of loss, "
        "backward, clipping and optimizer step, and `ClipPPOLoss(functional=False)`",
        _made("loop_torchrl", "Tutorial", exchanged=True),
    ),
    SB3: Contender(
        "`PPO`, `MlpPolicy`, `DummyVecEnv`; one call of `learn` a batch",
        _made("loop_peers", "StableBaselines3"),
        "stable-baselines3",
    ),
    CLEANRL: Contender(
        "written in the style of CleanRL's `ppo.py` and `ppo_continuous_action.py`: "
        "`SyncVectorEnv`, tensors `[T, n]`, GAE in a loop over time, minibatches by index; "
        "without its normalising wrappers",
        _made("loop_peers", "CleanRLStyle"),
    ),
    PPOKIT: Contender(
        "`GymCollector`, `GAE`, `DualClipPPOLoss`, `PPOUpdate` and `Adam(fused=True)`, eager",
        _made("loop_torchrl", "Ppokit"),
    ),
    COLLECTOR: Contender(
        "the same with the tutorial's environments and `Collector`, `TensorActor` around its "
        "policy and `auto_register_policy_transforms=False`",
        _made("loop_torchrl", "Ppokit", torchrl_collector=True),
    ),
    COMPILED: Contender(
        "as ppokit, with `TrainingStep(compile=True)` and `compile_policy=True`: loss, backward, "
        "clipping and Adam are one graph, network, draw and log-probability another",
        _made("loop_torchrl", "Ppokit", compiled=True),
    ),
}
