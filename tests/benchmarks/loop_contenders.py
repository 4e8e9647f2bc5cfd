"""Who takes part in the benchmark of whole training loops, and what they train.

Nothing here imports torch: a process imports what its own contender needs, for all that is there
slows the garbage collector down, and with it the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

MINIBATCH = 64  # frames
GAMMA, LMBDA = 0.99, 0.95
CLIP, DUAL_CLIP, ENTROPY = 0.2, 5.0, 1e-4  # the tutorial's
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0

TUTORIAL, SB3, CLEANRL = "TorchRL's tutorial", "Stable-Baselines3", "CleanRL-style"
EXCHANGED = "TorchRL's tutorial, our step"
PPOKIT, COLLECTOR, COMPILED = "ppokit", "ppokit, torchrl's Collector", "ppokit, compiled"
FLOOR = "floor"

PARTS = (
    *("collect", "advantage", "sample", "loss", "backward", "clip", "optimiser"),
    *("compiled step", "rest"),
)
FLOOR_PARTS = ("environment", "acting", "networks", "clip", "optimiser")


@dataclass(frozen=True)
class Task:
    """What is trained, and on how much."""

    env: str
    num_envs: int
    frames: int  #: of a batch
    layers: int = 3  #: hidden ones of actor and critic
    width: int = 256  #: of each
    epochs: int = 10

    @property
    def name(self) -> str:
        """Environment, how many of it, and the networks."""
        count = f"{self.num_envs} environment{'s' if self.num_envs > 1 else ''}"
        return f"{self.env}, {count}, {self.layers}x{self.width}"

    @property
    def steps(self) -> int:
        """Of the optimiser, in a batch: the last minibatch of an epoch may be smaller."""
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
class Job:
    """One process: one contender, one task, one seed."""

    task: Task
    contender: str
    round: int  #: and seed
    seconds: float  #: of timing, at least
    seconds_in_parts: float  #: of timing the parts, at least

    @property
    def file(self) -> str:
        """Where the result goes."""
        words = f"{self.task.name} {self.contender} {self.round}"
        return re.sub("[^a-z0-9]+", "-", words.lower()) + ".json"


class Loop(Protocol):
    """A training loop, from the inside of which the time of its parts can be had."""

    optimizer: Any

    def run(self) -> None:
        """Collect one batch, and train on it."""
        ...

    def instrument(self, clock: Any) -> None:
        """Have the clock charge what is done to :data:`PARTS`, from here on."""
        ...


@dataclass(frozen=True)
class Contender:
    """How to make a loop for a task and a seed, and what is said of it."""

    about: str
    make: Callable[[Task, int], Loop]
    package: str | None = None  #: what has to be installed, by its distribution's name

    @property
    def is_there(self) -> bool:
        """Whether it can take part."""
        return self.package is None or find_spec(self.package.replace("-", "_")) is not None


def _tutorial(**options: bool) -> Callable[[Task, int], Loop]:
    def make(task: Task, seed: int) -> Loop:
        from tests.benchmarks.loop_torchrl import Tutorial

        return Tutorial(task, seed, **options)

    return make


def _stable_baselines3(task: Task, seed: int) -> Loop:
    from tests.benchmarks.loop_peers import StableBaselines3

    return StableBaselines3(task, seed)


def _cleanrl(task: Task, seed: int) -> Loop:
    from tests.benchmarks.loop_peers import CleanRLStyle

    return CleanRLStyle(task, seed)


def _ppokit(**options: bool) -> Callable[[Task, int], Loop]:
    def make(task: Task, seed: int) -> Loop:
        from tests.benchmarks.loop_torchrl import Ppokit

        return Ppokit(task, seed, **options)

    return make


CONTENDERS = {
    TUTORIAL: Contender(
        "the loop of TorchRL's PPO tutorial: `Collector` over a `TransformedEnv` of `GymEnv` (of "
        "`SerialEnv` for several) with `ObservationNorm`, `DoubleToFloat` and `StepCounter`; GAE "
        "anew in each epoch, `ReplayBuffer`, `ClipPPOLoss`, cosine schedule. It sees every frame "
        "of a batch in each epoch, where the tutorial leaves the last 40 of 1,000 out",
        _tutorial(),
    ),
    EXCHANGED: Contender(
        "the same on the same pieces, but for `TrainingStep(compile=True)` in place of loss, "
        "backward, clipping and optimiser step, and `ClipPPOLoss(functional=False)`",
        _tutorial(exchanged=True),
    ),
    SB3: Contender(
        "`PPO`, `MlpPolicy`, `DummyVecEnv`; one call of `learn` a batch",
        _stable_baselines3,
        "stable-baselines3",
    ),
    CLEANRL: Contender(
        "written here in the way of CleanRL's `ppo.py` and `ppo_continuous_action.py`: "
        "`SyncVectorEnv`, tensors `[T, n]`, GAE in a loop over time, minibatches by index; "
        "without its normalising wrappers",
        _cleanrl,
    ),
    PPOKIT: Contender(
        "`GymCollector`, `GAE`, `DualClipPPOLoss`, `PPOUpdate` and `Adam(fused=True)`, eager",
        _ppokit(),
    ),
    COLLECTOR: Contender(
        "the same with the tutorial's environments and `Collector`, `TensorActor` around its "
        "policy and `auto_register_policy_transforms=False`",
        _ppokit(torchrl_collector=True),
    ),
    COMPILED: Contender(
        "as ppokit, with `TrainingStep(compile=True)` and `compile_policy=True`: loss, backward, "
        "clipping and Adam are one graph, network, draw and log-probability another",
        _ppokit(compiled=True),
    ),
}
