"""RLlib's PPO with options: the settings of its example ``cartpole_ppo.py``, and of ppokit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.assemblies.harness import Run, options_of
from tests.benchmarks.tables import settings_of

ENV = "CartPole-v1"
# With RLlib's names; its activation "linear" is nn.Identity. The 64 environments are 4 environment
# runners with 16 each.
SETTINGS = settings_of(
    ["rllib", "ppokit"],
    """
num_envs          64          16
train_batch_size  4_000       1_024
lr                3e-4        3e-3
minibatch_size    128         256
num_epochs        6           8
lambda_           1.0         0.95
vf_loss_coeff     0.01        0.5
vf_clip_param     10.0        None
hidden            [32]        [64]
activation        "Identity"  "Tanh"
vf_share_layers   True        False
""",
)

parser = options_of("rllib_ppo", "RLlib's PPO, on ppokit's blocks.")
parser.add_argument("--settings", choices=[*SETTINGS], default="rllib")
run = Run(parser, 200_000, 8_000)
args, settings = run.args, SETTINGS[run.args.settings]
networks = actor_critic(
    ENV, settings.hidden, getattr(nn, settings.activation), shared=settings.vf_share_layers
)
for network in networks[:2]:
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()  # RLlib has torch's initialization
actor, value_head, critic = networks if settings.vf_share_layers else (*networks, networks[1])
loss = ppokit.DualClipPPOLoss(
    actor,
    value_head,
    clip_epsilon=0.3,
    kl_coeff=0.2,
    entropy_bonus=False,
    entropy_coeff=0.0,
    critic_coeff=settings.vf_loss_coeff,
    critic_loss_clip=settings.vf_clip_param,
    loss_critic_type="l2",
)
optimizer = torch.optim.Adam(loss.parameters(), lr=settings.lr, fused=True)
gae = {"gamma": 0.99, "lmbda": settings.lambda_, "value_network": critic, "average_gae": True}
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer),
    advantage=ppokit.GAE(**gae),
    adaptive_kl=ppokit.AdaptiveKLCoeff(loss, target_kl=0.01),
    epochs=settings.num_epochs,
    minibatch_size=settings.minibatch_size,
    seed=args.seed,
)
num_envs = settings.num_envs
frames = -(-settings.train_batch_size // num_envs) * num_envs
sizes = {"num_envs": num_envs, "frames_per_batch": frames}
collector = ppokit.GymCollector(ENV, actor, episode_reward=True, **sizes)
recent: list[float] = []  # returns of the last 100 episodes


def mean_of_100(batch: Any) -> dict[str, float]:
    """Return the mean of the last 100 episodes, if there are so many."""
    following = batch["next"].transpose(0, 1)  # in the order of time
    recent.extend(following["episode_reward"][following["done"]].tolist())
    del recent[:-100]
    return {"return_100": sum(recent) / 100} if len(recent) == 100 else {}


title = f"{ENV}, settings of {args.settings}, seed {args.seed}"
panels = {"return of an episode": ["return_100"], "coefficient of the KL penalty": ["kl_coeff"]}
options = {"score": "return_100", "statistics": mean_of_100, "panels": panels}
run.train(collector, update, title, **options)
