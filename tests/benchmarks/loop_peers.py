"""The training loops of Stable-Baselines3, and one in CleanRL's style."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import ClipAction, RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from tests.benchmarks import loop_tasks as config
from tests.benchmarks.networks import mlp, spaces_of
from tests.benchmarks.sb3 import make_ppo


class StableBaselines3:
    """Its PPO with the settings of the others, and its own optimizer and losses."""

    def __init__(self, task: config.Task, seed: int) -> None:
        self.frames = task.frames
        self.model = make_ppo(
            task.env,
            task.num_envs,
            seed=seed,
            hidden=task.hidden,
            n_steps=task.frames // task.num_envs,
            batch_size=config.MINIBATCH,
            n_epochs=task.epochs,
            learning_rate=config.LEARNING_RATE,
            gamma=config.GAMMA,
            gae_lambda=config.LMBDA,
            clip_range=config.CLIP,
            ent_coef=config.ENTROPY,
            max_grad_norm=config.MAX_GRAD_NORM,
        )
        self.optimizer = self.model.policy.optimizer

    def run(self) -> None:
        self.model.learn(self.frames, reset_num_timesteps=False)


class CleanRLStyle:
    """CleanRL's single file of plain torch, in its order."""

    def __init__(self, task: config.Task, seed: int) -> None:
        self.task, self.length = task, task.frames // task.num_envs
        makers = [partial(_make_env, task.env)] * task.num_envs
        self.envs: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.agent = Agent(task)
        self.optimizer = torch.optim.Adam(
            self.agent.parameters(), lr=config.LEARNING_RATE, eps=1e-5
        )
        rows = self.length, task.num_envs
        self.observations = torch.zeros(rows + self.envs.single_observation_space.shape)
        self.actions = torch.zeros(rows + self.envs.single_action_space.shape)
        self.log_probs, self.rewards, self.dones, self.values = torch.zeros(4, *rows)
        self.observation = torch.Tensor(self.envs.reset(seed=seed)[0])
        self.done = torch.zeros(task.num_envs)
        self.random = np.random.default_rng(seed)
        self.returns: list[float] = []

    def run(self) -> None:
        self.collect()
        advantages = self.advantages()
        stored = self.observations, self.actions, self.log_probs, self.values
        flat = [x.flatten(0, 1) for x in (*stored, advantages, advantages + self.values)]
        clip_fractions: list[float] = []
        for _ in range(self.task.epochs):
            for minibatch in self.minibatches(flat):
                loss = self.loss(minibatch, clip_fractions)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), config.MAX_GRAD_NORM)
                self.optimizer.step()
        predicted, true = self.values.flatten().numpy(), flat[-1].numpy()
        self.explained_variance = 1 - np.var(true - predicted) / max(np.var(true), 1e-8)

    def collect(self) -> None:
        for step in range(self.length):
            self.observations[step] = self.observation
            self.dones[step] = self.done
            with torch.no_grad():
                action, log_prob, _, value = self.agent(self.observation)
                self.values[step] = value.flatten()
            self.actions[step] = action
            self.log_probs[step] = log_prob
            observation, reward, terminated, truncated, info = self.envs.step(action.cpu().numpy())
            self.rewards[step] = torch.tensor(reward).view(-1)
            self.observation = torch.Tensor(observation)
            self.done = torch.Tensor(np.logical_or(terminated, truncated))
            if "final_info" in info:
                ended = info["final_info"]["episode"]
                self.returns += ended["r"][ended["_r"]].tolist()

    @torch.no_grad()
    def advantages(self) -> Tensor:
        """Return GAE ``[T, n]``."""
        following = self.agent.critic(self.observation).flatten()
        last, advantages = torch.zeros(self.task.num_envs), torch.zeros_like(self.rewards)
        goes_on = 1.0 - self.done
        for t in reversed(range(self.length)):
            delta = self.rewards[t] + config.GAMMA * following * goes_on - self.values[t]
            advantages[t] = last = delta + config.GAMMA * config.LMBDA * goes_on * last
            following, goes_on = self.values[t], 1.0 - self.dones[t]
        return advantages

    def minibatches(self, flat: list[Tensor]) -> Iterator[list[Tensor]]:
        order = np.arange(self.task.frames)
        self.random.shuffle(order)
        for start in range(0, self.task.frames, config.MINIBATCH):
            rows = order[start : start + config.MINIBATCH]
            yield [x[rows] for x in flat]

    def loss(self, minibatch: list[Tensor], clip_fractions: list[float]) -> Tensor:
        observation, action, old_log_prob, old_value, advantage, target = minibatch
        _, log_prob, entropy, value = self.agent(observation, action)
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.exp()
        with torch.no_grad():
            self.old_approx_kl = (-log_ratio).mean()
            self.approx_kl = ((ratio - 1) - log_ratio).mean()
            clip_fractions.append(((ratio - 1.0).abs() > config.CLIP).float().mean().item())
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        first = -advantage * ratio
        second = -advantage * torch.clamp(ratio, 1 - config.CLIP, 1 + config.CLIP)
        value = value.view(-1)
        clipped = old_value + torch.clamp(value - old_value, -config.CLIP, config.CLIP)
        of_value = torch.max((value - target) ** 2, (clipped - target) ** 2)
        of_policy = torch.max(first, second).mean()
        return of_policy - config.ENTROPY * entropy.mean() + 0.5 * 0.5 * of_value.mean()


class Agent(nn.Module):
    """Actor and critic; a Box has a standard deviation that does not depend on the state."""

    def __init__(self, task: config.Task) -> None:
        super().__init__()
        observations, actions = spaces_of(task.env)
        inputs, size = observations.shape[0], gym.spaces.flatdim(actions)
        self.actor, self.critic = (mlp(inputs, n, task.hidden) for n in (size, 1))
        is_box = isinstance(actions, gym.spaces.Box)
        self.log_std = nn.Parameter(torch.zeros(1, size)) if is_box else None

    def forward(
        self, observation: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        outputs = self.actor(observation)
        if self.log_std is None:
            choice = Categorical(logits=outputs)
            action = choice.sample() if action is None else action
            return action, choice.log_prob(action), choice.entropy(), self.critic(observation)
        normal = Normal(outputs, self.log_std.expand_as(outputs).exp())
        action = normal.sample() if action is None else action
        log_prob, entropy = normal.log_prob(action).sum(1), normal.entropy().sum(1)
        return action, log_prob, entropy, self.critic(observation)


def _make_env(env_id: str) -> gym.Env:
    env = RecordEpisodeStatistics(gym.make(env_id))
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env
