"""The loop of TorchRL's PPO tutorial, and ppokit's: the same networks, in TensorDictModules."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
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
    TransformedEnv,
)
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TensorActor, TrainingStep
from tests.benchmarks.loop_clock import Clock
from tests.benchmarks.loop_contenders import (
    CLIP,
    DUAL_CLIP,
    ENTROPY,
    GAMMA,
    LEARNING_RATE,
    LMBDA,
    MAX_GRAD_NORM,
    MINIBATCH,
    Task,
)
from tests.benchmarks.loop_peers import Sizes, mlp

LOSS: dict[str, Any] = {
    "clip_epsilon": CLIP,
    "entropy_coeff": ENTROPY,
    "critic_coeff": 1.0,
    "loss_critic_type": "smooth_l1",
}
RANDOM_STEPS = 1_000  # that the observations' statistics are of


class Tutorial:
    """TorchRL's tutorial, without its evaluations and its progress bar.

    Its step may be exchanged for a compiled one of ours.
    """

    def __init__(self, task: Task, seed: int, *, exchanged: bool = False) -> None:
        self.task = task
        actor, critic = actor_and_critic(task)
        self.advantage = TorchRLGAE(
            gamma=GAMMA, lmbda=LMBDA, value_network=critic, average_gae=True
        )
        self.loss: Any = ClipPPOLoss(actor, critic, functional=not exchanged, **LOSS)
        self.parameters = list(self.loss.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=LEARNING_RATE)
        self.step = None
        if exchanged:
            self.step = TrainingStep(
                self.loss, self.optimizer, max_grad_norm=MAX_GRAD_NORM, compile=True
            )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1_000, 0.0)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(task.frames), sampler=SamplerWithoutReplacement()
        )
        env = transformed_env(task, seed)
        options: Any = {"frames_per_batch": task.frames, "total_frames": -1, "split_trajs": False}
        self.batches = iter(Collector(env, actor, **options))

    def collect(self) -> Any:
        """Return the next batch."""
        return next(self.batches)

    def run(self) -> None:
        """Collect one batch, and train on it."""
        batch = self.collect()
        for _ in range(self.task.epochs):
            self.advantage(batch)
            self.buffer.extend(batch.reshape(-1))
            for _ in range(self.task.steps // self.task.epochs):
                minibatch = self.buffer.sample(MINIBATCH)
                if self.step is not None:
                    self.step(minibatch)
                    continue
                losses = self.loss(minibatch)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.mean_reward = batch["next", "reward"].mean().item()
        self.longest = batch["step_count"].max().item()
        self.schedule.step()

    def instrument(self, clock: Clock) -> None:
        """Have the clock tell the parts apart; of a compiled step there are none."""
        if self.step is None:
            clock.wrap_training(self.optimizer)
            clock.wrap(self, "loss", "loss")
        else:
            clock.wrap(self, "step", "compiled step")
        for name in ("collect", "advantage"):
            clock.wrap(self, name, name)
        for name in ("extend", "sample"):
            clock.wrap(self.buffer, name, "sample")


class Ppokit:
    """ppokit's collector, or torchrl's, and ppokit's update."""

    def __init__(
        self, task: Task, seed: int, *, torchrl_collector: bool = False, compiled: bool = False
    ) -> None:
        actor, critic = actor_and_critic(task)
        loss: Any = DualClipPPOLoss(actor, critic, dual_clip=DUAL_CLIP, **LOSS)
        self.optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
        self.update: Any = PPOUpdate(
            TrainingStep(loss, self.optimizer, max_grad_norm=MAX_GRAD_NORM, compile=compiled),
            advantage=GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic, average_gae=True),
            epochs=task.epochs,
            minibatch_size=MINIBATCH,
            seed=seed,
        )
        if torchrl_collector:
            self.batches = iter(_torchrl_collector(task, actor, seed))
        else:
            self.batches = iter(_gym_collector(task, actor, seed, compiled=compiled))

    def collect(self) -> Any:
        """Return the next batch."""
        return next(self.batches)

    def run(self) -> None:
        """Collect one batch, and train on it."""
        self.statistics = self.update(self.collect())

    def instrument(self, clock: Clock) -> None:
        """Have the clock tell the parts apart; of a compiled step there are none.

        All of an eager step but the optimiser's is clipping.
        """
        update, training = self.update, self.update.step
        clock.wrap(self, "collect", "collect")
        clock.wrap(update, "advantage", "advantage")
        clock.wrap(update, "_elements", "sample")
        draw = update.minibatches.epoch
        update.minibatches.epoch = clock.timed(lambda *args: list(draw(*args)), "sample")
        if training.graphs is not None:
            clock.wrap(training, "train_on", "compiled step")
            return
        parts = {"losses_of": "loss", "backward": "backward", "apply_gradients": "clip"}
        for name, part in parts.items():
            clock.wrap(training, name, part)
        for name in ("step", "zero_grad"):
            clock.wrap(self.optimizer, name, "optimiser")


def actor_and_critic(task: Task) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return the tutorial's networks, categorical for choices."""
    sizes = Sizes.of(task.env)
    critic = ValueOperator(mlp(task, sizes.observations, 1), in_keys=["observation"])
    if sizes.is_choice:
        network, keys = mlp(task, sizes.observations, sizes.actions), ["logits"]
        distribution: dict[str, Any] = {"distribution_class": torch.distributions.Categorical}
    else:
        network = nn.Sequential(
            mlp(task, sizes.observations, 2 * sizes.actions), NormalParamExtractor()
        )
        keys, space = ["loc", "scale"], gym.make(task.env).action_space
        bounds = {name: torch.as_tensor(getattr(space, name)) for name in ("low", "high")}
        distribution = {"distribution_class": TanhNormal, "distribution_kwargs": bounds}
    module = TensorDictModule(network, in_keys=["observation"], out_keys=keys)
    return ProbabilisticActor(module, in_keys=keys, return_log_prob=True, **distribution), critic


def transformed_env(task: Task, seed: int) -> TransformedEnv:
    """Return the tutorial's environment, or several of them that step one after the other."""
    make = partial(GymEnv, task.env, categorical_action_encoding=True)
    # GymEnv(num_envs=n) would spend a frame on each reset
    env = make() if task.num_envs == 1 else SerialEnv(task.num_envs, make)
    norm = ObservationNorm(in_keys=["observation"])
    env = TransformedEnv(env, Compose(norm, DoubleToFloat(), StepCounter()))
    env.set_seed(seed)
    time_dim = len(env.batch_size)
    steps = RANDOM_STEPS // task.num_envs
    norm.init_stats(num_iter=steps, reduce_dim=tuple(range(time_dim + 1)), cat_dim=time_dim)
    return env


def _torchrl_collector(task: Task, actor: Any, seed: int) -> Any:
    env = transformed_env(task, seed)
    options: Any = {"frames_per_batch": task.frames, "total_frames": -1}
    return Collector(env, TensorActor(actor), auto_register_policy_transforms=False, **options)


def _gym_collector(task: Task, actor: Any, seed: int, *, compiled: bool) -> GymCollector:
    make: Any = task.env if Sizes.of(task.env).is_float32 else partial(_float32_env, task.env)
    collector = GymCollector(
        make,
        actor,
        frames_per_batch=task.frames,
        num_envs=task.num_envs,
        compile_policy=compiled,
        categorical_action_encoding=True,
    )
    collector.set_seed(seed)
    return collector


def _float32_env(env_id: str) -> gym.Env:
    return gym.wrappers.DtypeObservation(gym.make(env_id), np.float32)
