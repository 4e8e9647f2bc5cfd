r"""
AgileRL's PPO, put together
===========================

AgileRL's ``PPO`` is one class with thirty arguments: encoders for vectors, images and observations
of several parts, shared by actor and critic or not, an initial standard deviation of actions,
action masks, a KL target, evaluation, clones, checkpoints. Here each of them is a block of ppokit,
a module of torch or a line of the page. What is left out is its networks' mutation; tuning with a
population is in ``population.py``, and its recurrent example, Pendulum without velocity, in
``recurrent_ppo.py``.

.. code-block:: bash

    python tutorials/agilerl_ppo.py                       # LunarLanderContinuous-v3
    python tutorials/agilerl_ppo.py --settings agilerl --env LunarLander-v3    # its own example
    python tutorials/agilerl_ppo.py --env CartPole-v1 --observe both --total-frames 20000
    python tutorials/agilerl_ppo.py --env Taxi-v4         # a mask says which actions do anything
    python tutorials/agilerl_ppo.py --resume              # go on after Ctrl-C, or after a crash

A lander that lands gets 200 points or more. In ``--out`` are a checkpoint, the history and figures.
In a notebook it takes 200,000 frames by default, not 1,000,000, which is one to two minutes.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import copy
import json
import math
import os
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "RL_LOGGING_LEVEL", "WARNING"
)  # keep torchrl out of the progress bar
os.environ.setdefault(
    "SDL_VIDEODRIVER", "dummy"
)  # draw pictures where there is no screen

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import (
    AddStateIndependentNormalScale,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs import ExplorationType, GymWrapper
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    ProbabilisticActor,
    ValueOperator,
)
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
    diagnose,
    load_checkpoint,
    save_checkpoint,
)
from ppokit.plotting import PANELS, plot_frames, plot_run, record_episode
from ppokit.scripts import begin_run, catch_interrupt, count, from_zero

parser = argparse.ArgumentParser(
    description="AgileRL's PPO from ppokit's blocks."
)
parser.add_argument(
    "--env", default="LunarLanderContinuous-v3", help="a Gymnasium id"
)
parser.add_argument("--settings", default="own", choices=["own", "agilerl"])
parser.add_argument(
    "--total-frames", type=count, help="steps; 1,000,000 unless --quick"
)
parser.add_argument("--num-envs", type=count, default=16)
parser.add_argument(
    "--observe",
    default="state",
    choices=["state", "pixels", "both"],
    help="what the environment says, a picture of it, or both",
)
parser.add_argument(
    "--encoders", choices=["shared", "own"], help="of actor and critic"
)
parser.add_argument(
    "--action-std-init",
    type=float,
    help="logarithm of the first standard deviation of actions",
)
parser.add_argument(
    "--lr", type=float, help="a constant learning rate in place of the schedule"
)
parser.add_argument(
    "--target-kl",
    type=float,
    help="end an update when the mean KL exceeds this",
)
parser.add_argument(
    "--target-score",
    type=float,
    help="end training at this mean of evaluations",
)
parser.add_argument("--seed", type=from_zero, default=0)
parser.add_argument("--out", type=Path, default=Path("outputs/agilerl_ppo"))
parser.add_argument(
    "--resume", action="store_true", help="go on from the checkpoint in --out"
)
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--env", "CartPole-v1"].
argv = [] if "get_ipython" in globals() else None
args = parser.parse_args(argv)

# %%
# Settings
# --------
# Those of AgileRL's ``configs/training/ppo/ppo.yaml`` (commit 549d85e), and our own. Schedules are
# points ``(frames, value)``, a straight line between two of them. Some of AgileRL's rules are in no
# option of its class: the value is clipped by the ratio's 0.2, its loss has a factor of a half, and
# ``action_std_init`` is the logarithm of the standard deviation.
settings: dict[str, Any] = {
    "agilerl": {
        "learn_step": 2_048,
        "batch_size": 128,
        "epochs": 4,
        "lr": [(0, 1e-3)],
        "entropy_coeff": [(0, 0.01)],
        "gamma": 0.99,
        "lmbda": 0.95,
        "critic_coeff": 0.5 * 0.5,
        "clip_value": True,
        "scale_rewards": False,
        "action_std_init": 0.6,
        "target_kl": None,
        "encoders": "shared",
        "layer_norm": True,
    },
    "own": {
        "learn_step": 4_096,
        "batch_size": 256,
        "epochs": 8,
        "lr": [(0, 1e-3), (300_000, 2e-4)],
        "entropy_coeff": [(0, 0.01), (300_000, 0.0)],
        "gamma": 0.999,
        "lmbda": 0.95,
        "critic_coeff": 0.25,
        "clip_value": None,
        "scale_rewards": True,
        "action_std_init": -0.7,
        "target_kl": 0.03,
        "encoders": "own",
        "layer_norm": False,
    },
}[args.settings]
options = ("action_std_init", "target_kl", "encoders")
settings |= {
    name: value
    for name in options
    if (value := getattr(args, name)) is not None
}
if args.lr is not None:
    settings["lr"] = [(0, args.lr)]
latent = 64  # features that an encoder writes
eval_every, eval_episodes, eval_steps = (
    10_240,
    16,
    1_024,
)  # frames, episodes, steps of an episode
if args.quick:
    settings |= {"learn_step": 512, "batch_size": 64, "epochs": 2}
    eval_every, eval_episodes, eval_steps = 512, 4, 64
if args.total_frames is None:
    args.total_frames = (
        1_024 if args.quick else 1_000_000 if argv is None else 200_000
    )
if not 0 < settings["lr"][0][1] <= 1:
    parser.error(f"--lr must be from above 0 to 1, got {args.lr}.")
if settings["target_kl"] is not None and not settings["target_kl"] > 0:
    parser.error(f"--target-kl must be positive, got {settings['target_kl']}.")
if not -10 <= settings["action_std_init"] <= 10:
    parser.error(
        f"--action-std-init must be from -10 to 10, got {settings['action_std_init']}."
    )

# %%
# Environments
# ------------
# Pictures are drawn in full and made small by leaving out pixels. An action mask comes in ``info``,
# as Taxi-v4 has it, or as a part of the observation; both are entries of ppokit's batches.


class SmallPictures(gym.Wrapper):
    """Leaves out pixels, until a picture has 32 to 63 of them along its shorter side."""

    def render(self) -> Any:
        """Return the small picture."""
        picture: Any = self.env.render()
        stride = max(1, min(picture.shape[:2]) // 32)
        return picture[::stride, ::stride].copy()


def make_env(**options: Any) -> gym.Env:
    """Return an environment: its observations as ``--observe`` has them, its actions clipped."""
    if args.observe == "state":
        env = gym.make(args.env, **options)
    else:
        env = SmallPictures(gym.make(args.env, render_mode="rgb_array"))
        env = gym.wrappers.AddRenderObservation(
            env, render_only=args.observe == "pixels"
        )
    return (
        gym.wrappers.ClipAction(env)
        if isinstance(env.action_space, spaces.Box)
        else env
    )


try:
    example = make_env()
except gym.error.Error as error:
    parser.error(f"--env {args.env}: {error}")
observation_space = example.observation_space
action_space: Any = example.action_space
specs = GymWrapper(example, categorical_action_encoding=True).observation_spec
parts = dict(
    specs.items()
)  # by the names that torchrl, and so ppokit, gives them
is_masked = (
    parts.pop("action_mask", None) is not None
    or "action_mask" in example.reset()[1]
)
is_masked &= not isinstance(
    action_space, spaces.Box
)  # there a mask says nothing
example.close()
if isinstance(action_space, spaces.Box):
    can_act = len(action_space.shape) == 1
else:
    can_act = (
        isinstance(action_space, spaces.Discrete) and action_space.start == 0
    )
    if args.action_std_init is not None:
        parser.error(
            f"--action-std-init: {action_space} has no standard deviation; leave it out."
        )
if not can_act:
    parser.error(
        f"--env {args.env}: the action is {action_space}, neither a vector (Box) nor Discrete from "
        "0; wrap the environment, and register that."
    )

# %%
# Encoders
# --------
# One for each part of the observation, by its space; several are concatenated. What they write,
# ``"latent"``, is what actor and critic read.


class Picture(nn.Module):
    """Brings pictures ``[*B, H, W, C]`` of whole numbers to ``[*B, features]``."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.features = self.layers(
            torch.zeros(1, channels, height, width)
        ).shape[-1]

    def forward(self, picture: Tensor) -> Tensor:
        """Return the features."""
        shape = picture.shape[:-3]
        flat = picture.reshape(-1, *picture.shape[-3:]).permute(0, 3, 1, 2)
        return self.layers(flat.float() / 255).reshape(*shape, self.features)


class Several(nn.Module):
    """Encodes each of several inputs, and mixes what they give."""

    def __init__(self, encoders: list[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.mix = nn.Sequential(
            linear(latent * len(encoders), latent), nn.ReLU()
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return features ``[*B, latent]``."""
        pairs = zip(self.encoders, inputs, strict=True)
        return self.mix(torch.cat([encoder(x) for encoder, x in pairs], -1))


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Return a layer with orthogonal weights."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def hidden(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a layer, normalized if the settings say so, with ReLU."""
    norm = [nn.LayerNorm(outputs)] if settings["layer_norm"] else []
    return [linear(inputs, outputs), *norm, nn.ReLU()]


def encoder_of(name: str, spec: Any) -> nn.Module:
    """Return an encoder of an observation: an index, a vector or a picture."""
    if type(spec) is Categorical:
        return nn.Embedding(spec.space.n, latent)
    is_box = isinstance(spec, Bounded | Unbounded)
    if is_box and len(spec.shape) == 1 and spec.dtype.is_floating_point:
        return nn.Sequential(*hidden(spec.shape[0], 64), *hidden(64, latent))
    if is_box and len(spec.shape) == 3 and min(spec.shape[:2]) >= 9:
        picture = Picture(*spec.shape)
        return nn.Sequential(picture, *hidden(picture.features, latent))
    return parser.error(
        f"--env {args.env}: no encoder for {name!r} of {observation_space}."
    )


def make_encoder() -> TensorDictModule:
    """Return the module that reads observations and writes ``"latent"``."""
    encoders = [encoder_of(name, spec) for name, spec in parts.items()]
    network = encoders[0] if len(encoders) == 1 else Several(encoders)
    return TensorDictModule(network, list(parts), ["latent"])


# %%
# The agent
# ---------
# Actor and critic over one encoder, or one each; a normal distribution with a standard deviation
# that does not depend on the observation, a choice, or a choice among those that the mask allows.
# Over one encoder the loss takes the value head alone, which reads what the actor wrote.


class Agent:
    """Everything that learns: networks, loss, optimizer, update."""

    def __init__(self) -> None:
        encoder = make_encoder()
        if isinstance(action_space, spaces.Box):
            size = action_space.shape[0]
            scale = AddStateIndependentNormalScale(
                size, init_value=settings["action_std_init"]
            )
            head = nn.Sequential(
                *hidden(latent, 64), linear(64, size, 0.1), scale
            )
            keys: Any = ["loc", "scale"]
            distribution: Any = IndependentNormal
        else:
            head = nn.Sequential(
                *hidden(latent, 64), linear(64, int(action_space.n), 0.1)
            )
            keys, distribution = ["logits"], torch.distributions.Categorical
        in_keys = keys
        if is_masked:
            in_keys, distribution = (
                {"logits": "logits", "mask": "action_mask"},
                MaskedCategorical,
            )
        self.policy = ProbabilisticActor(
            TensorDictSequential(
                encoder, TensorDictModule(head, ["latent"], keys)
            ),
            in_keys=in_keys,
            distribution_class=distribution,
            return_log_prob=True,
        )
        value = nn.Sequential(*hidden(latent, 64), linear(64, 1, 1.0))
        value_head, is_shared = (
            ValueOperator(value, ["latent"]),
            settings["encoders"] == "shared",
        )
        self.critic = TensorDictSequential(
            encoder if is_shared else make_encoder(), value_head
        )
        self.loss = DualClipPPOLoss(
            self.policy,
            value_head if is_shared else self.critic,
            clip_epsilon=0.2,
            clip_value=settings["clip_value"],
            critic_coeff=settings["critic_coeff"],
            loss_critic_type="l2",
            entropy_coeff=settings["entropy_coeff"][0][1],
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), fused=True)
        targets = {"lr": self.optimizer, "entropy_coeff": self.loss}
        gamma, target_kl = settings["gamma"], settings["target_kl"]
        self.update = PPOUpdate(
            TrainingStep(
                self.loss,
                self.optimizer,
                stopper=target_kl
                and KLEarlyStopper(target_kl, tolerance=1.0, when="epoch"),
                max_grad_norm=0.5,
            ),
            advantage=GAE(
                gamma=gamma,
                lmbda=settings["lmbda"],
                value_network=self.critic,
                average_gae=True,
            ),
            reward_normalizer=RewardNormalizer(gamma)
            if settings["scale_rewards"]
            else None,
            scheduler=ParameterScheduler(
                {
                    name: (part, InterpSchedule(settings[name]))
                    for name, part in targets.items()
                }
            ),
            epochs=settings["epochs"],
            minibatch_size=settings["batch_size"],
            seed=args.seed,
        )

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "policy": self.policy,
            "critic": self.critic,
            "update": self.update,
        }


torch.set_num_threads(1)  # networks this small gain nothing from more
torch.manual_seed(args.seed)
agent = Agent()
collector = GymCollector(
    make_env,
    agent.policy,
    frames_per_batch=settings["learn_step"],
    num_envs=args.num_envs,
    categorical_action_encoding=True,
)

# %%
# Evaluation
# ----------
# As AgileRL has it: one episode in each of 16 environments, with actions drawn as in training. A
# second collector over the same policy is all that takes. Episodes that go on for longer than 1,024
# steps count with what they have got by then: not every environment has a time limit.


@torch.no_grad()
def evaluate(
    policy: Any, seed: int, kind: ExplorationType = ExplorationType.RANDOM
) -> float:
    """Return the mean return of the first episode of each environment."""
    running, returns = (
        torch.ones(eval_episodes, dtype=torch.bool),
        torch.zeros(eval_episodes),
    )
    options: Any = {
        "num_envs": eval_episodes,
        "frames_per_batch": 64 * eval_episodes,
    }
    options["categorical_action_encoding"] = True
    with (
        torch.random.fork_rng([]),
        GymCollector(
            make_env, policy, exploration_type=kind, **options
        ) as episodes,
    ):
        torch.manual_seed(seed)
        episodes.set_seed(seed)
        for _ in range(0, eval_steps, 64):
            batch = episodes.rollout()
            done = batch["next", "done"].squeeze(-1)
            counted = running[:, None] & (done.cumsum(1) - done.int() == 0)
            returns += (batch["next", "reward"].squeeze(-1) * counted).sum(1)
            running &= ~done.any(1)
            if not running.any():
                break
    return returns.mean().item()


# %%
# Clones and checkpoints
# ----------------------
# A clone is a deep copy: networks, optimizer and update in one go, so that what they share stays
# shared among the copies. A checkpoint holds the same, with the collector and the history.
history: list[dict[str, float]] = []
checkpoint_file = args.out / "checkpoint.pt"
asked = {name: getattr(args, name) for name in ("env", "observe", "num_envs")}
run = {"settings": settings | asked, "history": history}


def save() -> None:
    """Write the checkpoint, and the history as JSON."""
    save_checkpoint(
        checkpoint_file, agent.state | {"collector": collector} | run
    )
    unfinished = args.out / "unfinished"
    unfinished.write_text(json.dumps(history))
    os.replace(unfinished, args.out / "history.json")


if args.resume:
    if not checkpoint_file.exists():
        parser.error(
            f"--resume: there is no {checkpoint_file}; run without --resume first."
        )
    try:
        saved = load_checkpoint(
            checkpoint_file, agent.state | {"collector": collector} | run
        )
    except (
        EOFError,
        KeyError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        parser.error(
            f"--resume: {checkpoint_file} is damaged, or of another run: {error!r}"
        )
    for name, value in saved["settings"].items():
        if value != run["settings"].get(name):
            parser.error(
                f"--resume: {checkpoint_file} is of another run, with {name} {value}."
            )
    history += saved["history"]
frames_done = int(history[-1]["total_frames"]) if history else 0
if frames_done >= args.total_frames:
    parser.error(
        f"{checkpoint_file} has {frames_done} frames already; raise --total-frames."
    )

try:
    begin_run(args.out, "agilerl_ppo", resume=args.resume)
except OSError as error:
    parser.error(f"--out: {error}")

# %%
# Training
# --------
# A batch, an update; every 10,240 frames an evaluation, in episodes of its own. With
# ``--target-score`` training ends when the mean of the last ten evaluations is there. Ctrl-C (in a
# notebook: interrupt the kernel) ends it after the batch at hand, with a checkpoint and the figure;
# a second one at once.
collector.set_seed(args.seed + frames_done)
shown = {"score": "score", "return": "episode_return", "kl": "kl"}
shown |= {"explained": "explained_variance"}
seconds = (
    history[-1]["seconds"] if history else 0.0
)  # of training, without evaluation
scores = [row["score"] for row in history if "score" in row]
with (
    catch_interrupt() as interrupt,
    collector,
    tqdm(
        total=args.total_frames, initial=frames_done, unit="frame"
    ) as progress,
):
    for batch in collector:
        started = time.perf_counter()
        if not history:
            agent.update.validate(batch)
        row = agent.update(batch)
        is_due = (
            frames_done // eval_every
            < (frames_done + batch.numel()) // eval_every
        )
        frames_done += batch.numel()
        seconds += row["seconds_collecting"] + time.perf_counter() - started
        row |= {"total_frames": float(frames_done), "seconds": seconds}
        is_last = interrupt.pressed or frames_done >= args.total_frames
        if is_due or is_last:
            row["score"] = evaluate(
                agent.policy, seed=10_000 + args.seed + frames_done
            )
            scores.append(row["score"])
            if args.target_score is not None and len(scores) >= 10:
                is_last |= bool(np.mean(scores[-10:]) > args.target_score)
        history.append(row)
        progress.update(batch.numel())
        latest = {
            k: v
            for past in history[-40:]
            for k, v in past.items()
            if math.isfinite(v)
        }
        texts = {
            label: f"{latest[name]:.3g}"
            for label, name in shown.items()
            if name in latest
        }
        progress.set_postfix(texts)
        if len(history) % 10 == 0 or is_last:
            save()
        if is_last:
            break

# %%
# A clone trains on by itself, and a file has all that the agent has: both act as the agent does.
clone = copy.deepcopy(agent)
loaded = Agent()
load_checkpoint(checkpoint_file, loaded.state | {"collector": None} | run)
best_action = partial(
    evaluate, seed=args.seed, kind=ExplorationType.DETERMINISTIC
)
final, of_clone, of_loaded = map(
    best_action, (agent.policy, clone.policy, loaded.policy)
)

# %%
# The result
# ----------
print(
    f"Mean return of {eval_episodes} episodes after {frames_done} frames, the most probable "
    f"actions: {final:.1f}; of a clone {of_clone:.1f}; loaded from the checkpoint {of_loaded:.1f}"
)
print(f"Figures: {args.out}/*.png, checkpoint: {checkpoint_file}")

# %%
# The figure
# ----------
# In the first panel are episodes of training, and the evaluations.
panels: dict[str, Any] = {
    **PANELS,
    "return of an episode": ["episode_return", "score"],
}
title = f"{args.env}, settings: {args.settings}, seed {args.seed}"
plot_run(history, panels=panels, title=title).savefig(
    args.out / "figure.png", dpi=120
)
for finding in diagnose(history):
    print(finding)

# %%
# The policy at work
# ------------------
# An episode from left to right, at most 400 steps of it. Where nothing can be drawn, because pygame
# or OpenGL is missing, a warning says so.
picture_env = partial(make_env, render_mode="rgb_array")
if shown := record_episode(
    picture_env,
    agent.policy,
    steps=400,
    every=5,
    categorical_action_encoding=True,
):
    strip = plot_frames(shown, title=f"{args.env} after {frames_done} frames")
    strip.savefig(args.out / "frames.png", dpi=120)

# %%
# Against AgileRL
# ---------------
# ``configs/training/ppo/ppo.yaml`` in AgileRL 2.58: LunarLander-v3 with one agent, until the mean
# score of ten evaluations exceeds its target of 250, or for 1M frames; seconds are of training,
# without evaluation, in turn on one machine. AgileRL's processes, one for each of 16 environments,
# and its ``sync: true`` give the same scores. With AgileRL's settings the gradient's norm is 13 to
# 40, clipped to 0.5, and the critic explains 0.4 to 0.5 of the variance; our own settings scale
# rewards and have an encoder each: a norm of 0.4 to 0.5, and 0.94. The entropy coefficient ends at
# 0, because actions are drawn in evaluation, too. ``python -m tests.benchmarks.agilerl`` makes the
# figures.
#
# .. list-table::
#    :header-rows: 1
#
#    * - seeds 0, 1, 2
#      - frames to 250
#      - seconds
#      - last mean of ten
#    * - AgileRL, its example (16 processes)
#      - 942,080; not in 1M; not in 1M
#      - 136 (seed 0)
#      - 251, 169, 199
#    * - AgileRL in one process
#      - 942,080; not in 1M; not in 1M
#      - 97 (seed 0)
#      - 251, 169, 199
#    * - ``--settings agilerl --env LunarLander-v3``
#      - 512,000; 716,800; 768,000
#      - 59; 92; 90
#      - 250, 251, 250
#    * - ``--settings own --env LunarLander-v3``
#      - 299,008; 217,088; 217,088
#      - 33; 26; 24
#      - 251, 254, 253
#
# What you learned
# ----------------
# - An agent is networks, a loss, an optimizer and an update; the thirty arguments of one class are
#   arguments of these, or a line of the page.
# - Encoders are chosen by the space of an observation; images, vectors, indices and Dicts of them
#   go into the same blocks, and so does an action mask.
# - A deep copy is a clone, and a checkpoint has all that the agent has: both act as it does.
# - Scaled rewards, and an encoder for each of actor and critic, make the difference to AgileRL's
#   settings here; the norm of the gradients and the explained variance show it.
#
# Further reading
# ---------------
# - :doc:`population` (tuning while training) and :doc:`recurrent_ppo`.
# - :doc:`../howto/coming_from`, :doc:`../howto/checkpoints` and
#   :doc:`../howto/reward_normalization`.
# - Andrychowicz et al., 2021, "What Matters for On-Policy Deep Actor-Critic Methods?",
#   arXiv:2006.05990.
# - Huang and Ontañón, 2022, "A Closer Look at Invalid Action Masking in Policy Gradient
#   Algorithms", arXiv:2006.14171.
