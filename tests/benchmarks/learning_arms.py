"""The training runs of the learning benchmark, by ppokit's blocks and by Stable-Baselines3."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import ClipAction
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

import ppokit
from tests.benchmarks.learning_tasks import TASKS, Task
from tests.benchmarks.networks import Sizes, mlp
from tests.benchmarks.sb3 import make_ppo

EVALUATION_EPISODES = 20
Act = Callable[[np.ndarray], np.ndarray]
Batches = Iterator[tuple[int, list[float]]]
"""Frames so far, and returns of the last 100 episodes, after each batch."""


def network(inputs: int, outputs: int, task: Task, last_gain: float) -> nn.Sequential:
    """Return a network with the layers and the initial weights of Stable-Baselines3."""
    layers = mlp(inputs, outputs, task.cells, getattr(nn, task.activation))
    if task.is_orthogonal:
        for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return layers


class Ppokit:
    """The assembly of ppokit's blocks."""

    def __init__(self, task: Task, seed: int, *, compiled: bool = False) -> None:
        torch.manual_seed(seed)
        sizes = Sizes.of(task.env)
        layers = network(sizes.observations, sizes.actions, task, 0.01)
        keys, distribution = ["logits"], torch.distributions.Categorical
        if not sizes.is_choice:
            layers.append(AddStateIndependentNormalScale(sizes.actions, init_value=task.log_std))
            keys, distribution = ["loc", "scale"], IndependentNormal
        self.policy = ProbabilisticActor(
            TensorDictModule(layers, ["observation"], keys),
            in_keys=keys,
            distribution_class=distribution,
            return_log_prob=True,
        )
        critic = ValueOperator(network(sizes.observations, 1, task, 1.0), in_keys=["observation"])
        self.standardize = None
        if task.normalizes:
            self.standardize = ppokit.ObservationNormalizer(sizes.observations)
        self.collector = ppokit.GymCollector(
            partial(make_env, task.env),
            self.policy,
            frames_per_batch=task.num_envs * task.steps,
            total_frames=task.frames,
            num_envs=task.num_envs,
            observation_transform=self.standardize,
            categorical_action_encoding=True,
            compile_policy=compiled,
            episode_reward=True,
        )
        self.collector.set_seed(seed)
        self.update = make_update(task, self.policy, critic, seed, compiled)

    def batches(self) -> Batches:
        """Train, a batch at a time."""
        returns: deque[float] = deque(maxlen=100)
        frames = 0
        for batch in self.collector:
            returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
            self.update(batch)
            frames += batch.numel()
            yield frames, list(returns)

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        """Return the most probable actions."""
        batch = TensorDict({"observation": torch.as_tensor(observation)}, [len(observation)])
        if self.standardize is not None:
            batch = self.standardize(batch)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return self.policy(batch.float())["action"].numpy()


def make_update(task: Task, policy: Any, critic: Any, seed: int, compiled: bool) -> Any:
    loss = ppokit.DualClipPPOLoss(
        policy,
        critic,
        clip_epsilon=task.clip,
        entropy_bonus=task.entropy > 0,
        entropy_coeff=task.entropy,
        critic_coeff=task.critic,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=task.learning_rate, eps=1e-5, fused=True)
    values = {"lr": (optimizer, task.learning_rate), "clip_epsilon": (loss, task.clip)}
    falling: Any = {
        name: (target, ppokit.InterpSchedule([(0, value), (task.frames, 0.0)]))
        for name, (target, value) in values.items()
    }
    options: Any = {"max_grad_norm": task.max_grad_norm, "compile": compiled}
    return ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, optimizer, **options),
        advantage=ppokit.GAE(gamma=task.gamma, lmbda=task.lmbda, value_network=critic),
        reward_normalizer=ppokit.RewardNormalizer(task.gamma) if task.normalizes else None,
        scheduler=ppokit.ParameterScheduler(falling) if task.is_linear else None,
        epochs=task.epochs,
        minibatch_size=task.minibatch,
        seed=seed,
    )


class StableBaselines3:
    """Its ``PPO``, with ``VecNormalize`` if the zoo has it."""

    def __init__(self, task: Task, seed: int) -> None:

        def falling(value: float) -> Any:
            return (lambda remaining: remaining * value) if task.is_linear else value

        self.frames = task.frames
        self.model = make_ppo(
            task.env,
            task.num_envs,
            seed=seed,
            hidden=task.cells,
            normalize=task.normalizes,
            policy={
                "activation_fn": getattr(nn, task.activation),
                "ortho_init": task.is_orthogonal,
                "log_std_init": task.log_std,
            },
            n_steps=task.steps,
            batch_size=task.minibatch,
            n_epochs=task.epochs,
            gamma=task.gamma,
            gae_lambda=task.lmbda,
            learning_rate=falling(task.learning_rate),
            clip_range=falling(task.clip),
            ent_coef=task.entropy,
            vf_coef=task.critic,
            max_grad_norm=task.max_grad_norm,
        )

    def batches(self) -> Batches:
        """Train, a batch at a time, as its ``learn`` does."""
        model = self.model
        total, callback = model._setup_learn(self.frames)
        while model.num_timesteps < total:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
            model._update_current_progress_remaining(model.num_timesteps, total)
            model.train()
            yield model.num_timesteps, [float(x["r"]) for x in model.ep_info_buffer]

    def act(self, observation: np.ndarray) -> np.ndarray:
        if (env := self.model.get_vec_normalize_env()) is not None:
            observation = env.normalize_obs(observation)
        return self.model.predict(observation, deterministic=True)[0]


ARMS: dict[str, Any] = {
    "ppokit": Ppokit,
    "ppokit, compiled": partial(Ppokit, compiled=True),
    "Stable-Baselines3": StableBaselines3,
}


def make_env(env_id: str) -> gym.Env:
    """Return an environment that clips actions to their range, as Stable-Baselines3 does."""
    env = gym.make(env_id)
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env


def evaluate(env_id: str, act: Act, episodes: int, seed: int) -> list[float]:
    """Return the raw returns of episodes under the deterministic policy.

    Both arms have the same initial states. Each seed has its own, so that an interval over seeds
    includes their difficulty.
    """
    envs = gym.vector.SyncVectorEnv([partial(make_env, env_id)] * episodes)
    observation, _ = envs.reset(seed=10_000 + 1_000 * seed)
    running, returns = np.ones(episodes, dtype=bool), np.zeros(episodes)
    while running.any():
        observation, reward, terminated, truncated, _ = envs.step(act(observation))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return returns.tolist()


def train(task: Task, arm: str, seed: int) -> dict[str, Any]:
    """Train to the end; return 50 points of the curve, and the final returns."""
    contender = ARMS[arm](task, seed)
    number = -(-task.frames // (task.num_envs * task.steps))
    kept = set(np.linspace(0, number - 1, 50).round().astype(int))
    curve = [
        (frames, float(np.mean(returns)))
        for index, (frames, returns) in enumerate(contender.batches())
        if index in kept and returns
    ]
    return {"curve": curve, "final": evaluate(task.env, contender.act, EVALUATION_EPISODES, seed)}


def time_batches(task: Task, arm: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return frames per second after a warm-up."""
    warm, started = -1, time.perf_counter()
    for frames, _ in ARMS[arm](task, seed).batches():
        now = time.perf_counter()
        if warm < 0 and now - started > min(2.0, seconds / 4):
            warm, started = frames, now
        elif warm >= 0 and now - started > seconds:
            return {"frames_per_second": (frames - warm) / (now - started)}
    raise RuntimeError(f"{task.env} ended before {seconds:.0f} s were over.")


def run(task: str, arm: str, seed: int, frames: int, seconds: float | None) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    settings = Task(**{**vars(TASKS[task]), "frames": frames})
    if seconds is None:
        return train(settings, arm, seed)
    return time_batches(settings, arm, seed, seconds)
