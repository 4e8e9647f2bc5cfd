"""rl8's PPO with options: environments as one tensor, its two examples, and an LSTM.

rl8 is github.com/theOGognf/rl8. Its examples are a cart with a pole and a pendulum. No episode of
them terminates: all environments are truncated together, and a horizon ends with a bootstrap.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, InitTracker
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

import ppokit
from tests.benchmarks.assemblies.folders import count
from tests.benchmarks.assemblies.harness import Run, options_of

GAMMA, LMBDA, UNITS = 0.95, 0.95, 256
# The minibatch size counts frames; None is the whole batch.
SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"horizon": 64, "minibatch_size": 256, "epochs": 1, "lr": 2e-3},
    "pendulum": {"horizon": 128, "minibatch_size": 512, "epochs": 2, "lr": 1e-3},
}
ORIGINAL: dict[str, dict[str, Any]] = {
    "cartpole": {"num_envs": 8_192, "horizon": 64},
    "pendulum": {"num_envs": 8_192, "horizon": 128, "horizons_per_env_reset": 4},
}


def points(text: str) -> tuple[tuple[float, float], ...]:
    """Return the points of a schedule written as ``0:1e-3,8192:1e-4``."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return ppokit.StepSchedule([(float(x), float(y)) for x, y in pairs]).points


parser = options_of("rl8_vectorized", "rl8's PPO, on ppokit's blocks.")
parser.add_argument("--task", choices=[*SETTINGS], default="cartpole")
parser.add_argument("--original", action="store_true", help="rl8's settings")
parser.add_argument("--num-envs", type=count)
parser.add_argument("--horizon", type=count, help="steps of each environment in a batch")
parser.add_argument("--horizons-per-env-reset", type=int, help="-1: never reset")
parser.add_argument("--minibatch-size", type=count, help="frames")
parser.add_argument("--epochs", type=count)
parser.add_argument("--accumulate-grads", action="store_true", help="a step each epoch")
parser.add_argument("--lr-schedule", type=points, help="in rl8's counts: 0:1e-3,25600:1e-4")
parser.add_argument("--lr-schedule-kind", choices=["step", "interp"], default="step")
parser.add_argument("--recurrent", action="store_true", help="an LSTM for actor and critic")
parser.add_argument("--seq-len", type=count, default=4, help="steps that a gradient reaches back")
parser.add_argument("--seqs-per-state-reset", type=int, default=8, help="-1: never reset")
parser.add_argument("--compile", action="store_true", help="compile the training step")
parser.set_defaults(num_envs=256, horizons_per_env_reset=1, epochs=4, lr=1e-3)
given = parser.parse_known_args()[0]
parser.set_defaults(**(ORIGINAL if given.original else SETTINGS)[given.task])
if given.quick:
    parser.set_defaults(num_envs=64, horizon=32, minibatch_size=512)
args = parser.parse_args()
is_cart, frames_per_batch = args.task == "cartpole", args.num_envs * args.horizon
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


def move_pendulum(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[N, 2]`` after 0.05 s of ``Pendulum-v1``, and rewards ``[N, 1]``."""
    angle, spin = state.unbind(-1)
    torque = action.squeeze(-1).clamp(-2.0, 2.0)
    upright = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = upright**2 + 0.1 * spin**2 + 0.001 * torque**2
    spin = (spin + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
    return torch.stack([angle + spin * 0.05, spin], -1), -cost.unsqueeze(-1)


class VectorizedEnv(EnvBase):
    """The environments of the task, which are truncated together after ``max_steps``."""

    def __init__(self, num_envs: int, max_steps: int | None) -> None:
        super().__init__(batch_size=[num_envs])
        self.max_steps, self.now, self.generator = max_steps, 0, torch.Generator()
        shape = (num_envs, 1)
        observed = {"observation": Unbounded((num_envs, 5 if is_cart else 3))}
        self.observation_spec = Composite(observed, step=Unbounded(shape), shape=(num_envs,))
        self.action_spec = Categorical(3, (num_envs,)) if is_cart else Unbounded(shape)
        self.reward_spec = Unbounded(shape)
        names, flag = ("done", "terminated", "truncated"), Binary(1, shape, dtype=torch.bool)
        self.done_spec = Composite({name: flag.clone() for name in names}, shape=(num_envs,))

    def _observe(self, **entries: Tensor) -> TensorDictBase:
        *others, angle, spin = self.state.unbind(-1)
        seen = torch.stack([*others, angle.cos(), angle.sin(), spin], -1)
        step = torch.full((*self.batch_size, 1), float(self.now))
        return TensorDict({"observation": seen, "step": step, **entries}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        """Begin again in all environments: at rest, or pendulums anywhere."""
        self.now, options = 0, {"generator": self.generator}
        if is_cart:
            self.state = 0.01 * torch.randn(*self.batch_size, 4, **options)
        else:
            drawn = 2 * torch.rand(*self.batch_size, 2, **options) - 1
            self.state = drawn * torch.tensor([math.pi, 1.0])
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        move = move_cart if is_cart else move_pendulum
        self.state, reward = move(self.state, tensordict["action"])
        self.now += 1
        ended = torch.full(reward.shape, self.now == self.max_steps)
        flags = {"done": ended, "truncated": ended, "terminated": torch.zeros_like(ended)}
        return self._observe(reward=reward, **flags)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)


class Normal(nn.Module):
    """Splits ``[*B, 2]`` into a mean and a standard deviation between exp(-1) and exp(1)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, ``[*B, 1]``."""
        loc, log_scale = x.chunk(2, -1)
        return loc, log_scale.tanh().exp()


def hidden(inputs: int) -> list[nn.Module]:
    """Return two hidden layers."""
    layers = [(nn.Linear(size, UNITS), nn.ReLU(inplace=True)) for size in (inputs, UNITS)]
    return [part for layer in layers for part in layer]


def memory(inputs: int) -> list[Any]:
    """Return the modules from the observation to the output of the LSTM.

    The first one sets its state to zero after so many sequences, and marks these steps as initial:
    ``SequenceBatcher`` cuts there.
    """
    keys = {"in_key": "observation", "out_key": "hidden"}
    lstm = ppokit.LSTMModule(input_size=inputs, hidden_size=UNITS, **keys)
    if args.seqs_per_state_reset < 0:
        return [lstm]
    steps = args.seq_len * args.seqs_per_state_reset
    _, *states, is_init = lstm.in_keys

    def forget(step: Tensor, is_init: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        is_init = is_init | (step % steps == 0)
        return is_init, *(state.masked_fill(is_init.unsqueeze(-1), 0) for state in states)

    return [TensorDictModule(forget, ["step", is_init, *states], [is_init, *states]), lstm]


def make_networks() -> tuple[Any, Any, Any]:
    """Return the actor, the critic for the loss, and the whole critic: rl8's defaults.

    They are not those of ``actor_critic``, which initializes weights in another way.
    """
    inputs, outputs = (5, 3) if is_cart else (3, 2)
    last = nn.Linear(UNITS, outputs)
    nn.init.uniform_(last.weight, -1e-3, 1e-3)
    nn.init.zeros_(last.bias)
    head, keys = ([last], ["logits"]) if is_cart else ([last, Normal()], ["loc", "scale"])
    if args.recurrent:
        shared = memory(inputs)
        value_head = ValueOperator(nn.Linear(UNITS, 1), ["hidden"])
        critic: Any = TensorDictSequential(*shared, value_head)
        policy = TensorDictModule(nn.Sequential(*head), ["hidden"], keys)
        body: Any = TensorDictSequential(*shared, policy)
    else:
        layers = nn.Sequential(*hidden(inputs), nn.Linear(UNITS, 1))
        critic = value_head = ValueOperator(layers, ["observation"])
        body = TensorDictModule(nn.Sequential(*hidden(inputs), *head), ["observation"], keys)
    actor = ProbabilisticActor(
        body,
        in_keys=keys,
        distribution_class=torch.distributions.Categorical if is_cart else IndependentNormal,
        return_log_prob=True,
    )
    return actor, value_head, critic


torch.set_num_threads(1)
torch.manual_seed(args.seed)
actor, value_head, critic = make_networks()
loss = ppokit.DualClipPPOLoss(
    actor,
    value_head,
    clip_epsilon=0.2,
    critic_loss_clip=5.0,
    critic_coeff=1.0,
    entropy_bonus=False,
    entropy_coeff=0.0,
)
optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, fused=True)
scheduler = None
if args.lr_schedule:  # rl8 counts environments times collections
    kind = ppokit.StepSchedule if args.lr_schedule_kind == "step" else ppokit.InterpSchedule
    in_frames = kind([(number * args.horizon, lr) for number, lr in args.lr_schedule])
    scheduler = ppokit.ParameterScheduler({"lr": (optimizer, in_frames)})
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, max_grad_norm=5.0, compile=args.compile),
    reward_normalizer=ppokit.RewardNormalizer(GAMMA, statistics="batch", clip=None),
    advantage=ppokit.GAE(
        gamma=GAMMA,
        lmbda=LMBDA,
        value_network=critic,
        average_gae=True,
        value_chunk_size=max(1, 4_096 // args.horizon),  # activations stay in the cache
    ),
    batcher=ppokit.SequenceBatcher(args.seq_len) if args.recurrent else None,
    scheduler=scheduler,
    epochs=args.epochs,
    minibatch_size=args.minibatch_size,
    accumulate_grads=args.accumulate_grads,
    seed=args.seed,
)
horizons = args.horizons_per_env_reset
env: Any = VectorizedEnv(args.num_envs, None if horizons < 0 else horizons * args.horizon)
policy = ppokit.TensorActor(actor)
if args.recurrent:
    policy = actor
    lstm = next(x for x in actor.modules() if isinstance(x, ppokit.LSTMModule))
    env = env.append_transform(InitTracker()).append_transform(lstm.make_tensordict_primer())
collector = Collector(
    env,
    policy,
    frames_per_batch=frames_per_batch,
    total_frames=-1,
    auto_register_policy_transforms=False,
)

run = Run(parser, args, {"update": update})
run.begin("rl8_vectorized")
torch.manual_seed(args.seed + run.frames)
env.set_seed(args.seed + run.frames)
run.train(
    collector,
    score="return",  # of the raw rewards of a horizon, as rl8 reports it
    statistics=lambda batch: {"return": batch["next", "reward"].sum(1).mean().item()},
    time_before_update=True,
)
collector.shutdown()
print(f"{args.task}: {run.history[-1]['return']:.1f} a horizon after {run.frames} frames")
kind = "LSTM" if args.recurrent else "MLP"
title = f"{args.task}, {args.num_envs} environments, {kind}, seed {args.seed}"
run.draw(title, {"mean return of a horizon": ["return"]})
