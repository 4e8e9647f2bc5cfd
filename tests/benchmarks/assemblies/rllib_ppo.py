"""RLlib's PPO with options: the settings of its example ``cartpole_ppo.py``, and of ppokit."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.assemblies.folders import count, from_zero
from tests.benchmarks.assemblies.harness import Run, options_of

# With RLlib's names. The 64 environments are 4 environment runners with 16 each.
SETTINGS: dict[str, dict[str, Any]] = {
    "rllib": {
        "num_envs": 64,
        "train_batch_size": 4_000,
        "lr": [(0, 3e-4)],
        "minibatch_size": 128,
        "num_epochs": 6,
        "lambda_": 1.0,
        "vf_loss_coeff": 0.01,
        "vf_clip_param": 10.0,
        "hidden": [32],
        "activation": "linear",
        "vf_share_layers": True,
    },
    "ppokit": {
        "num_envs": 16,
        "train_batch_size": 1_024,
        "lr": [(0, 3e-3)],
        "minibatch_size": 256,
        "num_epochs": 8,
        "lambda_": 0.95,
        "vf_loss_coeff": 0.5,
        "vf_clip_param": None,
        "hidden": [64],
        "activation": "tanh",
        "vf_share_layers": False,
    },
}


def schedule(text: str) -> tuple[tuple[float, float], ...]:
    """Return the points of a number, or of [[frames, value], ...] as RLlib writes schedules."""
    given = json.loads(text)
    return ppokit.InterpSchedule(given if isinstance(given, list) else [(0, given)]).points


parser = options_of("rllib_ppo", "RLlib's PPO, on ppokit's blocks.")
parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id")
parser.add_argument("--settings", choices=[*SETTINGS], default="rllib")
parser.add_argument("--num-envs", type=count)
parser.add_argument("--train-batch-size", type=count, help="frames")
parser.add_argument("--lr", type=schedule, help="a number, or [[0, value], [frames, value], ...]")
parser.add_argument("--eval-every", type=from_zero, default=5, help="batches; 0 for never")
parser.set_defaults(**SETTINGS[parser.parse_known_args()[0].settings])
args = parser.parse_args()
if args.quick:
    args.train_batch_size = min(args.train_batch_size, 1_000)
    args.num_epochs = min(args.num_epochs, 2)
if args.total_frames is None:
    args.total_frames = 6_000 if args.quick else 200_000

torch.set_num_threads(1)
torch.manual_seed(args.seed)
networks = actor_critic(
    args.env,
    args.hidden,
    nn.Identity if args.activation == "linear" else args.activation,
    shared=args.vf_share_layers,
    squash=True,
)
for network in networks[:2]:
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()  # RLlib has torch's initialization
actor, value_head, critic = networks if args.vf_share_layers else (*networks, networks[1])
loss = ppokit.DualClipPPOLoss(
    actor,
    value_head,
    clip_epsilon=0.3,
    kl_coeff=0.2,
    entropy_bonus=False,
    entropy_coeff=0.0,
    critic_coeff=args.vf_loss_coeff,
    critic_loss_clip=args.vf_clip_param,
    loss_critic_type="l2",
)
optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr[0][1], fused=True)
gae = {"gamma": 0.99, "lmbda": args.lambda_, "value_network": critic, "average_gae": True}
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer),
    advantage=ppokit.GAE(**gae),
    adaptive_kl=ppokit.AdaptiveKLCoeff(loss, target_kl=0.01),
    scheduler=ppokit.ParameterScheduler({"lr": (optimizer, ppokit.InterpSchedule(args.lr))}),
    epochs=args.num_epochs,
    minibatch_size=args.minibatch_size,
    seed=args.seed,
)
steps = -(-args.train_batch_size // args.num_envs)
sizes = {"num_envs": args.num_envs, "frames_per_batch": steps * args.num_envs}
collector = ppokit.GymCollector(args.env, actor, episode_reward=True, **sizes)
recent: list[float] = []  # returns of the last 100 episodes


def mean_of_100(batch: Any) -> dict[str, float]:
    """Return the mean of the last 100 episodes, if there are so many."""
    following = batch["next"].transpose(0, 1)  # in the order of time
    recent.extend(following["episode_reward"][following["done"]].tolist())
    del recent[:-100]
    return {"return_100": sum(recent) / 100} if len(recent) == 100 else {}


def evaluate() -> dict[str, float]:
    """Return the mean return of ten episodes under the deterministic policy."""
    options: Any = {"episodes": 10, "num_envs": 10, "seed": args.seed + 10_000}
    return {"eval_return": ppokit.evaluate(args.env, actor, **options)[0].mean().item()}


run = Run(parser, args, {"update": update, "collector": collector, "recent": recent})
run.begin("rllib_ppo")
collector.set_seed(args.seed + run.frames)
run.train(
    collector,
    evaluate=evaluate if args.eval_every else None,
    eval_every=max(1, args.eval_every),
    score="return_100",
    statistics=mean_of_100,
)
collector.shutdown()
last = run.history[-1]
returned = f"mean return {last.get('return_100', torch.nan):.1f}"
print(f"{args.env}: {returned} after {run.frames} frames, {last['seconds']:.1f} seconds")
panels = {"return of an episode": ["return_100", "eval_return"]}
panels["coefficient of the KL penalty"] = ["kl_coeff"]
run.draw(f"{args.env}, settings of {args.settings}, seed {args.seed}", panels)
