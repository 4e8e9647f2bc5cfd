"""A torchrl trainer on CartPole, and a record of each batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv
from torchrl.trainers import (
    DefaultOptimizationStepper,
    MixedPrecisionOptimizationStepper,
    ReplayBufferTrainer,
    Trainer,
)
from torchrl.trainers.algorithms import PPOTrainer

from ppokit import GAE, DualClipPPOLoss, KLEarlyStopper
from tests.blocks import categorical_actor, make_critic, make_minibatch

FRAMES, MINIBATCH, EPOCHS, BATCHES = 40, 8, 3, 3
ALL = EPOCHS * FRAMES // MINIBATCH  # optimizer steps of a batch


def make_buffer(**kwargs) -> ReplayBuffer:
    arguments = {"sampler": SamplerWithoutReplacement(), "batch_size": 10} | kwargs
    return ReplayBuffer(**{"storage": LazyTensorStorage(100)} | arguments)


class Run:
    """A trainer on CartPole, and a record of what it did."""

    def __init__(
        self,
        stopper: KLEarlyStopper | None = None,
        *,
        kind: str = "PPOTrainer",
        masked: bool = False,
        frame_skip: int = 1,
        split_trajs: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.masked, self.frame_skip, self.split_trajs = masked, frame_skip, split_trajs
        self.actor = categorical_actor(nn.Linear(4, 2))
        self.loss = DualClipPPOLoss(self.actor, make_critic())
        if masked:
            self.loss.loss_mask_key = "valid"
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=0.1, weight_decay=0.1)
        self.buffer = make_buffer(storage=LazyTensorStorage(FRAMES), batch_size=MINIBATCH)
        with warnings.catch_warnings():
            # "experimental", and torchrl's own use of its deprecated stages
            warnings.simplefilter("ignore")
            self.trainer = self.make_trainer(kind, options)
        if stopper is not None:
            stopper.register(self.trainer)
        self.log_prob_shift = 0.0
        #: for each batch, for each minibatch: its KL, its valid frames and its observations
        self.kls: list[list[float]] = []
        self.valid: list[list[int]] = []
        self.seen: list[list[torch.Tensor]] = []
        self.trainer.register_op("pre_optim_steps", self.before_batch)
        self.loss.register_forward_hook(self.after_loss)

    def make_collector(self) -> Collector:
        options = {"categorical_action_encoding": True, "frame_skip": self.frame_skip}
        env = GymEnv("CartPole-v1", **options)
        env.set_seed(0)
        return Collector(
            env,
            self.actor,
            frames_per_batch=FRAMES,
            total_frames=FRAMES * BATCHES,
            split_trajs=self.split_trajs,
            postproc=self.move_log_prob,
            auto_register_policy_transforms=False,
        )

    def make_trainer(self, kind: str, options: dict[str, Any]) -> Trainer:
        options |= {
            "collector": self.make_collector(),
            "total_frames": FRAMES * BATCHES * self.frame_skip,
            "frame_skip": self.frame_skip,
            "optim_steps_per_batch": None,
            "loss_module": self.loss,
            "progress_bar": False,
            "num_epochs": EPOCHS,
        }
        options["optimizer"] = self.optimizer
        if kind == "PPOTrainer":
            return PPOTrainer(**options, replay_buffer=self.buffer, enable_logging=False)
        stepper = DefaultOptimizationStepper()
        if kind == "mixed precision":
            stepper = MixedPrecisionOptimizationStepper(self.optimizer)
        trainer = Trainer(**options, optimization_stepper=stepper)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=self.loss.critic_network)
        trainer.register_op("batch_process", gae)
        ReplayBufferTrainer(self.buffer, flatten_tensordicts=True, iterate=True).register(trainer)
        return trainer

    def move_log_prob(self, batch: TensorDict) -> TensorDict:
        if self.masked:
            batch["valid"] = torch.rand(batch.shape) < 0.5  # torchrl drops ("collector", "mask")
        return batch.set("action_log_prob", batch["action_log_prob"] - self.log_prob_shift)

    def before_batch(self) -> None:
        self.kls.append([])
        self.valid.append([])
        self.seen.append([])

    def after_loss(self, module: nn.Module, args: tuple, losses: TensorDict) -> None:
        self.kls[-1].append(losses["kl"].item())
        mask = args[0].get("valid", torch.ones(len(args[0])))
        self.valid[-1].append(int(mask.sum()))
        self.seen[-1].append(args[0]["observation"])

    def train(self) -> Run:
        self.trainer.train()
        return self

    @property
    def steps(self) -> int:
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)


def evaluate_at(run: Run, *stages: str, afterwards: Any = lambda: None) -> None:
    """Call the loss at these stages of the trainer, on frames of a policy that is far away."""
    far = make_minibatch(run.actor, 8, spread=9.0)

    def evaluate(batch: Any) -> None:
        with torch.no_grad():
            assert run.loss(far.clone())["kl"] > 1
        afterwards()

    for stage in stages:
        run.trainer.register_op(stage, evaluate)


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])
