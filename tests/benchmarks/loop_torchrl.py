"""The loop of TorchRL's PPO tutorial, and ppokit's, on the same networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymEnv,
    ObservationNorm,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TensorActor, TrainingStep
from tests.benchmarks import loop_tasks as config
from tests.benchmarks.networks import actor_and_critic

LOSS: dict[str, Any] = {
    "clip_epsilon": config.CLIP,
    "entropy_coeff": config.ENTROPY,
    "critic_coeff": 1.0,
    "loss_critic_type": "smooth_l1",
}
ADVANTAGE: Any = {"gamma": config.GAMMA, "lmbda": config.LMBDA, "average_gae": True}
RANDOM_STEPS = 1_000  # for the statistics of the observations


class Tutorial:
    """TorchRL's tutorial, without its evaluations and its progress bar.

    ``exchanged`` replaces its step by a compiled ``TrainingStep``. The learning rate falls over
    ``updates``; ``transforms`` are further ones of the environment.
    """

    def __init__(
        self,
        task: config.Task,
        seed: int,
        *,
        exchanged: bool = False,
        networks: Any = None,
        updates: int = 1_000,
        transforms: tuple[Transform, ...] = (),
    ) -> None:
        self.task = task
        actor, critic = networks or actor_and_critic(task.env, task.hidden)
        self.advantage = TorchRLGAE(value_network=critic, **ADVANTAGE)
        self.loss: Any = ClipPPOLoss(actor, critic, functional=not exchanged, **LOSS)
        self.parameters = list(self.loss.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.LEARNING_RATE)
        self.step = None
        if exchanged:
            self.step = TrainingStep(
                self.loss, self.optimizer, max_grad_norm=config.MAX_GRAD_NORM, compile=True
            )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, updates, 0.0)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(task.frames), sampler=SamplerWithoutReplacement()
        )
        self.env = transformed_env(task, seed, *transforms)
        options: Any = {"frames_per_batch": task.frames, "total_frames": -1, "split_trajs": False}
        own = {"auto_register_policy_transforms": False}
        self.collector = Collector(self.env, actor, **options, **own)
        self.batches = iter(self.collector)

    def run(self) -> None:
        self.train(next(self.batches))

    def train(self, batch: Any) -> Any:
        """Return the losses of the last minibatch."""
        losses: Any = None
        for _ in range(self.task.epochs):
            self.advantage(batch)
            self.buffer.extend(batch.reshape(-1))
            for _ in range(self.task.steps // self.task.epochs):
                minibatch = self.buffer.sample(config.MINIBATCH)
                if self.step is not None:
                    losses = self.step(minibatch)
                    continue
                losses = self.loss(minibatch)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, config.MAX_GRAD_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.mean_reward = batch["next", "reward"].mean().item()
        self.longest = batch["step_count"].max().item()
        self.schedule.step()
        return losses


class Ppokit:
    """ppokit's collector, or torchrl's, and ppokit's update."""

    def __init__(
        self,
        task: config.Task,
        seed: int,
        *,
        torchrl_collector: bool = False,
        compiled: bool = False,
    ) -> None:
        actor, critic = actor_and_critic(task.env, task.hidden)
        loss: Any = DualClipPPOLoss(actor, critic, dual_clip=config.DUAL_CLIP, **LOSS)
        self.optimizer = torch.optim.Adam(loss.parameters(), lr=config.LEARNING_RATE, fused=True)
        self.update: Any = PPOUpdate(
            TrainingStep(
                loss, self.optimizer, max_grad_norm=config.MAX_GRAD_NORM, compile=compiled
            ),
            advantage=GAE(value_network=critic, **ADVANTAGE),
            epochs=task.epochs,
            minibatch_size=config.MINIBATCH,
            seed=seed,
        )
        options: Any = {"frames_per_batch": task.frames, "total_frames": -1}
        if torchrl_collector:
            env, policy = transformed_env(task, seed), TensorActor(actor)
            own = {"auto_register_policy_transforms": False}
            self.batches = iter(Collector(env, policy, **options, **own))
        else:
            options |= {"categorical_action_encoding": True, "compile_policy": compiled}
            collector = GymCollector(task.env, actor, num_envs=task.num_envs, **options)
            collector.set_seed(seed)
            self.batches = iter(collector)

    def run(self) -> None:
        self.update(next(self.batches))


def transformed_env(task: config.Task, seed: int, *transforms: Transform) -> TransformedEnv:
    make = partial(GymEnv, task.env, categorical_action_encoding=True)
    # GymEnv(num_envs=n) would spend a frame on each reset
    env = make() if task.num_envs == 1 else SerialEnv(task.num_envs, make)
    norm = ObservationNorm(in_keys=["observation"])
    env = TransformedEnv(env, Compose(norm, DoubleToFloat(), StepCounter(), *transforms))
    env.set_seed(seed)
    time_dim = len(env.batch_size)
    steps = RANDOM_STEPS // task.num_envs
    norm.init_stats(num_iter=steps, reduce_dim=tuple(range(time_dim + 1)), cat_dim=time_dim)
    return env
