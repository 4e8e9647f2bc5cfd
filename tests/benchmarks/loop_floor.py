"""What no loop can do without: its environment, its networks and its optimiser, each alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from tests.benchmarks.loop_contenders import MAX_GRAD_NORM, MINIBATCH, Job, Task
from tests.benchmarks.loop_peers import Sizes, mlp
from tests.benchmarks.timing import Call, interleave

SAMPLE = 2e-2  # seconds: many episodes of random actions
ACTIONS = 4_096  # drawn beforehand
IN_A_ROW = "in a row"


def measure(job: Job) -> dict[str, Any]:
    """Return microseconds a frame and a call of each part, and of what trains done in a row."""
    task, sizes = job.task, Sizes.of(job.task.env)
    networks, clip, optimiser = _training(task, sizes)
    observation = torch.randn(task.num_envs, sizes.observations)
    calls = {
        "environment": _environment(task, job.round),
        "acting": _acting(_actor(task, sizes), observation, sizes.is_choice),
        "networks": networks,
        "clip": clip,
        "optimiser": optimiser,
        IN_A_ROW: lambda: (networks(), clip(), optimiser()),
    }
    seconds = job.seconds + job.seconds_in_parts
    timings = interleave(
        {name: Call(run) for name, run in calls.items()}, seconds=seconds, sample=SAMPLE
    )
    a_call = {name: 1e6 * timing.median for name, timing in timings.items()}
    calls_a_frame = dict.fromkeys(calls, task.epochs / MINIBATCH)
    calls_a_frame |= dict.fromkeys(("environment", "acting"), 1 / task.num_envs)
    a_frame = {name: us * calls_a_frame[name] for name, us in a_call.items()}
    in_a_row = a_frame.pop(IN_A_ROW)
    return {"us_per_frame": a_frame, "in_a_row_us_per_frame": in_a_row, "us_per_call": a_call}


def _actor(task: Task, sizes: Sizes) -> nn.Module:
    outputs = sizes.actions if sizes.is_choice else 2 * sizes.actions
    return mlp(task, sizes.observations, outputs)


def _training(task: Task, sizes: Sizes) -> tuple[Callable[[], Any], ...]:
    """Return both networks forward and backward from the means of outputs; clipping; the step."""
    actor, critic = _actor(task, sizes), mlp(task, sizes.observations, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    observation = torch.randn(MINIBATCH, sizes.observations)
    # at a rate of 0, else thousands of steps in one direction would leave networks like no other
    optimizer = torch.optim.Adam(parameters, lr=0.0, fused=True)

    def networks() -> None:
        optimizer.zero_grad()
        (actor(observation).mean() + critic(observation).mean()).backward()

    networks()
    return networks, lambda: nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM), optimizer.step


def _environment(task: Task, seed: int) -> Callable[[], None]:
    """Return a step of each environment, with a reset where an episode ends."""
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


def _acting(actor: nn.Module, observation: Tensor, is_choice: bool) -> Callable[[], Any]:
    """Return the actor, a draw, and its log-probability: categorical or tanh-normal."""

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

    return choose if is_choice else draw
