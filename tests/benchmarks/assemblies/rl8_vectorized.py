"""rl8's PPO with options, on its example: carts with poles as one tensor.

rl8 is github.com/theOGognf/rl8. No episode of its example terminates: all environments are
truncated together, and a horizon ends with a bootstrap.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

import ppokit
from tests.benchmarks.assemblies.harness import Run, count, options_of
from tests.benchmarks.networks import actor_of, mlp

GAMMA, LMBDA, UNITS = 0.95, 0.95, 256

parser = options_of("rl8_vectorized", "rl8's PPO, on ppokit's blocks.")
parser.add_argument("--original", action="store_true", help="rl8's settings")
parser.add_argument("--num-envs", type=count, default=256)
parser.add_argument("--horizon", type=count, default=64, help="steps of a batch")
parser.add_argument("--minibatch-size", type=count, help="frames")
parser.add_argument("--accumulate-grads", action="store_true", help="a step each epoch")
parser.add_argument("--compile", action="store_true", help="compile the training step")
run = Run(parser)
args = run.args
epochs, learning_rate = (4, 1e-3) if args.original else (1, 2e-3)
if args.minibatch_size is None and not args.original:
    args.minibatch_size = 256
frames_per_batch = args.num_envs * args.horizon
if args.total_frames is None:
    args.total_frames = frames_per_batch * (2 if args.quick else 40)


def move_cart(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[N, 4]`` after 0.02 s of ``CartPole-v1``, and rewards ``[N, 1]``."""
    x, speed, angle, spin = state.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    push = ((action - 1) * 5.0 + 0.05 * spin**2 * sin) / 1.1  # one of three forces
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pull = push - 0.05 * turn * cos / 1.1
    x, speed = x + 0.02 * speed, speed + 0.02 * pull
    angle, spin = angle + 0.02 * spin, spin + 0.02 * turn
    cost = (angle.cos() - 1).abs() + angle.sin().abs() + x.abs() + speed.abs() + spin.abs()
    return torch.stack([x, speed, angle, spin], -1), -cost.unsqueeze(-1)


class CartPoles(EnvBase):
    """Carts with poles, which are truncated together after a horizon."""

    def __init__(self) -> None:
        super().__init__(batch_size=[args.num_envs])
        self.now, self.generator = 0, torch.Generator()
        shape = (args.num_envs, 1)
        seen = Unbounded((args.num_envs, 5))
        self.observation_spec = Composite(observation=seen, shape=(args.num_envs,))
        self.action_spec = Categorical(3, (args.num_envs,))
        self.reward_spec = Unbounded(shape)
        names, flag = ("done", "terminated", "truncated"), Binary(1, shape, dtype=torch.bool)
        self.done_spec = Composite({name: flag.clone() for name in names}, shape=(args.num_envs,))

    def _observe(self, **entries: Tensor) -> TensorDictBase:
        x, speed, angle, spin = self.state.unbind(-1)
        seen = torch.stack([x, speed, angle.cos(), angle.sin(), spin], -1)
        return TensorDict({"observation": seen, **entries}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        """Begin again in all environments, at rest."""
        self.now = 0
        self.state = 0.01 * torch.randn(*self.batch_size, 4, generator=self.generator)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.state, reward = move_cart(self.state, tensordict["action"])
        self.now += 1
        ended = torch.full(reward.shape, self.now == args.horizon)
        flags = {"done": ended, "truncated": ended, "terminated": torch.zeros_like(ended)}
        return self._observe(reward=reward, **flags)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)


# rl8's networks are not initialized as those of ``actor_critic``.
relu = partial(nn.ReLU, inplace=True)
layers = partial(mlp, 5, hidden=(UNITS, UNITS), activation=relu)
network = layers(3)
nn.init.uniform_(network[-1].weight, -1e-3, 1e-3)
nn.init.zeros_(network[-1].bias)
actor = actor_of(network, torch.distributions.Categorical)
critic = ValueOperator(layers(1), ["observation"])
loss = ppokit.DualClipPPOLoss(
    actor,
    critic,
    clip_epsilon=0.2,
    critic_loss_clip=5.0,
    critic_coeff=1.0,
    entropy_bonus=False,
    entropy_coeff=0.0,
)
optimizer = torch.optim.Adam(loss.parameters(), lr=learning_rate, fused=True)
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, max_grad_norm=5.0, compile=args.compile),
    reward_normalizer=ppokit.RewardNormalizer(GAMMA, statistics="batch", clip=None),
    advantage=ppokit.GAE(
        gamma=GAMMA,
        lmbda=LMBDA,
        value_network=critic,
        average_gae=True,
        value_chunk_size=4_096,  # activations stay in the cache
    ),
    epochs=epochs,
    minibatch_size=args.minibatch_size,
    accumulate_grads=args.accumulate_grads,
    seed=args.seed,
)
policy, env = ppokit.TensorActor(actor), CartPoles()
collector = Collector(
    env,
    policy,
    frames_per_batch=frames_per_batch,
    total_frames=-1,
    auto_register_policy_transforms=False,
)


def statistics(batch: TensorDictBase) -> dict[str, float]:
    """Return the mean return, and the seconds until it is known: not those of its update."""
    return {"return": batch["next", "reward"].sum(1).mean().item(), "seconds": run.seconds}


torch.manual_seed(args.seed)
run.train(
    collector,
    update,
    f"{args.num_envs} carts, seed {args.seed}",
    panels={"mean return of a horizon": ["return"]},
    score="return",  # of the raw rewards of a horizon, as rl8 reports it
    statistics=statistics,
)
