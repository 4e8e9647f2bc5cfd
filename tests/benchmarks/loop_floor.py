"""The floor of a training loop: environment, networks and optimizer, each timed alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from tests.benchmarks.loop_tasks import MAX_GRAD_NORM, MINIBATCH, Task
from tests.benchmarks.networks import mlp, spaces_of
from tests.benchmarks.timing import Call, interleave

ACTIONS = 4_096  # drawn beforehand
IN_A_ROW = "in a row"


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
