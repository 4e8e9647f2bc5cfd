"""PPO on one environment with options: the blocks of the tutorial, or TorchRL's classes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, DoubleToFloat, GymEnv, ObservationNorm, RewardSum, TransformedEnv
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.assemblies.harness import Run, options_of

parser = options_of("coding_ppo", "PPO on ppokit's blocks, or on TorchRL's classes.")
parser.add_argument("--env", default="InvertedDoublePendulum-v5", help="any Gymnasium id")
parser.add_argument("--baseline", action="store_true", help="TorchRL's classes")
args = parser.parse_args()
if args.total_frames is None:
    args.total_frames = 2_000 if args.quick else 100_000
frames_per_batch, epochs = (500, 2) if args.quick else (1_000, 10)
minibatch_size, learning_rate, gamma = 64, 3e-4, 0.99

spaces = gym.make(args.env)
size, is_box = spaces.observation_space.shape, isinstance(spaces.action_space, gym.spaces.Box)
spaces.close()

torch.set_num_threads(1)
torch.manual_seed(args.seed)
actor, critic = actor_critic(args.env, hidden=(256, 256, 256), squash=is_box)
of_gae: dict[str, Any] = {"gamma": gamma, "lmbda": 0.95, "average_gae": True}
of_gae |= {"value_network": critic}


def make_ppokit() -> tuple[Any, Any, Any]:
    """Return collector, update and transform of observations."""
    loss = ppokit.DualClipPPOLoss(actor, critic, dual_clip=5.0)
    adam = torch.optim.Adam(loss.parameters(), lr=learning_rate, fused=True)
    falling = ppokit.InterpSchedule([(0, learning_rate), (args.total_frames, 0.0)])
    stopper = ppokit.KLEarlyStopper(0.1)
    compiles = not args.quick
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, adam, max_grad_norm=1.0, stopper=stopper, compile=compiles),
        advantage=ppokit.GAE(**of_gae),
        reward_normalizer=ppokit.RewardNormalizer(gamma),
        scheduler=ppokit.ParameterScheduler({"lr": (adam, falling)}),
        epochs=epochs,
        minibatch_size=minibatch_size,
        seed=args.seed,
    )
    standardize = ppokit.ObservationNormalizer(size or ())
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
    transform = Compose(ObservationNorm(in_keys=["observation"]), DoubleToFloat(), RewardSum())
    env = TransformedEnv(GymEnv(args.env, categorical_action_encoding=True), transform)
    env.set_seed(args.seed)
    norm = env.transform[0]
    norm.init_stats(num_iter=100 if args.quick else 1_000, reduce_dim=0, cat_dim=0)
    gae = TorchRLGAE(**of_gae)
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=1e-4)
    adam = torch.optim.Adam(loss_module.parameters(), lr=learning_rate)
    batches = max(1, args.total_frames // frames_per_batch)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, batches, 0.0)
    storage = LazyTensorStorage(frames_per_batch)
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=minibatch_size)

    def update(batch: Any) -> dict[str, float]:
        done, losses = batch["next", "done"].squeeze(-1), {}
        returns = batch["next", "episode_reward"][done]
        for _ in range(epochs):
            gae(batch)
            buffer.extend(batch.reshape(-1))
            for minibatch in buffer:
                losses = loss_module(minibatch)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                adam.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                adam.step()
        row = {name: x.mean().item() for name, x in losses.items()}
        row |= {"kl": row["kl_approx"], "lr": adam.param_groups[0]["lr"]}
        cosine.step()
        return row | ({"episode_return": returns.mean().item()} if len(returns) else {})

    collector = Collector(
        env,
        actor,
        frames_per_batch=frames_per_batch,
        total_frames=args.total_frames,
        auto_register_policy_transforms=False,
    )
    to_float = TensorDictModule(lambda x: x.float(), ["observation"], ["observation"])
    return collector, update, TensorDictSequential(norm, to_float)


collector, update, standardize = (make_torchrl if args.baseline else make_ppokit)()


def evaluate() -> dict[str, float]:
    """Return the mean return of five episodes with the most probable actions."""
    options: Any = {"episodes": 5, "num_envs": 5, "seed": args.seed + 10_000}
    returns, _ = ppokit.evaluate(args.env, actor, observation_transform=standardize, **options)
    return {"eval_return": returns.mean().item()}


run = Run(parser, args)
torch.manual_seed(args.seed)
collector.set_seed(args.seed)
run.train(collector, update, evaluate=evaluate, eval_every=2)
collector.shutdown()
score = run.history[-1]["eval_return"]
print(f"Mean return of 5 episodes after {run.frames} frames: {score:.1f}")
run.finish(f"{args.env}, {'TorchRL' if args.baseline else 'ppokit'}, seed {args.seed}")
