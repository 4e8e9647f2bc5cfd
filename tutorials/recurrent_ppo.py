r"""
Recurrent PPO
=============

When an observation does not tell all, a policy has to remember. Here are tasks whose observations
have lost something, and policies with an LSTM, a GRU, a stack of frames, or nothing to remember
with. What makes the difference to :doc:`custom_algorithm` is one block,
:class:`~ppokit.SequenceBatcher`, and a network.

.. code-block:: bash

    python tutorials/recurrent_ppo.py                       # Pendulum without velocity, LSTM
    python tutorials/recurrent_ppo.py --task cartpole       # CartPole without velocities
    python tutorials/recurrent_ppo.py --task cue            # a cue, a gap, a decision
    python tutorials/recurrent_ppo.py --memory none         # or gru, or stack
    python tutorials/recurrent_ppo.py --task cue --forget   # the state is zeroed at each cut
    python tutorials/recurrent_ppo.py --quick               # a few seconds, to see that it runs

Figures, history and a checkpoint are written to ``--out``; ``--resume`` goes on from there. In a
notebook ``--total-frames`` is 73,728 by default, three quarters of Pendulum's, which takes two
minutes or less.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import json
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.envs import ExplorationType
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from tqdm import tqdm

import ppokit
from ppokit.plotting import PANELS, plot_frames, plot_run, record_episode
from ppokit.scripts import begin_run, catch_interrupt, count, from_zero

parser = argparse.ArgumentParser(
    description="PPO with memory, on ppokit's blocks."
)
parser.add_argument(
    "--task", choices=["pendulum", "cartpole", "cue"], default="pendulum"
)
parser.add_argument(
    "--memory", choices=["lstm", "gru", "stack", "none"], default="lstm"
)
parser.add_argument(
    "--seq-len", type=count, help="steps that a gradient goes back; the task's"
)
parser.add_argument(
    "--forget",
    action="store_true",
    help="zero the cue's state every seq-len steps",
)
parser.add_argument(
    "--total-frames", type=count, help="steps; the task's unless --quick"
)
parser.add_argument("--seed", type=from_zero, default=0)
parser.add_argument("--out", type=Path, default=Path("outputs/recurrent_ppo"))
parser.add_argument(
    "--resume", action="store_true", help="go on from the checkpoint in --out"
)
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--memory", "none"].
argv = [] if "get_ipython" in globals() else None
args = parser.parse_args(argv)
recurrent = args.memory in ("lstm", "gru")
if args.forget and not recurrent:
    parser.error(
        f"--forget: there is no state to forget with --memory {args.memory}."
    )
if args.forget and args.task != "cue":
    parser.error(
        "--forget: only --task cue tells the network when seq-len steps are over."
    )

# %%
# What the observations do not tell
# ---------------------------------
# Pendulum and CartPole show positions, and hide velocities (as AgileRL's benchmark does): from one
# frame does not show which way the pole falls. Two frames are enough, so a stack of them will do.
#
# In the third task it will not. At the first step a cue shows left or right; then there is nothing
# to see for a gap of 2 to 3 times ``seq_len`` steps; then a light goes on, and the action has to be
# the cue. Reward is 1 if it is, and -1 if not.


class CueEnv(gym.Env):
    """A cue, a gap of random length, and a decision.

    Observations are ``[left, right, light]``, and the number of the step in the episode.

    Args:
        shortest: least number of steps between cue and decision.
        longest: largest number, included.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(
        {
            "observation": gym.spaces.Box(0.0, 1.0, (3,), np.float32),
            "step": gym.spaces.Box(0, 2**31 - 1, (1,), np.int64),
        }
    )

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Show a new cue."""
        super().reset(seed=seed, options=options)
        self.cue = int(self.np_random.integers(2))
        self.end = (
            int(self.np_random.integers(self.shortest, self.longest + 1)) + 1
        )
        self.now = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        """Go on, and pay when the light is on."""
        ended = self.now == self.end
        reward = (1.0 if int(action) == self.cue else -1.0) if ended else 0.0
        self.now += 1
        return self._observe(), reward, ended, False, {}

    def _observe(self) -> dict[str, np.ndarray]:
        shown = np.zeros(3, np.float32)
        if self.now == 0:
            shown[self.cue] = 1.0
        shown[2] = self.now == self.end
        return {"observation": shown, "step": np.array([self.now])}


@dataclass(frozen=True)
class Task:
    """What is learned, and for how long."""

    seq_len: int
    total_frames: int
    num_envs: int
    frames_per_batch: int
    gamma: float
    learning_rate: float
    epochs: int
    minibatch_size: int
    clip_epsilon: float = 0.2
    entropy: float = 0.0
    hidden: tuple[str, list[int]] | None = (
        None  #: an environment, and what is left of it
    )


# As many whole batches as there are in 100,000 and 200,000 frames.
TASKS = {
    "pendulum": Task(
        32,
        98_304,
        8,
        2_048,
        0.9,
        5e-4,
        20,
        128,
        0.1,
        0.0,
        ("Pendulum-v1", [0, 1]),
    ),
    "cartpole": Task(
        32,
        198_656,
        8,
        2_048,
        0.98,
        1e-3,
        10,
        512,
        0.2,
        0.0,
        ("CartPole-v1", [0, 2]),
    ),
    "cue": Task(16, 196_608, 16, 4_096, 0.99, 1e-3, 5, 512, 0.2, 0.01),
}
task = TASKS[args.task]
seq_len = task.seq_len if args.seq_len is None else args.seq_len
stacked = 4


def make_env(
    evaluated: bool = False, render_mode: str | None = None
) -> gym.Env:
    """Return the environment; to be evaluated, the cue's gaps are all above 2 * seq_len."""
    if task.hidden is None:
        shortest = 2 * seq_len + 1 if evaluated else 2
        env: gym.Env = CueEnv(shortest, 3 * seq_len)
        if args.memory == "stack":
            env = gym.wrappers.TransformObservation(
                env,
                lambda shown: shown["observation"],
                env.observation_space["observation"],
            )
    else:
        name, kept = task.hidden
        env = gym.make(name, render_mode=render_mode)
        space: Any = env.observation_space
        left = gym.spaces.Box(space.low[kept], space.high[kept])
        env = gym.wrappers.TransformObservation(
            env, lambda shown: shown[kept], left
        )
    if args.memory == "stack":
        env = gym.wrappers.FrameStackObservation(env, stacked)
        env = gym.wrappers.FlattenObservation(env)
    return env


spaces = make_env()
observation_space: Any = spaces.observation_space
action_space: Any = spaces.action_space
spaces.close()
if isinstance(observation_space, gym.spaces.Dict):
    observation_space = observation_space["observation"]

# %%
# A network that remembers
# ------------------------
# :class:`~ppokit.LSTMModule` or :class:`~ppokit.GRUModule`, which are torchrl's but faster, between
# an encoder and the heads; actor and critic share both. While episodes are collected the module
# reads the state of the step before and writes the next one; in the loss and in GAE it runs over
# whole sequences, from the state that was stored at their first step. ``is_init`` tells it where an
# episode starts, and the state starts at zero.
#
# The loss takes the value head alone. It reads what the actor wrote, so the module runs once in the
# loss. GAE takes the whole critic.
#
# GymCollector finds the states of a policy and carries them. torchrl's own collectors want both in
# the environment: ``InitTracker()`` and ``lstm.make_tensordict_primer()``.
#
# With ``--forget`` the network is told that an episode starts every ``seq_len`` steps. This is what
# training is like without stored states, and shows what they are for.
cells = 64


def body() -> list[TensorDictModule]:
    """Return the modules from the observation to what is remembered of all so far."""
    size = observation_space.shape[0]
    encoder = nn.Sequential(nn.Linear(size, cells), nn.Tanh())
    modules: list[Any] = [
        TensorDictModule(encoder, ["observation"], ["features"])
    ]
    keys = {"in_key": "features", "out_key": "hidden"}
    if args.forget:
        begins = lambda is_init, step: is_init | (step % seq_len == 0)  # noqa: E731
        modules.append(
            TensorDictModule(begins, ["is_init", "step"], ["is_init"])
        )
    if args.memory == "lstm":
        modules.append(
            ppokit.LSTMModule(input_size=cells, hidden_size=cells, **keys)
        )
        # What is in the cell stays there, until the network learns what to forget.
        modules[-1].lstm.bias_ih_l0.data[cells : 2 * cells] = 1.0
    elif args.memory == "gru":
        modules.append(
            ppokit.GRUModule(input_size=cells, hidden_size=cells, **keys)
        )
    else:
        layer = nn.Sequential(nn.Linear(cells, cells), nn.Tanh())
        modules.append(TensorDictModule(layer, ["features"], ["hidden"]))
    return modules


def make_head(outputs: int) -> nn.Sequential:
    """Return what one of the networks makes of what is remembered."""
    return nn.Sequential(
        nn.Linear(cells, cells), nn.Tanh(), nn.Linear(cells, outputs)
    )


def make_networks() -> tuple[
    ProbabilisticActor, ValueOperator, TensorDictSequential
]:
    """Return actor, value head and critic; actor and critic share all but their heads."""
    shared = body()
    if isinstance(action_space, gym.spaces.Box):
        head = nn.Sequential(
            make_head(2 * action_space.shape[0]), NormalParamExtractor()
        )
        keys, distribution = ["loc", "scale"], TanhNormal
        bounds = {
            x: torch.as_tensor(getattr(action_space, x))
            for x in ("low", "high")
        }
    else:
        head = make_head(int(action_space.n))
        keys, distribution, bounds = (
            ["logits"],
            torch.distributions.Categorical,
            {},
        )
    actor = ProbabilisticActor(
        TensorDictSequential(*shared, TensorDictModule(head, ["hidden"], keys)),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    value_head = ValueOperator(make_head(1), in_keys=["hidden"])
    return actor, value_head, TensorDictSequential(*shared, value_head)


# %%
# Sequences
# ---------
# *Replaces* the slice samplers of torchrl, which show some of the frames in an epoch, and some of
# them twice. :class:`~ppokit.SequenceBatcher` cuts a batch where episodes start, and every
# ``seq_len`` steps from there: each frame is in one sequence. A gradient goes back as far as its
# sequence does. What came before is in the state with which the sequence begins.
#
# A minibatch is some of the sequences. The loss, the KL and the advantage's mean and standard
# deviation count valid frames, not padding.
batcher = ppokit.SequenceBatcher(seq_len) if recurrent else None


def make_update(
    actor: Any, value_head: Any, critic: Any, total_frames: int
) -> ppokit.PPOUpdate:
    """Return the update; but for the batcher it is what it is without memory."""
    loss = ppokit.DualClipPPOLoss(
        actor,
        value_head,
        clip_epsilon=task.clip_epsilon,
        entropy_coeff=task.entropy,
        entropy_bonus=task.entropy > 0,
        critic_coeff=0.5,
        loss_critic_type="l2",
    )
    optimizer = torch.optim.Adam(
        loss.parameters(), lr=task.learning_rate, fused=True
    )
    schedule = ppokit.InterpSchedule(
        [(0, task.learning_rate), (total_frames, 0.0)]
    )
    return ppokit.PPOUpdate(
        ppokit.TrainingStep(
            loss,
            optimizer,
            stopper=ppokit.KLEarlyStopper(0.2),
            max_grad_norm=0.5,
        ),
        reward_normalizer=ppokit.RewardNormalizer(task.gamma),
        advantage=ppokit.GAE(
            gamma=task.gamma, lmbda=0.95, value_network=critic, average_gae=True
        ),
        batcher=batcher,
        scheduler=ppokit.ParameterScheduler({"lr": (optimizer, schedule)}),
        epochs=task.epochs,
        minibatch_size=task.minibatch_size,
        seed=args.seed,
    )


# %%
# Evaluation
# ----------
# The most probable action, from the same seeds each time; one episode of each environment counts.
eval_episodes = 10 if args.quick else 400 if args.task == "cue" else 100
longest = {"pendulum": 200, "cartpole": 500, "cue": 3 * seq_len + 2}[args.task]


def evaluate(collector: ppokit.GymCollector) -> float:
    """Return the mean return of an episode each; of cues, the share of right decisions."""
    collector.set_seed(10_000)  # begins new episodes
    batch = collector.rollout()
    done = batch["next", "done"].int()
    of_first = (
        done.cumsum(1) - done == 0
    )  # no episode has ended before this step
    mean = (batch["next", "reward"] * of_first).sum(1).mean().item()
    return (mean + 1) / 2 if args.task == "cue" else mean


# %%
# Training
# --------
# Ctrl-C (in a notebook: interrupt the kernel) ends it after the batch at hand, with a checkpoint
# and the figure; a second one at once.
total_frames = args.total_frames
if total_frames is None:
    total_frames = (
        2 * task.frames_per_batch if args.quick else task.total_frames
    )
    total_frames = total_frames if argv is None else min(total_frames, 73_728)
save_every, eval_every = 10, 1 if args.quick else 5  # in batches
torch.set_num_threads(1)  # networks this small gain nothing from more
torch.manual_seed(args.seed)
checkpoint = args.out / "checkpoint.pt"
if args.resume and not checkpoint.exists():
    parser.error(
        f"--resume: there is no {checkpoint}; run without --resume first."
    )

actor, value_head, critic = make_networks()
update = make_update(actor, value_head, critic, total_frames)
collector = ppokit.GymCollector(
    make_env,
    actor,
    num_envs=task.num_envs,
    frames_per_batch=task.frames_per_batch,
    total_frames=total_frames,
)
evaluator = ppokit.GymCollector(
    lambda: make_env(evaluated=True),
    actor,
    num_envs=eval_episodes,
    frames_per_batch=eval_episodes * longest,
    exploration_type=ExplorationType.DETERMINISTIC,
)
history: list[dict[str, float]] = []
kind = [args.task, args.memory, seq_len, args.forget]
parts = {
    "update": update,
    "collector": collector,
    "history": history,
    "kind": kind,
}
if args.resume:
    try:
        saved = ppokit.load_checkpoint(checkpoint, parts)
    except (
        EOFError,
        KeyError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        parser.error(
            f"--resume: {checkpoint} is damaged, or of another run: {error!r}"
        )
    if saved["kind"] != kind:
        parser.error(
            f"--resume: {checkpoint} is of another run: {saved['kind']}."
        )
    history += saved["history"]
frames = int(history[-1]["total_frames"]) if history else 0
if frames >= total_frames:
    parser.error(
        f"{checkpoint} has {frames} frames already; raise --total-frames."
    )
collector.set_seed(args.seed + frames)
try:
    begin_run(args.out, "recurrent_ppo", resume=args.resume)
except OSError as error:
    parser.error(f"--out: {error}")
with (
    catch_interrupt() as interrupt,
    collector,
    evaluator,
    tqdm(total=total_frames, initial=frames, unit="frame") as progress,
):
    for batch in collector:
        if not history:
            update.validate(batch)
        frames += batch.numel()
        row = update(batch) | {"total_frames": float(frames)}
        is_last = interrupt.pressed or frames >= total_frames
        if len(history) % eval_every == 0 or is_last:
            row["eval_return"] = evaluate(evaluator)
        history.append(row)
        progress.update(batch.numel())
        latest = next(
            r["eval_return"] for r in reversed(history) if "eval_return" in r
        )
        progress.set_postfix(
            reward=row["episode_return"], evaluation=latest, kl=row["kl"]
        )
        if len(history) % save_every == 0 or is_last:
            ppokit.save_checkpoint(checkpoint, parts)
            (args.out / "history.json").write_text(json.dumps(history))
        if is_last:
            break

# %%
# The result
# ----------
# In the first panel are episodes of training, whose actions are drawn, and evaluation; the cue's
# evaluation is in a panel of its own, as the share of right decisions. The padded share is what the
# networks compute of sequences that are shorter than the longest of their minibatch.
print(
    f"{args.task}, {args.memory}: {history[-1]['eval_return']:.2f} after {frames} frames"
)
print(f"Figures: {args.out}/*.png, checkpoint: {checkpoint}")
panels: dict[str, Any] = {**PANELS, "padded share": ["padded"]}
if args.task == "cue":
    panels |= {"return of an episode": ["episode_return"]}
    panels = {"share of right decisions": ["eval_return"]} | panels
plot_run(
    history,
    panels=panels,
    title=f"{args.task}, memory: {args.memory}, seed {args.seed}",
).savefig(args.out / "figure.png", dpi=120)
for finding in ppokit.diagnose(history):
    print(finding)

# %%
# The policy at work
# ------------------
# An episode from left to right. What the policy sees of it has no velocity. (There is nothing to
# draw of a cue; and where pygame is missing, a warning says so.)
strip_env = partial(make_env, render_mode="rgb_array")
if task.hidden is not None and (
    shown := record_episode(strip_env, actor, every=5)
):
    strip = plot_frames(
        shown, title=f"{args.task}, {args.memory}, after {frames} frames"
    )
    strip.savefig(args.out / "frames.png", dpi=120)

# %%
# What you learned
# ----------------
# - A recurrent policy is a :class:`~ppokit.LSTMModule` or :class:`~ppokit.GRUModule` in the network
#   and a :class:`~ppokit.SequenceBatcher` in the update. The rest is as without a memory.
# - The collector stores the state at each step, so that a sequence begins with the state that the
#   policy had there, and no frame has to be left out or taken twice.
# - ``seq_len`` is how far a gradient goes back. What has to be remembered may lie further back than
#   that, as long as the state is carried over the cut (``--task cue`` with and without
#   ``--forget``).
# - Where two frames tell all, a stack of frames does as well as a memory (``--memory stack``).
#
# Further reading
# ---------------
# - :doc:`../howto/recurrent_checklist` and :doc:`../howto/sequences`;
#   :doc:`../blocks/sequence_batcher` and :doc:`../blocks/recurrent_modules`.
# - Kapturowski et al., 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning"
#   (R2D2; stored states and burn-in), ICLR 2019.
# - Ni et al., 2022, "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs",
#   arXiv:2110.05038.
# - Hausknecht and Stone, 2015, "Deep Recurrent Q-Learning for Partially Observable MDPs",
#   arXiv:1507.06527.
