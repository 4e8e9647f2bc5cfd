"""PPO on one environment, with options: a written-out loop, an update, or TorchRL's classes."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # keep torchrl out of the progress bar

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ExplorationType,
    GymEnv,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811
from torchrl.record.loggers import get_logger
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ObservationNormalizer,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    TensorActor,
    TrainingStep,
    diagnose,
    load_checkpoint,
    save_checkpoint,
)
from ppokit.plotting import plot_run
from ppokit.scripts import begin_run, catch_interrupt, count, from_zero

parser = argparse.ArgumentParser(description="PPO with ppokit's blocks in a TorchRL loop.")
parser.add_argument("--env", default="InvertedDoublePendulum-v5", help="any Gymnasium id")
parser.add_argument("--total-frames", type=count, help="steps; 100,000 unless --quick")
parser.add_argument("--seed", type=from_zero, default=0)
parser.add_argument("--device", default="cpu", help="where the networks train, e.g. cuda")
parser.add_argument("--out", type=Path, default=Path("outputs/coding_ppo"))
kinds = parser.add_mutually_exclusive_group()
kinds.add_argument("--baseline", action="store_true", help="TorchRL's pieces instead of ppokit's")
kinds.add_argument(
    "--engine",
    nargs="?",
    const="ppokit",
    choices=["ppokit", "torchrl"],
    help="PPOUpdate instead of the loop, with the collector of ppokit (the default) or torchrl",
)
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
parser.add_argument(
    "--deterministic",
    action="store_true",
    help="a run that was killed and resumed ends with the same numbers, to the last bit",
)
parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
parser.add_argument("--logger", default="csv", choices=["csv", "tensorboard", "wandb", "mlflow"])
args = parser.parse_args()

frames_per_batch = 1_000
minibatch_size = 64
epochs = 10
eval_every, eval_episodes, save_every = 2, 5, 10  # batches, episodes, batches
gamma, lmbda = 0.99, 0.95
random_steps = 1_000
if args.quick:
    frames_per_batch, epochs, random_steps = 500, 2, 100
if args.total_frames is None:
    args.total_frames = 2_000 if args.quick else 100_000

try:
    spaces = gym.make(args.env)
except gym.error.Error as error:
    parser.error(f"--env {args.env}: {error}")
observation_space, action_space = spaces.observation_space, spaces.action_space
spaces.close()
if not isinstance(observation_space, gym.spaces.Box) or len(observation_space.shape) != 1:
    parser.error(f"--env {args.env}: the observation is {observation_space}, not a vector (Box).")
if not isinstance(action_space, gym.spaces.Box | gym.spaces.Discrete):
    parser.error(f"--env {args.env}: the action is {action_space}, neither Box nor Discrete.")
observation_size = observation_space.shape[0]

torch.set_num_threads(1)  # networks this small gain nothing from more, and lose where CPUs are busy
torch.manual_seed(args.seed)
torch.use_deterministic_algorithms(args.deterministic)
try:
    device = torch.device(args.device)
    torch.zeros(1, device=device).item()
except (AssertionError, RuntimeError) as error:
    reason = str(error).splitlines()[0]
    parser.error(f"--device {args.device}: {reason}; --device cpu is always there.")
if args.logger != "csv" and find_spec(args.logger) is None:
    parser.error(f"--logger {args.logger} is not installed: pip install {args.logger}")
checkpoint_file = args.out / "checkpoint.pt"
if args.resume and not checkpoint_file.exists():
    parser.error(f"--resume: there is no {checkpoint_file}; run without --resume first.")


def make_env() -> TransformedEnv:
    """Return the transformed environment, its observation statistics not yet known."""
    return TransformedEnv(
        GymEnv(args.env, categorical_action_encoding=True),
        Compose(
            ObservationNorm(in_keys=["observation"]), DoubleToFloat(), RewardSum(), StepCounter()
        ),
    )


env = make_env()
env.set_seed(args.seed)
env.transform[0].init_stats(num_iter=random_steps, reduce_dim=0, cat_dim=0)


def mlp(outputs: int) -> nn.Sequential:
    """Return three hidden layers of 256 with tanh."""
    sizes = [observation_size, 256, 256, 256]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)).to(device)


if isinstance(action_space, gym.spaces.Box):
    network = nn.Sequential(mlp(2 * action_space.shape[0]), NormalParamExtractor())
    parameter_keys, distribution = ["loc", "scale"], TanhNormal
    bounds = {name: getattr(env.action_spec_unbatched.space, name) for name in ("low", "high")}
    distribution_kwargs = {name: bound.to(device) for name, bound in bounds.items()}
else:
    network = mlp(int(action_space.n))
    parameter_keys, distribution = ["logits"], torch.distributions.Categorical
    distribution_kwargs = {}

policy = ProbabilisticActor(
    TensorDictModule(network, in_keys=["observation"], out_keys=parameter_keys),
    in_keys=parameter_keys,
    distribution_class=distribution,
    distribution_kwargs=distribution_kwargs,
    return_log_prob=True,
)
critic = ValueOperator(mlp(1), in_keys=["observation"])
parameters = [*policy.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=3e-4, fused=args.engine is not None)

normalizer = None if args.baseline else RewardNormalizer(gamma)

make_gae = TorchRLGAE if args.baseline else GAE
advantage_module = make_gae(gamma=gamma, lmbda=lmbda, value_network=critic, average_gae=True)

loss_arguments: dict[str, Any] = {
    "clip_epsilon": 0.2,
    "entropy_coeff": 1e-4,
    "critic_coeff": 1.0,
    "loss_critic_type": "smooth_l1",
}
loss_module = (
    ClipPPOLoss(policy, critic, **loss_arguments)
    if args.baseline
    else DualClipPPOLoss(policy, critic, dual_clip=5.0, **loss_arguments)
)

replay_buffer = ReplayBuffer(
    storage=LazyTensorStorage(frames_per_batch, device=device),
    sampler=SamplerWithoutReplacement(),
    batch_size=minibatch_size,
)

stopper = None
if not args.baseline:
    stopper = KLEarlyStopper(0.1, replay_buffer=None if args.engine else replay_buffer)

cosine = scheduler = None
if args.baseline:
    batches = max(1, args.total_frames // frames_per_batch)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches, 0.0)
else:
    end = args.total_frames
    scheduler = ParameterScheduler(
        {
            "lr": (optimizer, InterpSchedule([(0, 3e-4), (end, 0.0)])),
            "entropy_coeff": (loss_module, InterpSchedule([(0, 1e-4), (end, 0.0)])),
        }
    )


def update_by_hand(batch: Any) -> dict[str, float]:
    """Train on one batch; return the statistics of its last minibatch, and of its episodes."""
    statistics = {"lr": float(optimizer.param_groups[0]["lr"])}
    done = batch["next", "done"].squeeze(-1)
    if done.any():
        ended = batch["next"][done]
        statistics["episode_return"] = ended["episode_reward"].mean().item()
        statistics["episode_length"] = ended["step_count"].float().mean().item()
    if normalizer is not None:
        normalizer(batch)
    if stopper is not None:
        stopper.reset()
    steps, losses = 0, TensorDict()
    for epoch in range(epochs):
        if args.baseline or epoch == 0:
            advantage_module(batch)
            replay_buffer.extend(batch.reshape(-1))
        for minibatch in replay_buffer:
            losses = loss_module(minibatch)
            if stopper is not None and stopper.update(losses):
                break
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            steps += 1
        if stopper is not None and stopper.stopped:
            break
    if scheduler is not None:
        scheduler(batch)
    if cosine is not None:
        cosine.step()
    last = {name: value.mean().item() for name, value in losses.items()}
    return statistics | {"kl": last["kl_approx"]} | last | {"steps": float(steps)}


update: Any = update_by_hand
if args.engine:
    update = PPOUpdate(
        TrainingStep(loss_module, optimizer, stopper=stopper, max_grad_norm=1.0),
        advantage=advantage_module,
        reward_normalizer=normalizer,
        scheduler=scheduler,
        epochs=epochs,
        minibatch_size=minibatch_size,
        seed=args.seed,
    )
if args.engine == "ppokit":
    standardize: Any = ObservationNormalizer(observation_size, clip=None)
    standardize.update(env.base_env.rollout(random_steps, break_when_any_done=False))
    collector: Any = GymCollector(
        args.env,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=args.total_frames,
        observation_transform=standardize.freeze(),
        device=device,
    )
else:
    to_float = TensorDictModule(lambda x: x.float(), ["observation"], ["observation"])
    standardize = TensorDictSequential(env.transform[0], to_float)
    collector = Collector(
        env,
        TensorActor(policy) if args.engine else policy,
        frames_per_batch=frames_per_batch,
        total_frames=args.total_frames,
        policy_device=device,
        storing_device=device,
        auto_register_policy_transforms=False,
    )

stateful = {"policy": policy, "critic": critic, "collector": collector}
if args.engine:
    stateful |= {"update": update}
else:
    stateful |= {"optimizer": optimizer, "normalizer": normalizer, "stopper": stopper}
    stateful |= {"scheduler": scheduler, "cosine": cosine}
stateful = {name: part for name, part in stateful.items() if part is not None}
history: list[dict[str, float]] = []
kind = [args.env, args.baseline, args.engine, args.deterministic, args.seed, args.quick]
run = {"kind": kind, "history": history}


def save() -> None:
    """Write the checkpoint, and the history as JSON."""
    save_checkpoint(checkpoint_file, stateful | run)
    unfinished = args.out / "unfinished"
    unfinished.write_text(json.dumps(history))
    os.replace(unfinished, args.out / "history.json")


def start_over() -> None:
    """Empty what is not in a checkpoint: environments, random numbers, the replay buffer."""
    seed = int(np.random.SeedSequence([args.seed, frames_done]).generate_state(1)[0]) // 2
    torch.manual_seed(seed)
    collector.set_seed(seed)
    if args.engine != "ppokit":
        collector.reset()  # GymCollector has done so
    replay_buffer.empty()


if args.resume:
    try:
        saved = load_checkpoint(checkpoint_file, stateful | run, map_location=device)
    except (EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        parser.error(f"--resume: {checkpoint_file} is damaged, or of another run: {error!r}")
    if saved["kind"] != run["kind"]:
        parser.error(f"--resume: {checkpoint_file} is of another run: {saved['kind']}.")
    history += saved["history"]
frames_done = int(history[-1]["total_frames"]) if history else 0
torch.manual_seed(args.seed + frames_done)
if frames_done >= args.total_frames:
    parser.error(f"{checkpoint_file} has {frames_done} frames already; raise --total-frames.")

evaluation_envs = gym.make_vec(args.env, eval_episodes, vectorization_mode="sync")


@torch.no_grad()
def evaluate() -> dict[str, float]:
    """Return the mean return and length of episodes under the deterministic policy."""
    observation, _ = evaluation_envs.reset(seed=args.seed + 10_000)
    running = torch.ones(eval_episodes, dtype=torch.bool)
    returns, lengths = torch.zeros(eval_episodes), torch.zeros(eval_episodes)
    while running.any():
        raw = TensorDict({"observation": torch.as_tensor(observation)}, [eval_episodes])
        batch = standardize(raw).to(device)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            action = policy(batch)["action"].cpu().numpy()
        observation, reward, terminated, truncated, _ = evaluation_envs.step(action)
        returns += torch.as_tensor(reward).float() * running
        lengths += running
        running &= ~torch.as_tensor(terminated | truncated)
    return {"eval_return": returns.mean().item(), "eval_length": lengths.mean().item()}


try:
    begin_run(args.out, "coding_ppo", resume=args.resume)
except OSError as error:
    parser.error(f"--out: {error}")
logger = get_logger(args.logger, logger_name=str(args.out / "logs"), experiment_name="coding_ppo")
assert logger is not None
collector.set_seed(args.seed + frames_done)
if args.deterministic:
    start_over()
progress = tqdm(total=args.total_frames, initial=frames_done, unit="frame")
started = time.perf_counter()

with catch_interrupt() as interrupt:
    for batch in collector:
        if args.engine and not history:
            update.validate(batch)
        frames_done += batch.numel()
        row = update(batch) | {"total_frames": float(frames_done)}
        last_batch = interrupt.pressed or frames_done >= args.total_frames
        if len(history) % eval_every == 0 or last_batch:
            row |= evaluate()
        seconds = time.perf_counter() - started
        row["frames_per_second"] = (frames_done - progress.initial) / seconds
        history.append(row)
        for name, value in row.items():
            logger.log_scalar(name, value, step=frames_done)
        progress.update(batch.numel())
        shown = {"reward": "episode_return", "eval": "eval_return", "kl": "kl"}
        shown |= {"clipped": "clip_fraction", "explained": "explained_variance"}
        latest = {k: v for past in history for k, v in past.items() if np.isfinite(v)}
        progress.set_postfix({k: f"{latest[v]:.3g}" for k, v in shown.items() if v in latest})
        is_due = len(history) % save_every == 0 or frames_done >= args.total_frames
        if is_due or (last_batch and not args.deterministic):
            save()
            if args.deterministic and not last_batch:
                start_over()
        if last_batch:
            break
collector.shutdown()
evaluation_envs.close()
progress.close()

print(
    f"Mean return of {eval_episodes} episodes after {frames_done} frames: "
    f"{history[-1]['eval_return']:.1f} ({history[-1]['eval_length']:.0f} steps)"
)
print(f"Figures: {args.out}/*.png, checkpoint: {checkpoint_file}")

pieces = "TorchRL" if args.baseline else "ppokit, --engine" if args.engine else "ppokit"
kl_limit = None if stopper is None else stopper.tolerance * stopper.target_kl
figure = plot_run(history, kl_limit=kl_limit, title=f"{args.env}, {pieces}, seed {args.seed}")
figure.savefig(args.out / "figure.png", dpi=120)

for finding in diagnose(history):
    print(finding)
