"""AgileRL's PPO with options: its settings or others, any observation, masks, clones.

The mask of a Discrete action comes with the observation, or in ``info``, as Taxi-v4 has it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
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

Points = list[tuple[int, float]]  # of a schedule: frames and value


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters; ``log_scale`` is AgileRL's ``action_std_init``."""

    learn_step: int
    batch_size: int
    epochs: int
    lr: Points
    entropy_coeff: Points
    gamma: float
    clip_value: bool | None
    scale_rewards: bool
    log_scale: float
    target_kl: float | None
    encoders: str
    layer_norm: bool


SETTINGS = {
    # Of configs/training/ppo/ppo.yaml (commit 549d85e). The value is clipped by the ratio's 0.2.
    "agilerl": Settings(
        learn_step=2_048,
        batch_size=128,
        epochs=4,
        lr=[(0, 1e-3)],
        entropy_coeff=[(0, 0.01)],
        gamma=0.99,
        clip_value=True,
        scale_rewards=False,
        log_scale=0.6,
        target_kl=None,
        encoders="shared",
        layer_norm=True,
    ),
    "own": Settings(
        learn_step=4_096,
        batch_size=256,
        epochs=8,
        lr=[(0, 1e-3), (300_000, 2e-4)],
        entropy_coeff=[(0, 0.01), (300_000, 0.0)],
        gamma=0.999,
        clip_value=None,
        scale_rewards=True,
        log_scale=-0.7,
        target_kl=0.03,
        encoders="own",
        layer_norm=False,
    ),
}
NUM_ENVS, WIDTH = 16, 64  # WIDTH: units of a layer

parser = options_of("agilerl_ppo", "AgileRL's PPO from ppokit's blocks.")
parser.add_argument("--env", default="LunarLander-v3", help="a Gymnasium id")
parser.add_argument("--settings", choices=[*SETTINGS], default="own")
parser.add_argument("--encoders", choices=["shared", "own"], help="of policy and critic")
parser.add_argument("--lr", type=float, help="a constant learning rate")
parser.add_argument("--target-kl", type=float, help="end an update whose mean KL exceeds this")
parser.add_argument("--target-score", dest="target", type=float, help="as --target")
args = parser.parse_args()
settings = SETTINGS[args.settings]
for name in ("encoders", "target_kl"):
    if getattr(args, name) is None:
        setattr(args, name, getattr(settings, name))
if args.lr is not None:
    settings = replace(settings, lr=[(0, args.lr)])
# frames between evaluations, their episodes, and the longest of these
every, episodes, longest = 10_240, 16, 1_024
if args.quick:
    settings = replace(settings, learn_step=512, batch_size=64, epochs=2)
    every, episodes, longest = 512, 4, 64
if args.total_frames is None:
    args.total_frames = 1_024 if args.quick else 1_000_000


def make_env() -> gym.Env:
    """Return the environment; its numbers as actions are clipped."""
    env = gym.make(args.env)
    is_box = isinstance(env.action_space, gym.spaces.Box)
    return gym.wrappers.ClipAction(env) if is_box else env


def activation() -> nn.Module:
    """Return what follows a layer."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU()) if settings.layer_norm else nn.ReLU()


def make_networks() -> tuple[Any, Any, Any]:
    """Return the policy, the critic for the loss, and the critic.

    An encoder has two layers, and a head has a layer of its own besides the last one, over a
    shared encoder, too.
    """
    env = make_env()
    space, actions = env.observation_space, env.action_space
    is_dict = isinstance(space, gym.spaces.Dict)
    parts: dict[str, Any] = dict(space.spaces) if is_dict else {"observation": space}
    if isinstance(actions, gym.spaces.Discrete) and "action_mask" in env.reset()[1]:
        parts["action_mask"] = gym.spaces.MultiBinary(int(actions.n))
        space = gym.spaces.Dict(parts)
    env.close()
    options: Any = {"activation": activation, "log_scale": settings.log_scale}
    if args.encoders == "own":
        policy, critic = actor_critic((space, actions), [WIDTH] * 3, **options)
        return policy, critic, critic
    *_, whole = actor_critic((space, actions), [WIDTH] * 2, shared=True, **options)
    encoder = whole[0]
    reads = {name: part for name, part in parts.items() if name == "action_mask"}
    reads[encoder.out_keys[0]] = gym.spaces.Box(-np.inf, np.inf, (WIDTH,))
    head, value_head = actor_critic((gym.spaces.Dict(reads), actions), [WIDTH], **options)
    policy = ProbabilisticTensorDictSequential(encoder, *head.module)
    return policy, value_head, TensorDictSequential(encoder, value_head)


class Agent:
    """All that learns. A deep copy is a clone: what the parts share, those of the copy share."""

    def __init__(self) -> None:
        self.policy, value, self.critic = make_networks()
        self.loss = ppokit.DualClipPPOLoss(
            self.policy,
            value,
            clip_epsilon=0.2,
            clip_value=settings.clip_value,
            critic_coeff=0.25,  # AgileRL's 0.5, and the half in its loss
            loss_critic_type="l2",
            entropy_coeff=settings.entropy_coeff[0][1],
        )
        optimizer = torch.optim.Adam(self.loss.parameters(), fused=True)
        lr, entropy = map(ppokit.InterpSchedule, (settings.lr, settings.entropy_coeff))
        stopper = None
        if args.target_kl is not None:
            stopper = ppokit.KLEarlyStopper(args.target_kl, tolerance=1.0, when="epoch")
        gamma, scales = settings.gamma, settings.scale_rewards
        self.update = ppokit.PPOUpdate(
            ppokit.TrainingStep(self.loss, optimizer, stopper=stopper, max_grad_norm=0.5),
            advantage=ppokit.GAE(
                gamma=gamma, lmbda=0.95, value_network=self.critic, average_gae=True
            ),
            reward_normalizer=ppokit.RewardNormalizer(gamma) if scales else None,
            scheduler=ppokit.ParameterScheduler(
                {"lr": (optimizer, lr), "entropy_coeff": (self.loss, entropy)}
            ),
            epochs=settings.epochs,
            minibatch_size=settings.batch_size,
            seed=args.seed,
        )


torch.set_num_threads(1)
torch.manual_seed(args.seed)
try:
    agent = Agent()
except (gym.error.Error, TypeError, ValueError) as error:
    parser.error(str(error))
sizes = {"num_envs": NUM_ENVS, "frames_per_batch": settings.learn_step}
collector = ppokit.GymCollector(make_env, agent.policy, **sizes)


def evaluate() -> dict[str, float]:
    """Return the mean return, and that of the last ten evaluations; actions are drawn."""
    returns, _ = ppokit.evaluate(
        lambda: gym.wrappers.TimeLimit(make_env(), longest),
        agent.policy,
        episodes=episodes,
        num_envs=episodes,
        exploration_type=ExplorationType.RANDOM,
        seed=10_000 + args.seed + run.frames,
    )
    score = returns.mean().item()
    scores = [*(row["score"] for row in run.history if "score" in row), score][-10:]
    return {"score": score} | ({"score_10": sum(scores) / 10} if len(scores) == 10 else {})


run = Run(parser, args, {"update": agent.update, "collector": collector})
run.begin("agilerl_ppo")
collector.set_seed(args.seed + run.frames)
run.train(collector, evaluate=evaluate, eval_frames=every, score="score_10")
collector.shutdown()

clone, loaded = copy.deepcopy(agent), Agent()
of_loaded = {**run.parts, "update": loaded.update, "collector": None}
ppokit.load_checkpoint(run.checkpoint, of_loaded)
print(f"{args.env}: score {run.history[-1]['score']:.1f} after {run.frames} frames")
panels = {"return of an episode": ["episode_return", "score"]}
run.draw(f"{args.env}, settings: {args.settings}, seed {args.seed}", panels)
