"""One training run of the learning benchmark, by ppokit's blocks or by Stable-Baselines3.

``python -m tests.benchmarks.learning_arms JOB FILE`` runs one and writes its result; it prints the
frames so far, a number a line.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
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

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    ObservationNormalizer,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
)
from tests.benchmarks.learning_tasks import TASKS, Task

EVALUATION_EPISODES = 20
ROWS = 50  # of a curve that are kept
Act = Callable[[np.ndarray], np.ndarray]
Batches = Iterator[tuple[int, list[float]]]
"""Frames so far, and returns of the last episodes, at most 100, after each batch."""


def mlp(inputs: int, outputs: int, task: Task, last_gain: float) -> nn.Sequential:
    """Return a network with the layers and the initial weights that Stable-Baselines3 has."""
    activation = getattr(nn, task.activation)
    first, second = task.cells
    linear = nn.Linear(inputs, first), nn.Linear(first, second), nn.Linear(second, outputs)
    if task.is_orthogonal:
        for layer, gain in zip(linear, (2**0.5, 2**0.5, last_gain), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], activation(), linear[1], activation(), linear[2])


class Ppokit:
    """The assembly of ppokit's blocks."""

    def __init__(self, task: Task, seed: int, *, compiled: bool = False) -> None:
        torch.manual_seed(seed)
        env = gym.make(task.env)
        observations, actions = env.observation_space, env.action_space
        env.close()
        assert observations.shape is not None
        inputs = observations.shape[0]
        if isinstance(actions, gym.spaces.Discrete):
            network: nn.Module = mlp(inputs, int(actions.n), task, 0.01)
            keys, distribution = ["logits"], torch.distributions.Categorical
        else:
            assert actions.shape is not None
            scale = AddStateIndependentNormalScale(actions.shape[0], init_value=task.log_std)
            network = nn.Sequential(mlp(inputs, actions.shape[0], task, 0.01), scale)
            keys, distribution = ["loc", "scale"], IndependentNormal
        self.policy = ProbabilisticActor(
            TensorDictModule(network, ["observation"], keys),
            in_keys=keys,
            distribution_class=distribution,
            return_log_prob=True,
        )
        critic = ValueOperator(mlp(inputs, 1, task, 1.0), in_keys=["observation"])
        self.standardize = ObservationNormalizer(inputs) if task.normalizes else None
        self.collector = GymCollector(
            partial(make_env, task.env),
            self.policy,
            frames_per_batch=task.batch,
            total_frames=task.frames,
            num_envs=task.num_envs,
            observation_transform=self.standardize,
            categorical_action_encoding=True,
            compile_policy=compiled,
            episode_reward=True,
        )
        self.collector.set_seed(seed)
        loss = DualClipPPOLoss(
            self.policy,
            critic,
            clip_epsilon=task.clip,
            entropy_bonus=task.entropy > 0,
            entropy_coeff=task.entropy,
            critic_coeff=task.critic,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        optimizer = torch.optim.Adam(loss.parameters(), lr=task.learning_rate, eps=1e-5, fused=True)
        scheduler = None
        if task.is_linear:
            to_zero = partial(InterpSchedule.linear, end=0.0, frames=task.frames)
            scheduler = ParameterScheduler(
                {
                    "lr": (optimizer, to_zero(task.learning_rate)),
                    "clip_epsilon": (loss, to_zero(task.clip)),
                }
            )
        self.update = PPOUpdate(
            TrainingStep(loss, optimizer, max_grad_norm=task.max_grad_norm, compile=compiled),
            advantage=GAE(gamma=task.gamma, lmbda=task.lmbda, value_network=critic),
            reward_normalizer=RewardNormalizer(task.gamma) if task.normalizes else None,
            scheduler=scheduler,
            epochs=task.epochs,
            minibatch_size=task.minibatch,
            seed=seed,
        )

    def batches(self) -> Batches:
        """Train, a batch at a time."""
        returns: deque[float] = deque(maxlen=100)
        frames = 0
        for batch in self.collector:
            ended = batch["next", "done"]
            returns += batch["next", "episode_reward"][ended].tolist()
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


class StableBaselines3:
    """Its ``PPO``, with ``VecNormalize`` where the zoo has it."""

    def __init__(self, task: Task, seed: int) -> None:
        make_vec_env = import_module("stable_baselines3.common.env_util").make_vec_env
        # By default its environments render, and LunarLander simulates sparks then: 5 times slower.
        drawn = {"render_mode": None}
        env = make_vec_env(task.env, task.num_envs, seed=seed, env_kwargs=drawn)
        self.standardize = None
        if task.normalizes:
            vec_normalize = import_module("stable_baselines3.common.vec_env").VecNormalize
            env = self.standardize = vec_normalize(env, gamma=task.gamma)
        layers = list(task.cells)
        policy: dict[str, Any] = {
            "net_arch": {"pi": layers, "vf": layers},
            "activation_fn": getattr(nn, task.activation),
            "ortho_init": task.is_orthogonal,
            "log_std_init": task.log_std,
        }

        def falling(value: float) -> Any:
            return (lambda remaining: remaining * value) if task.is_linear else value

        self.frames = task.frames
        self.model = import_module("stable_baselines3").PPO(
            "MlpPolicy",
            env,
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
            policy_kwargs=policy,
            seed=seed,
            device="cpu",
        )

    def batches(self) -> Batches:
        """Train, a batch at a time: what its ``learn`` does."""
        model = self.model
        total, callback = model._setup_learn(self.frames)
        while model.num_timesteps < total:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
            model._update_current_progress_remaining(model.num_timesteps, total)
            model.train()
            yield model.num_timesteps, [float(x["r"]) for x in model.ep_info_buffer]

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Return the most probable actions."""
        if self.standardize is not None:
            observation = self.standardize.normalize_obs(observation)
        return self.model.predict(observation, deterministic=True)[0]


ARMS: dict[str, Any] = {
    "ppokit": Ppokit,
    "ppokit, compiled": partial(Ppokit, compiled=True),
    "Stable-Baselines3": StableBaselines3,
}


def make_env(env_id: str) -> gym.Env:
    """Make an environment that clips actions to their range, as Stable-Baselines3 does."""
    env = gym.make(env_id)
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env


def evaluate(env_id: str, act: Act, episodes: int, seed: int) -> list[float]:
    """Return the raw returns of episodes under the deterministic policy.

    Both arms start from what ``seed`` draws, and each training seed from its own starts: with the
    same ones for all of them, an interval over seeds would leave out how hard the starts are.
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
    """Train and evaluate; return curve, seconds of training and final returns."""
    torch.set_num_threads(1)
    contender = ARMS[arm](task, seed)
    number = -(-task.frames // task.batch)
    kept = set(np.unique(np.linspace(0, number - 1, min(ROWS, number)).round().astype(int)))
    curve: list[tuple[int, float, float | None]] = []
    started = time.perf_counter()
    for index, (frames, returns) in enumerate(contender.batches()):
        if index in kept:
            seconds = time.perf_counter() - started
            curve.append((frames, seconds, float(np.mean(returns)) if returns else None))
            print(frames, flush=True)
    seconds = time.perf_counter() - started
    final = evaluate(task.env, contender.act, EVALUATION_EPISODES, seed)
    return {"curve": curve, "seconds": seconds, "final": final}


def time_batches(task: Task, arm: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return frames a second of training, without the first batches."""
    torch.set_num_threads(1)
    contender = ARMS[arm](task, seed)
    batches = contender.batches()
    warm, started = -1, time.perf_counter()
    for frames, _ in batches:
        now = time.perf_counter()
        if warm < 0 and now - started > min(2.0, seconds / 4):
            warm, started = frames, now
        elif warm >= 0 and now - started > seconds:
            return {"frames_per_second": (frames - warm) / (now - started)}
    raise RuntimeError(f"{task.env} ended before {seconds:.0f} s were over.")


def main() -> None:
    job = json.loads(sys.argv[1])
    file = Path(sys.argv[2])
    seconds = job.pop("seconds", None)
    frames = job.pop("frames", None)
    task = TASKS[job.pop("task")]
    if frames is not None:
        task = Task(**{**vars(task), "frames": frames})
    run = train if seconds is None else partial(time_batches, seconds=seconds)
    result = run(task, **job)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(file)


if __name__ == "__main__":
    main()
