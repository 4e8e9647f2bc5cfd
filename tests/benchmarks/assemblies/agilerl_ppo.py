"""AgileRL's PPO with options: its settings or others."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictSequential
from torch import nn
from torchrl.envs import ExplorationType

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.assemblies.harness import Run, options_of
from tests.benchmarks.networks import spaces_of
from tests.benchmarks.tables import settings_of

# "agilerl" has those of configs/training/ppo/ppo.yaml (commit 549d85e). Schedules are points of
# frames and value; ``log_scale`` is AgileRL's ``action_std_init``; the value is clipped by the
# ratio's 0.2.
SETTINGS = settings_of(
    ["agilerl", "own"],
    """
learn_step     2_048       4_096
batch_size     128         256
epochs         4           8
lr             [(0,1e-3)]  [(0,1e-3),(300_000,2e-4)]
entropy_coeff  [(0,0.01)]  [(0,0.01),(300_000,0.0)]
gamma          0.99        0.999
clip_value     True        None
scale_rewards  False       True
log_scale      0.6         -0.7
target_kl      None        0.03
encoders       "shared"    "own"
layer_norm     True        False
""",
)
NUM_ENVS, WIDTH = 16, 64  # WIDTH: units of a layer

parser = options_of("agilerl_ppo", "AgileRL's PPO from ppokit's blocks.")
parser.add_argument("--env", default="LunarLander-v3", help="a Gymnasium id")
parser.add_argument("--settings", choices=[*SETTINGS], default="own")
parser.add_argument("--lr", type=float, help="a constant learning rate")
run = Run(parser, 1_000_000, 1_024)
args, settings = run.args, SETTINGS[run.args.settings]
if args.lr is not None:
    settings.lr = [(0, args.lr)]
# frames between evaluations, their episodes, and the longest of these
every, episodes, longest = 10_240, 16, 1_024
if args.quick:
    settings.learn_step, settings.batch_size, settings.epochs = 512, 64, 2
    every, episodes, longest = 512, 4, 64


def activation() -> nn.Module:
    """Return what follows a layer."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU()) if settings.layer_norm else nn.ReLU()


def make_networks() -> tuple[Any, Any, Any]:
    """Return the policy, the critic for the loss, and the critic.

    An encoder has two layers, and a head has a layer of its own besides the last one, over a
    shared encoder, too.
    """
    options: Any = {"activation": activation, "log_scale": settings.log_scale}
    if settings.encoders == "own":
        policy, critic = actor_critic(args.env, [WIDTH] * 3, **options)
        return policy, critic, critic
    *_, whole = actor_critic(args.env, [WIDTH] * 2, shared=True, **options)
    encoder = whole[0]
    features = {encoder.out_keys[0]: gym.spaces.Box(-np.inf, np.inf, (WIDTH,))}
    spaces = gym.spaces.Dict(features), spaces_of(args.env)[1]
    head, value_head = actor_critic(spaces, [WIDTH], **options)
    policy = ProbabilisticTensorDictSequential(encoder, *head.module)
    return policy, value_head, TensorDictSequential(encoder, value_head)


policy, value, critic = make_networks()
loss = ppokit.DualClipPPOLoss(
    policy,
    value,
    clip_epsilon=0.2,
    clip_value=settings.clip_value,
    critic_coeff=0.25,  # AgileRL's 0.5, and the half in its loss
    loss_critic_type="l2",
    entropy_coeff=settings.entropy_coeff[0][1],
)
optimizer = torch.optim.Adam(loss.parameters(), fused=True)
lr, entropy = map(ppokit.InterpSchedule, (settings.lr, settings.entropy_coeff))
stopper = None
if settings.target_kl is not None:
    stopper = ppokit.KLEarlyStopper(settings.target_kl, tolerance=1.0, when="epoch")
gamma = settings.gamma
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, stopper=stopper, max_grad_norm=0.5),
    advantage=ppokit.GAE(gamma=gamma, lmbda=0.95, value_network=critic, average_gae=True),
    reward_normalizer=ppokit.RewardNormalizer(gamma) if settings.scale_rewards else None,
    scheduler=ppokit.ParameterScheduler({"lr": (optimizer, lr), "entropy_coeff": (loss, entropy)}),
    epochs=settings.epochs,
    minibatch_size=settings.batch_size,
    seed=args.seed,
)
frames = settings.learn_step
collector = ppokit.GymCollector(args.env, policy, num_envs=NUM_ENVS, frames_per_batch=frames)


def evaluate() -> dict[str, float]:
    """Return the mean return, and that of the last ten evaluations; actions are drawn."""
    returns, _ = ppokit.evaluate(
        lambda: gym.wrappers.TimeLimit(gym.make(args.env), longest),
        policy,
        episodes=episodes,
        num_envs=episodes,
        exploration_type=ExplorationType.RANDOM,
        seed=10_000 + args.seed + run.frames,
    )
    score = returns.mean().item()
    scores = [*(row["score"] for row in run.history if "score" in row), score][-10:]
    return {"score": score} | ({"score_10": sum(scores) / 10} if len(scores) == 10 else {})


title = f"{args.env}, settings: {args.settings}, seed {args.seed}"
panels = {"return of an episode": ["episode_return", "score"]}
options = {"evaluate": evaluate, "eval_frames": every, "score": "score_10", "panels": panels}
run.train(collector, update, title, **options)
