r"""
Coding PPO with ppokit
======================

This is TorchRL's PPO tutorial with the blocks of ppokit in it, one at a time. Each block takes the
place of one line; what it replaces and what that buys is said where it is plugged in. With
``--baseline`` the same script runs on TorchRL's own pieces, and with ``--engine`` our collector and
our update stand for the loop that is written out here, so that all can be compared.

.. code-block:: bash

    python tutorials/coding_ppo.py                  # about three minutes on two cores
    python tutorials/coding_ppo.py --baseline       # the same loop on TorchRL's own pieces
    python tutorials/coding_ppo.py --engine         # the loop in two lines, and much faster
    python tutorials/coding_ppo.py --env CartPole-v1 --total-frames 50000
    python tutorials/coding_ppo.py --resume         # go on after Ctrl-C, or after a crash

It learns ``InvertedDoublePendulum-v5``: two poles on a cart, about 9,350 points for keeping them up
for 1,000 steps. Everything is written to ``--out``: a checkpoint, figures, and the logs. In a
notebook it takes 40,000 frames by default, not 100,000, which is about a minute and a half.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import time
from functools import partial
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
from ppokit.plotting import plot_frames, plot_run, record_episode
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
# A notebook has no command line. There options are written here, as ["--env", "CartPole-v1"].
argv = [] if "get_ipython" in globals() else None
args = parser.parse_args(argv)

frames_per_batch = 1_000
minibatch_size = 64
epochs = 10
eval_every, eval_episodes, save_every = 2, 5, 10  # batches, episodes, batches
gamma, lmbda = 0.99, 0.95
random_steps = 1_000
if args.quick:
    frames_per_batch, epochs, random_steps = 500, 2, 100
if args.total_frames is None:
    args.total_frames = 2_000 if args.quick else 100_000 if argv is None else 40_000

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

# %%
# The environment
# ---------------
# As in TorchRL's tutorial: observations are standardized with the statistics of a random policy.
# ``RewardSum`` adds up the environment's own reward; it stands before any normalization, so
# the returns that are shown are raw ones.


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

# %%
# The networks
# ------------
# A policy for either kind of action space: TanhNormal for a Box, Categorical for a Discrete one.


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

# %%
# Block 1: the reward normalizer
# ------------------------------
# *Replaces nothing: TorchRL has no reward scaling by returns.* PPO's critic and its clipped loss
# are tuned to returns of about 1; here they reach several hundred. The normalizer divides the
# reward by the standard deviation of the discounted return seen so far. It never subtracts a mean,
# which would change what is optimal. The raw reward stays in the batch, at
# ``("next", "raw_reward")``.
normalizer = None if args.baseline else RewardNormalizer(gamma)

# %%
# Block 2: GAE
# ------------
# *Replaces* ``torchrl.objectives.value.GAE``. Same arguments, same keys. It evaluates the critic on
# the observations once instead of on observations and next observations, and has no Python loop
# over time.
make_gae = TorchRLGAE if args.baseline else GAE
advantage_module = make_gae(gamma=gamma, lmbda=lmbda, value_network=critic, average_gae=True)

# %%
# Block 3: the loss
# -----------------
# *Replaces* ``torchrl.objectives.ClipPPOLoss``. Dual clip bounds the loss of actions that turned
# out bad but became more probable: there the clipped loss grows without bound. The
# loss also writes ``"kl"``, an estimate of the KL divergence that is never negative, for the next
# block.
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

# %%
# The replay buffer holds one batch, and is seen without replacement: an epoch is each frame once.
replay_buffer = ReplayBuffer(
    storage=LazyTensorStorage(frames_per_batch, device=device),
    sampler=SamplerWithoutReplacement(),
    batch_size=minibatch_size,
)

# %%
# Block 4: the KL stop
# --------------------
# *Replaces nothing: TorchRL's* ``EarlyStopping`` *ends training, not the update of one batch.* Ten
# epochs are right for most batches and too many for some. When the KL divergence between the policy
# and the one that collected the batch exceeds 1.5 times the target, the rest of the update is
# skipped. It knows the buffer, because leaving a loop over it early would otherwise make the next
# batch be seen in part. Targets between 0.01 and 0.1 are usual; these networks move fast, and at
# 0.02 two or three minibatches would end every update.
stopper = None
if not args.baseline:
    stopper = KLEarlyStopper(0.1, replay_buffer=None if args.engine else replay_buffer)

# %%
# Block 5: schedules
# ------------------
# *Replaces* ``torch.optim.lr_scheduler.CosineAnnealingLR``. Schedules are written in frames, not in
# calls of ``step()``, so they mean the same whatever the batch size; and they drive anything: here
# the learning rate and the entropy coefficient.
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

# %%
# The update, written out
# -----------------------
# Normalize the reward once, then epochs of minibatches. TorchRL's tutorial computes the advantage
# again in every epoch, with the current critic; here it is computed once, as in the PPO paper.


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


# %%
# The engine
# ----------
# With ``--engine``, two objects stand for all of that. :class:`~ppokit.PPOUpdate` is the function
# above, made of the same blocks: it shuffles frames into minibatches without a replay buffer, reads
# the statistics of all minibatches once per update, and checks on the first batch that every block
# finds what it needs. :class:`~ppokit.GymCollector` steps the environment without a TensorDict per
# step, and yields what torchrl's ``Collector`` yields. Either goes without the other: ``--engine
# torchrl`` has the update with torchrl's collector, and there :class:`~ppokit.TensorActor`, the
# same policy without a distribution and TensorDicts of its own in each step.
#
# The collector standardizes observations itself. Here it does so with the statistics of a random
# policy, as above; without ``freeze()`` they would become those of all that is collected.
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

# %%
# Checkpoints
# -----------
# Everything that has state, and what was measured so far, in one file that is replaced at once: a
# run that is killed while it saves leaves the last good one.
#
# What no file can hold is where the simulators are. So a resumed run begins new episodes, and is
# another run than the one that was not interrupted. With ``--deterministic`` that one begins new
# episodes after each checkpoint, too, and both draw them from the seed and the number of frames:
# they end with the same parameters, to the last bit.
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

# %%
# Evaluation
# ----------
# The most probable action, in a few episodes at once, in the environment's own reward.
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


# %%
# The training loop
# -----------------
# Ctrl-C (in a notebook: interrupt the kernel) ends it after the batch at hand, with a checkpoint
# and the figure; a second one at once. (With ``--deterministic`` without a checkpoint: these are
# where an uninterrupted run has them.)
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

# %%
# The loop is the same for each collector and each update. Figures and :func:`~ppokit.diagnose` read
# ``"total_frames"`` of a row.
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

# %%
# The result
# ----------
# The last evaluation: the most probable action, in the environment's own reward.
print(
    f"Mean return of {eval_episodes} episodes after {frames_done} frames: "
    f"{history[-1]['eval_return']:.1f} ({history[-1]['eval_length']:.0f} steps)"
)
print(f"Figures: {args.out}/*.png, checkpoint: {checkpoint_file}")

# %%
# The figure
# ----------
# :func:`~ppokit.plotting.plot_run` draws the statistics that it finds in the history. Two lines in
# the first two panels are episodes of training, whose actions are drawn, and evaluation. In the
# panel of the KL divergence a dashed line is the limit of the KL stop.
pieces = "TorchRL" if args.baseline else "ppokit, --engine" if args.engine else "ppokit"
kl_limit = None if stopper is None else stopper.tolerance * stopper.target_kl
figure = plot_run(history, kl_limit=kl_limit, title=f"{args.env}, {pieces}, seed {args.seed}")
figure.savefig(args.out / "figure.png", dpi=120)

# %%
# What the numbers of the last updates mean, as far as a rule knows it. Nothing is printed where no
# rule finds anything wrong.
for finding in diagnose(history):
    print(finding)

# %%
# The policy at work
# ------------------
# The first 100 steps of an episode, from left to right. Where nothing can be drawn, because OpenGL
# or pygame is missing, a warning says so and there is no strip.
camera: dict[str, Any] = {}
if args.env == "InvertedDoublePendulum-v5":  # whose own camera is far away
    camera["default_camera_config"] = {"distance": 2.5, "lookat": np.array([0.0, 0.0, 0.5])}
frames = record_episode(
    partial(gym.make, args.env, render_mode="rgb_array", **camera),
    policy,
    steps=100,
    every=4,
    observation_transform=standardize,
    device=device,
)
if frames:
    strip = plot_frames(frames, title=f"{args.env} after {frames_done} frames")
    strip.savefig(args.out / "frames.png", dpi=120)

# %%
# What you learned
# ----------------
# - Each block takes the place of one line of a TorchRL loop, reads and writes the same keys, and
#   works without the others.
# - The reward normalizer brings returns to a scale that the critic's loss and the clipped objective
#   are tuned to; what is reported stays the raw return.
# - The KL stop ends an update when the policy has moved far enough, and leaves the replay buffer so
#   that the next batch is seen whole.
# - Schedules are in frames, so that they mean the same for every batch size.
# - ``--engine`` is the same algorithm in two objects, :class:`~ppokit.GymCollector` and
#   :class:`~ppokit.PPOUpdate`.
#
# Further reading
# ---------------
# - The blocks one by one: :doc:`../blocks/index`. How a KL stop is chosen:
#   :doc:`../howto/which_kl_stop`. Where rewards are normalized:
#   :doc:`../howto/reward_normalization`. What a checkpoint holds: :doc:`../howto/checkpoints`.
# - Next: a loss of your own, :doc:`custom_algorithm`; policies with a memory, :doc:`recurrent_ppo`.
# - Schulman et al., 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347.
# - Schulman et al., 2016, "High-Dimensional Continuous Control Using Generalized Advantage
#   Estimation", arXiv:1506.02438.
# - Engstrom et al., 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729 (the
#   scaling of rewards). Ye et al., 2020, arXiv:1912.09729 (dual clip).
