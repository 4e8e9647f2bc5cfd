"""The runs of the MuJoCo benchmark and of the search for its setting."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks import learning_arms
from tests.benchmarks.learning_arms import evaluate, make_env
from tests.benchmarks.report import commit
from tests.benchmarks.sb3 import make_ppo

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5")
TASKS += ("Reacher-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5")
SB3 = "Stable-Baselines3"
GAMMA, LMBDA, CLIP, CRITIC, LEARNING_RATE = 0.99, 0.95, 0.2, 0.25, 3e-4
FRAMES_PER_BATCH, MINIBATCH, EPOCHS, MAX_GRAD_NORM = 2_048, 64, 10, 0.5
EVALUATE_EVERY = 20  # batches
CURVE_EPISODES, FINAL_EPISODES = 10, 20

OPTIONS: dict[str, dict[str, Any]] = {
    "classic setting": {},
    "recomputed advantages": {"recompute": True},
    "KL stop at 0.03": {"target_kl": 0.02},
    "adaptive learning rate": {"adaptive": True},
    "layer norm": {"layer_norm": True},
    "value network of 2x256": {"critic_hidden": (256, 256)},
    "8 environments of 256 frames": {"num_envs": 8},
}
CHOSEN = "recomputed advantages"


class Ppokit(learning_arms.Ppokit):
    """The setting of ``tutorials/mujoco_ppo.py``, with the options of the search."""

    def __init__(
        self,
        task: str,
        seed: int,
        frames: int,
        *,
        recompute: bool = False,
        target_kl: float | None = None,
        adaptive: bool = False,
        layer_norm: bool = False,
        critic_hidden: tuple[int, ...] | None = None,
        num_envs: int = 1,
    ) -> None:
        torch.manual_seed(seed)
        env = make_env(task)
        self.policy, critic = actor_critic(env, critic_hidden=critic_hidden)
        if layer_norm:
            for network in (self.policy, critic):
                add_layer_norm(network)
        self.standardize = ppokit.ObservationNormalizer(env.observation_space.shape or ())
        env.close()
        self.collector = ppokit.GymCollector(
            partial(make_env, task),
            self.policy,
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=frames,
            num_envs=num_envs,
            observation_transform=self.standardize,
            compile_policy=True,
            episode_reward=True,
        )
        self.collector.set_seed(seed)
        loss = ppokit.DualClipPPOLoss(
            self.policy,
            critic,
            clip_epsilon=CLIP,
            entropy_bonus=False,
            critic_coeff=CRITIC,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
        falling: Any = ppokit.InterpSchedule([(0, LEARNING_RATE), (frames, 0.0)])
        more: dict[str, Any] = {
            "scheduler": ppokit.ParameterScheduler({"lr": (optimizer, falling)})
        }
        if adaptive:
            more = {"adaptive_kl": ppokit.AdaptiveLearningRate(optimizer)}
        stopper = None if target_kl is None else ppokit.KLEarlyStopper(target_kl)
        step = ppokit.TrainingStep(
            loss, optimizer, max_grad_norm=MAX_GRAD_NORM, stopper=stopper, compile=True
        )
        self.update = ppokit.PPOUpdate(
            step,
            advantage=ppokit.GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic),
            reward_normalizer=ppokit.RewardNormalizer(GAMMA),
            epochs=EPOCHS,
            minibatch_size=MINIBATCH,
            recompute_advantage=recompute,
            seed=seed,
            **more,
        )


def add_layer_norm(network: nn.Module) -> None:
    """Normalize the output of each hidden layer before its activation."""
    for layers in list(network.modules()):
        if isinstance(layers, nn.Sequential):
            for index in reversed(range(len(layers) - 1)):
                if isinstance(layers[index + 1], nn.Tanh):
                    layers.insert(index + 1, nn.LayerNorm(layers[index].out_features))


class StableBaselines3(learning_arms.StableBaselines3):
    """Its ``PPO`` with the same setting, which it has no recomputed advantages for."""

    def __init__(self, task: str, seed: int, frames: int) -> None:
        self.frames = frames
        self.model = make_ppo(
            task,
            1,
            seed=seed,
            hidden=(64, 64),
            normalize=True,
            policy={"log_std_init": -0.5, "optimizer_kwargs": {"eps": 1e-8}},
            n_steps=FRAMES_PER_BATCH,
            batch_size=MINIBATCH,
            n_epochs=EPOCHS,
            gamma=GAMMA,
            gae_lambda=LMBDA,
            learning_rate=lambda remaining: remaining * LEARNING_RATE,
            clip_range=CLIP,
            ent_coef=0.0,
            vf_coef=CRITIC,
            max_grad_norm=MAX_GRAD_NORM,
        )


def make(task: str, arm: str, seed: int, frames: int) -> Any:
    if arm == SB3:
        return StableBaselines3(task, seed, frames)
    option = CHOSEN if arm == "ppokit" else arm.removeprefix("search: ")
    return Ppokit(task, seed, frames, **OPTIONS[option])


def train(task: str, arm: str, seed: int, frames: int) -> dict[str, Any]:
    """Train to the end; return curves of evaluations and training, and the final returns."""
    contender = make(task, arm, seed, frames)
    evaluations, training = [], []
    for number, (so_far, returns) in enumerate(contender.batches(), 1):
        if number % EVALUATE_EVERY and so_far < frames:
            continue
        found = evaluate(task, contender.act, CURVE_EPISODES, 100 + seed)
        evaluations.append((so_far, float(np.mean(found))))
        if returns:
            training.append((so_far, float(np.mean(returns))))
    final = evaluate(task, contender.act, FINAL_EPISODES, seed)
    return {"evaluations": evaluations, "training": training, "final": final}


def time_batches(task: str, arm: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return frames a second after a warm-up of three batches."""
    warm, started = 0, 0.0
    for number, (frames, _) in enumerate(make(task, arm, seed, 10**9).batches(), 1):
        if number == 3:
            warm, started = frames, time.perf_counter()
        elif number > 3 and (passed := time.perf_counter() - started) > seconds:
            return {"frames_per_second": (frames - warm) / passed}
    raise AssertionError


def run(
    task: str, arm: str, seed: int, frames: int, seconds: float | None = None
) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    started = {"commit": commit()}
    if seconds is None:
        return started | train(task, arm, seed, frames)
    return started | time_batches(task, arm, seed, seconds)
