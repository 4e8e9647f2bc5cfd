"""Tasks and contenders of the benchmark of whole training loops, their timing, and their floor.

The floor is environment, networks and optimizer, each timed alone. The process of a contender
imports no other contender, because every imported module slows the garbage collector down.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from tests.benchmarks.networks import mlp, spaces_of
from tests.benchmarks.timing import Call, interleave

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
ACTIONS = 4_096  # drawn beforehand
IN_A_ROW = "in a row"


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


CONTENDERS: dict[str, tuple[str, ...]] = {
    TUTORIAL: (
        "the loop of TorchRL's PPO tutorial: `Collector` over a `TransformedEnv` of `GymEnv` (of "
        "`SerialEnv` for several) with `ObservationNorm`, `DoubleToFloat` and `StepCounter`; GAE "
        "again in each epoch, `ReplayBuffer`, `ClipPPOLoss`, cosine schedule. It trains on every "
        "frame of a batch, where the tutorial leaves out the last 40 of 1,000",
        "loop_torchrl.Tutorial",
    ),
    EXCHANGED: (
        "the same, with `TrainingStep(compile=True)` in place of loss, "
        "backward, clipping and optimizer step, and `ClipPPOLoss(functional=False)`",
        "loop_torchrl.Tutorial",
        "exchanged",
    ),
    SB3: (
        "`PPO`, `MlpPolicy`, `DummyVecEnv`; one call of `learn` a batch",
        "loop_peers.StableBaselines3",
    ),
    CLEANRL: (
        "written in the style of CleanRL's `ppo.py` and `ppo_continuous_action.py`: "
        "`SyncVectorEnv`, tensors `[T, n]`, GAE in a loop over time, minibatches by index; "
        "without its normalising wrappers",
        "loop_peers.CleanRLStyle",
    ),
    PPOKIT: (
        "`GymCollector`, `GAE`, `DualClipPPOLoss`, `PPOUpdate` and `Adam(fused=True)`, eager",
        "loop_torchrl.Ppokit",
    ),
    COLLECTOR: (
        "the same with the tutorial's environments and `Collector`, `TensorActor` around its "
        "policy and `auto_register_policy_transforms=False`",
        "loop_torchrl.Ppokit",
        "torchrl_collector",
    ),
    COMPILED: (
        "as ppokit, with `TrainingStep(compile=True)` and `compile_policy=True`: loss, backward, "
        "clipping and Adam are one graph, network, draw and log-probability another",
        "loop_torchrl.Ppokit",
        "compiled",
    ),
}
"""The description of each loop; its class, made for a task and a seed; and its options.

A loop has ``run()``, which collects a batch and trains on it, and ``optimizer``.
"""


def measure(task: dict[str, Any], contender: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return frames a second of the loop, and the seconds of its first batch; or the floor."""
    torch.manual_seed(seed)
    size = Task(**task)
    if contender == FLOOR:
        return measure_floor(size, seed, seconds)
    _, path, *options = CONTENDERS[contender]
    module, name = path.split(".")
    make = getattr(import_module(f"tests.benchmarks.{module}"), name)
    loop = make(size, seed, **dict.fromkeys(options, True))
    start = time.perf_counter()
    loop.run()  # first calls allocate, and may compile
    first = time.perf_counter() - start
    whole: list[float] = []
    while len(whole) < FEWEST or sum(whole) < seconds:
        start = time.perf_counter()
        loop.run()
        whole.append(time.perf_counter() - start)
    expected = (1 + len(whole)) * size.steps
    steps = {int(state["step"]) for state in loop.optimizer.state.values()}
    if steps != {expected}:  # as many as the other loops make
        raise RuntimeError(f"{contender} made {steps} optimizer steps instead of {expected}.")
    return {
        "frames_per_second": size.frames * len(whole) / sum(whole),
        "first_batch_seconds": first,
    }


def measure_floor(task: Task, seed: int, seconds: float) -> dict[str, Any]:
    """Return microseconds per frame of each part, and of all training calls in a row."""
    networks, clip, optimizer = _training(task)
    observation = torch.randn(task.num_envs, *spaces_of(task.env)[0].shape)
    calls = {
        "environment": _environment(task, seed),
        "acting": _acting(task, observation),
        "networks": networks,
        "clip": clip,
        "optimizer": optimizer,
        IN_A_ROW: lambda: (networks(), clip(), optimizer()),
    }
    # a sample is many episodes of random actions
    found = {name: Call(run) for name, run in calls.items()}
    timings = interleave(found, seconds=seconds, sample=2e-2)
    calls_a_frame = dict.fromkeys(calls, task.epochs / MINIBATCH)
    calls_a_frame |= dict.fromkeys(("environment", "acting"), 1 / task.num_envs)
    a_frame = {name: 1e6 * x.median * calls_a_frame[name] for name, x in timings.items()}
    in_a_row = a_frame.pop(IN_A_ROW)
    return {"us_per_frame": a_frame, "in_a_row_us_per_frame": in_a_row}


def _actor_and_critic(task: Task) -> tuple[nn.Module, nn.Module]:
    observations, actions = spaces_of(task.env)
    outputs = gym.spaces.flatdim(actions) * (1 if isinstance(actions, gym.spaces.Discrete) else 2)
    inputs = observations.shape[0]
    return mlp(inputs, outputs, task.hidden), mlp(inputs, 1, task.hidden)


def _training(task: Task) -> tuple[Callable[[], Any], ...]:
    """Return forward and backward of both networks; clipping; the optimizer's step."""
    actor, critic = _actor_and_critic(task)
    parameters = [*actor.parameters(), *critic.parameters()]
    observation = torch.randn(MINIBATCH, *spaces_of(task.env)[0].shape)
    # A rate of 0 keeps the weights: thousands of steps in one direction would make them unusual.
    optimizer = torch.optim.Adam(parameters, lr=0.0, fused=True)

    def networks() -> None:
        optimizer.zero_grad()
        (actor(observation).mean() + critic(observation).mean()).backward()

    networks()
    return networks, lambda: nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM), optimizer.step


def _environment(task: Task, seed: int) -> Callable[[], None]:
    envs = [gym.make(task.env) for _ in range(task.num_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=seed + i)
    actions = _actions(envs[0].action_space, seed)

    def step() -> None:
        for env in envs:
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()

    return step


def _actions(space: gym.Space, seed: int) -> Iterator[Any]:
    space.seed(seed)
    drawn = [space.sample() for _ in range(ACTIONS)]
    is_choice = isinstance(space, gym.spaces.Discrete)
    return itertools.cycle([int(action) for action in drawn] if is_choice else drawn)


def _acting(task: Task, observation: Tensor) -> Callable[[], Any]:
    """Return the actor, a draw, and its log-probability: categorical or tanh-normal."""
    actor, _ = _actor_and_critic(task)

    @torch.no_grad()
    def choose() -> tuple[Tensor, Tensor]:
        log_probs = actor(observation).log_softmax(-1)
        action = log_probs.exp().multinomial(1)
        return action, log_probs.gather(-1, action)

    @torch.no_grad()
    def draw() -> tuple[Tensor, Tensor]:
        loc, scale = actor(observation).chunk(2, -1)
        scale = nn.functional.softplus(scale).clamp_min(1e-4)
        noise = torch.randn_like(loc)
        action = torch.tanh(loc + scale * noise)
        slope = torch.log1p(-action.square() + 1e-6)
        log_prob = -0.5 * noise.square() - scale.log() - 0.5 * math.log(2 * math.pi) - slope
        return action, log_prob.sum(-1)

    return choose if isinstance(spaces_of(task.env)[1], gym.spaces.Discrete) else draw
