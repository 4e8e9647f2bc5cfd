"""PPO on one environment with options: the blocks of the tutorial, or TorchRL's classes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import RewardSum

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.assemblies.harness import Run, options_of
from tests.benchmarks.loop_tasks import Task
from tests.benchmarks.loop_torchrl import Tutorial
from tests.benchmarks.networks import spaces_of

parser = options_of("coding_ppo", "PPO on ppokit's blocks, or on TorchRL's classes.")
parser.add_argument("--env", default="InvertedDoublePendulum-v5", help="any Gymnasium id")
parser.add_argument("--baseline", action="store_true", help="TorchRL's classes")
run = Run(parser, 100_000, 2_000)
args = run.args
frames_per_batch, epochs = (500, 2) if args.quick else (1_000, 10)
minibatch_size, learning_rate, gamma = 64, 3e-4, 0.99

observations, actions = spaces_of(args.env)
is_box = isinstance(actions, gym.spaces.Box)
actor, critic = actor_critic(args.env, hidden=(256, 256, 256), squash=is_box)


def make_ppokit() -> tuple[Any, Any, Any]:
    """Return collector, update and transform of observations."""
    loss = ppokit.DualClipPPOLoss(actor, critic, dual_clip=5.0)
    adam = torch.optim.Adam(loss.parameters(), lr=learning_rate, fused=True)
    falling = ppokit.InterpSchedule([(0, learning_rate), (args.total_frames, 0.0)])
    stopper = ppokit.KLEarlyStopper(0.1)
    compiles = not args.quick
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, adam, max_grad_norm=1.0, stopper=stopper, compile=compiles),
        advantage=ppokit.GAE(gamma=gamma, lmbda=0.95, value_network=critic, average_gae=True),
        reward_normalizer=ppokit.RewardNormalizer(gamma),
        scheduler=ppokit.ParameterScheduler({"lr": (adam, falling)}),
        epochs=epochs,
        minibatch_size=minibatch_size,
        seed=args.seed,
    )
    standardize = ppokit.ObservationNormalizer(observations.shape)
    collector = ppokit.GymCollector(
        args.env,
        actor,
        frames_per_batch=frames_per_batch,
        total_frames=args.total_frames,
        observation_transform=standardize,
        compile_policy=compiles,
    )
    return collector, update, standardize


def make_torchrl() -> tuple[Any, Any, Any]:
    """Return the same from TorchRL's classes: the loop of its PPO tutorial."""
    loop = Tutorial(
        Task(args.env, 1, frames_per_batch, epochs=epochs),
        args.seed,
        networks=(actor, critic),
        updates=max(1, args.total_frames // frames_per_batch),
        transforms=(RewardSum(),),
    )

    def update(batch: Any) -> dict[str, float]:
        row = {"lr": loop.optimizer.param_groups[0]["lr"]}
        row |= {name: x.mean().item() for name, x in loop.train(batch).items()}
        row["kl"] = row["kl_approx"]
        returns = batch["next", "episode_reward"][batch["next", "done"]]
        return row | ({"episode_return": returns.mean().item()} if len(returns) else {})

    to_float = TensorDictModule(lambda x: x.float(), ["observation"], ["observation"])
    return loop.collector, update, TensorDictSequential(loop.env.transform[0], to_float)


collector, update, standardize = (make_torchrl if args.baseline else make_ppokit)()


def evaluate() -> dict[str, float]:
    """Return the mean return of five episodes with the most probable actions."""
    options: Any = {"episodes": 5, "num_envs": 5, "seed": args.seed + 10_000}
    returns, _ = ppokit.evaluate(args.env, actor, observation_transform=standardize, **options)
    return {"eval_return": returns.mean().item()}


torch.manual_seed(args.seed)
title = f"{args.env}, {'TorchRL' if args.baseline else 'ppokit'}, seed {args.seed}"
run.train(collector, update, title, evaluate=evaluate, eval_every=2)
