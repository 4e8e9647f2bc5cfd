r"""
AgileRL's PPO, put together
===========================

AgileRL's ``PPO`` is one class with thirty arguments: encoders for vectors, images and observations
of several parts, shared by actor and critic or not, an initial spread of actions, action masks, a
KL target, evaluation, clones, checkpoints. Here each of them is a block of ppokit, a module of
torch or a line of the page. What is left out is its networks' mutation; tuning with a population is
in ``population.py``, and its recurrent example, Pendulum without velocity, in ``recurrent_ppo.py``.

.. code-block:: bash

    python tutorials/agilerl_ppo.py                       # LunarLanderContinuous-v3
    python tutorials/agilerl_ppo.py --settings agilerl    # with the settings of its own example
    python tutorials/agilerl_ppo.py --env CartPole-v1 --observe both --total-frames 20000
    python tutorials/agilerl_ppo.py --env Taxi-v4         # a mask says which actions do anything
    python tutorials/agilerl_ppo.py --resume              # go on after Ctrl-C, or after a crash

A LunarLander that lands gets 200 points or more. In ``--out`` are a checkpoint, the history and a
figure.
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
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # keep torchrl out of the progress bar

import gymnasium as gym
import matplotlib
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import (
    AddStateIndependentNormalScale,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torchrl.data import Categorical
from torchrl.envs import ExplorationType, GymWrapper
from torchrl.modules import IndependentNormal, MaskedCategorical, ProbabilisticActor, ValueOperator
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    load_checkpoint,
    save_checkpoint,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

parser = argparse.ArgumentParser(description="AgileRL's PPO from ppokit's blocks.")
parser.add_argument("--env", default="LunarLanderContinuous-v3", help="a Gymnasium id")
parser.add_argument("--settings", default="own", choices=["own", "agilerl"])
parser.add_argument("--total-frames", type=int, help="environment steps; 1,000,000 unless --quick")
parser.add_argument("--num-envs", type=int, default=16)
parser.add_argument(
    "--observe",
    default="state",
    choices=["state", "pixels", "both"],
    help="what the environment says, a picture of it, or both",
)
parser.add_argument("--own-encoders", action="store_true", help="actor and critic share none")
parser.add_argument(
    "--action-std-init", type=float, help="logarithm of the first standard deviation of actions"
)
parser.add_argument("--target-kl", type=float, help="end an update when the mean KL exceeds this")
parser.add_argument("--target-score", type=float, help="end training at this mean of evaluations")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("outputs/agilerl_ppo"))
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
args = parser.parse_args()

# %%
# Settings
# --------
# Those of AgileRL's ``configs/training/ppo/ppo.yaml`` (commit 549d85e), and our own. Its value loss
# has a factor of a half, and ``action_std_init`` is the logarithm of the deviation there, too.
settings: dict[str, Any] = {
    "agilerl": {
        "learn_step": 2_048,
        "batch_size": 128,
        "lr": (1e-3, 1e-3),
        "gamma": 0.99,
        "lmbda": 0.95,
        "action_std_init": 0.6,
        "entropy_coeff": 0.01,
        "clip_value": True,
        "target_kl": None,
        "layer_norm": True,
    },
    "own": {
        "learn_step": 8_192,
        "batch_size": 128,
        "lr": (1e-3, 1e-4),
        "gamma": 0.999,
        "lmbda": 0.98,
        "action_std_init": 0.0,
        "entropy_coeff": 0.01,
        "clip_value": None,
        "target_kl": 0.03,
        "layer_norm": True,
    },
}[args.settings]
for name in ("action_std_init", "target_kl"):
    if getattr(args, name) is not None:
        settings[name] = getattr(args, name)
clip_epsilon, epochs, max_grad_norm, latent = 0.2, 4, 0.5, 64
eval_every, eval_episodes = 10_240, 16  # frames, episodes
if args.quick:
    settings |= {"learn_step": 512, "batch_size": 64}
    eval_every, eval_episodes = 512, 4
if args.total_frames is None:
    args.total_frames = 1_024 if args.quick else 1_000_000
if args.num_envs < 1 or args.total_frames < 1:
    parser.error("--num-envs and --total-frames must be at least 1.")
if settings["target_kl"] is not None and settings["target_kl"] <= 0:
    parser.error(f"--target-kl must be positive, got {settings['target_kl']}.")

# %%
# Environments
# ------------
# Masks come with the observation in ppokit, as in torchrl; AgileRL reads them from ``info``, where
# Taxi-v4 has its own. A picture is made a twentieth as large by taking every twentieth pixel.


class MaskInObservation(gym.Wrapper):
    """Moves ``info["action_mask"]`` to the observation."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        actions = env.action_space
        assert isinstance(actions, spaces.Discrete)
        self.observation_space = spaces.Dict(
            observation=env.observation_space,
            action_mask=spaces.Box(0, 1, (int(actions.n),), np.bool_),
        )

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(**options)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, with the mask of the next step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        return {"observation": observation, "action_mask": info["action_mask"].astype(bool)}


def smaller(observation: Any) -> Any:
    """Take every twentieth pixel of a picture, alone or in a Dict."""
    if isinstance(observation, dict):
        return observation | {"pixels": observation["pixels"][::20, ::20].copy()}
    return observation[::20, ::20].copy()


def make_env() -> gym.Env:
    """Return an environment: its observations as ``--observe`` has them, its actions clipped."""
    if args.observe == "state":
        env = gym.make(args.env)
    else:
        env = gym.make(args.env, render_mode="rgb_array")
        env = gym.wrappers.AddRenderObservation(env, render_only=args.observe == "pixels")
        space: Any = env.observation_space
        pictures = spaces.Box(0, 255, (space["pixels"] if args.observe == "both" else space).shape)
        shape = smaller(np.zeros(pictures.shape, np.uint8)).shape
        pictures = spaces.Box(0, 255, shape, np.uint8)
        if args.observe == "both":
            pictures = spaces.Dict({**space.spaces, "pixels": pictures})
        env = gym.wrappers.TransformObservation(env, smaller, pictures)
    if isinstance(env.action_space, spaces.Box):
        return gym.wrappers.ClipAction(env)
    return MaskInObservation(env) if "action_mask" in env.reset()[1] else env


try:
    example = GymWrapper(make_env(), categorical_action_encoding=True)
except gym.error.Error as error:
    parser.error(f"--env {args.env}: {error}")
observations = dict(example.observation_spec.items())  # as torchrl, and so ppokit, names them
action_space: Any = gym.make(args.env).action_space
example.close()
if not isinstance(action_space, spaces.Box | spaces.Discrete):
    parser.error(f"--env {args.env}: the action is {action_space}, neither Box nor Discrete.")

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
        self.features = self.layers(torch.zeros(1, channels, height, width)).shape[-1]

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
        self.mix = nn.Sequential(linear(latent * len(encoders), latent), nn.ReLU())

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
    """Return a layer, normalised if the settings say so, with ReLU."""
    norm = [nn.LayerNorm(outputs)] if settings["layer_norm"] else []
    return [linear(inputs, outputs), *norm, nn.ReLU()]


def encoder_of(name: str, spec: Any) -> nn.Module:
    """Return an encoder of an observation: an index, a vector or a picture."""
    if isinstance(spec, Categorical):
        return nn.Embedding(spec.space.n, latent)
    if len(spec.shape) == 1:
        return nn.Sequential(*hidden(spec.shape[0], 64), *hidden(64, latent))
    if len(spec.shape) == 3:
        picture = Picture(*spec.shape)
        return nn.Sequential(picture, *hidden(picture.features, latent))
    return parser.error(f"--env {args.env}: no encoder for {name!r} of shape {list(spec.shape)}.")


def make_encoder() -> TensorDictModule:
    """Return the module that reads observations and writes ``"latent"``."""
    parts = {name: spec for name, spec in observations.items() if name != "action_mask"}
    encoders = [encoder_of(name, spec) for name, spec in parts.items()]
    network = encoders[0] if len(encoders) == 1 else Several(encoders)
    return TensorDictModule(network, list(parts), ["latent"])


# %%
# The agent
# ---------
# Actor and critic over one encoder, or one each; a normal distribution with a spread that does not
# depend on the observation, a choice, or a choice among those that the mask allows.


class Agent:
    """Everything that learns: networks, loss, optimiser, update."""

    def __init__(self) -> None:
        encoder = make_encoder()
        if isinstance(action_space, spaces.Box):
            size = action_space.shape[0]
            scale = AddStateIndependentNormalScale(size, init_value=settings["action_std_init"])
            head = nn.Sequential(*hidden(latent, 64), linear(64, size, 0.1), scale)
            keys: Any = ["loc", "scale"]
            distribution: Any = IndependentNormal
        else:
            head = nn.Sequential(*hidden(latent, 64), linear(64, int(action_space.n), 0.1))
            keys, distribution = ["logits"], torch.distributions.Categorical
        in_keys = keys
        if "action_mask" in observations:
            in_keys, distribution = {"logits": "logits", "mask": "action_mask"}, MaskedCategorical
        self.policy = ProbabilisticActor(
            TensorDictSequential(encoder, TensorDictModule(head, ["latent"], keys)),
            in_keys=in_keys,
            distribution_class=distribution,
            return_log_prob=True,
        )
        value = nn.Sequential(*hidden(latent, 64), linear(64, 1, 1.0))
        self.critic = TensorDictSequential(
            make_encoder() if args.own_encoders else encoder, ValueOperator(value, ["latent"])
        )
        self.loss = DualClipPPOLoss(
            self.policy,
            self.critic,
            clip_epsilon=clip_epsilon,
            clip_value=settings["clip_value"],
            critic_coeff=0.25,  # its 0.5, and a half
            loss_critic_type="l2",
            entropy_coeff=settings["entropy_coeff"],
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), fused=True)
        rates = InterpSchedule.linear(*settings["lr"], frames=args.total_frames)
        target_kl = settings["target_kl"]
        self.update = PPOUpdate(
            self.loss,
            self.optimizer,
            advantage=GAE(
                gamma=settings["gamma"],
                lmbda=settings["lmbda"],
                value_network=self.critic,
                average_gae=True,
            ),
            stopper=target_kl and KLEarlyStopper(target_kl, tolerance=1.0, when="epoch"),
            scheduler=ParameterScheduler({"lr": (self.optimizer, rates)}),
            epochs=epochs,
            minibatch_size=settings["batch_size"],
            max_grad_norm=max_grad_norm,
            seed=args.seed,
        )

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"policy": self.policy, "critic": self.critic, "update": self.update}


torch.set_num_threads(1)  # networks this small gain nothing from more
torch.manual_seed(args.seed)
agent = Agent()
collector = GymCollector(
    make_env,
    agent.policy,
    frames_per_batch=settings["learn_step"],
    total_frames=args.total_frames,
    num_envs=args.num_envs,
    categorical_action_encoding=True,
)

# %%
# Evaluation
# ----------
# As AgileRL has it: one episode in each environment, with actions drawn as in training. A second
# collector over the same policy is all that takes; it is the caller's seeds that it plays.


@torch.no_grad()
def evaluate(policy: Any, kind: ExplorationType = ExplorationType.RANDOM) -> float:
    """Return the mean return of the first episode of each environment."""
    running, returns = torch.ones(eval_episodes, dtype=torch.bool), torch.zeros(eval_episodes)
    options: Any = {"num_envs": eval_episodes, "frames_per_batch": 64 * eval_episodes}
    options["categorical_action_encoding"] = True
    with torch.random.fork_rng():
        torch.manual_seed(args.seed + 10_000)
        with GymCollector(make_env, policy, exploration_type=kind, **options) as episodes:
            episodes.set_seed(args.seed + 10_000)
            for batch in episodes:
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
# A clone is a deep copy: networks, optimiser and update in one go, so that what they share stays
# shared among the copies. A checkpoint holds the same, with the collector and the history.
history: list[dict[str, float]] = []
checkpoint_file = args.out / "checkpoint.pt"
kind = [args.env, args.settings, args.observe, args.own_encoders]
run = {"kind": kind, "history": history}


def save() -> None:
    """Write the checkpoint, and the history for whoever wants to plot it."""
    save_checkpoint(checkpoint_file, agent.state | {"collector": collector} | run)
    unfinished = args.out / "unfinished"
    unfinished.write_text(json.dumps(history))
    os.replace(unfinished, args.out / "history.json")


if args.resume:
    if not checkpoint_file.exists():
        parser.error(f"--resume: there is no {checkpoint_file}; run without --resume first.")
    try:
        saved = load_checkpoint(checkpoint_file, agent.state | {"collector": collector} | run)
    except (KeyError, ValueError, RuntimeError) as error:
        parser.error(f"{checkpoint_file} is of another kind of run: {error}")
    if saved["kind"] != kind:
        parser.error(f"{checkpoint_file} is of another kind of run: {saved['kind']}.")
    history += saved["history"]
elif args.out.exists():
    # A new run never overwrites an old one.
    kept = next(p for n in range(1, 10**6) if not (p := Path(f"{args.out}.{n}")).exists())
    args.out.rename(kept)
    print(f"{args.out} held an earlier run; it is now {kept}.")
args.out.mkdir(parents=True, exist_ok=True)
frames_done = int(history[-1]["frames"]) if history else 0
if frames_done >= args.total_frames:
    parser.error(f"{checkpoint_file} has {frames_done} frames already; raise --total-frames.")
collector.set_seed(args.seed + frames_done)

# %%
# Training
# --------
# A batch, an update; every 10,240 frames an evaluation. With ``--target-score`` training ends when
# the mean of the last ten evaluations is there.
progress = tqdm(total=args.total_frames, initial=frames_done, unit="frame")
seconds = history[-1]["seconds"] if history else 0.0
scores = [row["score"] for row in history if "score" in row]
for batch in collector:
    started = time.perf_counter()
    if not history:
        agent.update.validate(batch)
    row = agent.update(batch)
    frames_done += batch.numel()
    seconds += row["seconds_collecting"] + time.perf_counter() - started
    row |= {"frames": float(frames_done), "seconds": seconds}
    is_last = frames_done >= args.total_frames
    if frames_done // eval_every > len(scores) or is_last:
        scores.append(evaluate(agent.policy))
        row["score"] = scores[-1]
        recent = scores[-10:]
        is_last |= args.target_score is not None and np.mean(recent) > args.target_score
        is_last &= (
            args.target_score is None or len(recent) == 10 or frames_done >= args.total_frames
        )
    history.append(row)
    progress.update(batch.numel())
    shown = {
        "score": "score",
        "return": "episode_return",
        "kl": "kl",
        "explained": "explained_variance",
    }
    latest = {k: v for past in history[-40:] for k, v in past.items()}
    progress.set_postfix({k: f"{latest[v]:.3g}" for k, v in shown.items() if v in latest})
    if len(history) % 10 == 0 or is_last:
        save()
    if is_last:
        break
progress.close()
collector.shutdown()

# %%
# A clone trains on by itself, and a file has all that the agent has: both act as the agent does.
clone = copy.deepcopy(agent)
loaded = Agent()
load_checkpoint(checkpoint_file, loaded.state | {"collector": None} | run)
best_action = partial(evaluate, kind=ExplorationType.DETERMINISTIC)
final, of_clone, of_loaded = map(best_action, (agent.policy, clone.policy, loaded.policy))

# %%
# The figure
# ----------


def draw(path: Path) -> None:
    """Draw returns, KL, explained variance and learning rate over frames."""
    panels = {
        "return": {"episode_return": "training", "score": "evaluation"},
        "KL(old || new) (nats)": {"kl": None},
        "explained variance": {"explained_variance": None},
        "learning rate": {"lr": None},
    }
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=True):
        for name, label in names.items():
            rows = [row for row in history if name in row]
            xs, ys = [row["frames"] for row in rows], [row[name] for row in rows]
            axis.plot(xs, ys, label=label, marker="." if len(rows) < 10 else None)
        axis.set_title(title)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("frames (environment steps)")
    figure.suptitle(f"{args.env}, settings: {args.settings}, seed {args.seed}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


draw(args.out / "figure.png")

# %%
# The result
# ----------
print(
    f"Mean return of {eval_episodes} episodes after {frames_done} frames, the most probable "
    f"actions: {final:.1f}; of a clone {of_clone:.1f}; loaded from the checkpoint {of_loaded:.1f}"
)
print(f"Figure: {args.out / 'figure.png'}, checkpoint: {checkpoint_file}")
