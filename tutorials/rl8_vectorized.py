r"""
rl8: environments as tensors
============================

`rl8 <https://github.com/theOGognf/rl8>`_ trains on thousands of environments that are one tensor:
a step moves all of them. Here is its algorithm, put together from ppokit's blocks, on its own two
examples: a cart with a pole, and a pendulum, neither of which ever ends an episode. Every option of
its ``AlgorithmConfig``, and of its recurrent flavour, is an option of this script.

.. code-block:: bash

    python tutorials/rl8_vectorized.py                      # CartPole, our settings
    python tutorials/rl8_vectorized.py --task pendulum
    python tutorials/rl8_vectorized.py --original           # rl8's settings
    python tutorials/rl8_vectorized.py --recurrent          # an LSTM, in sequences of 4
    python tutorials/rl8_vectorized.py --amp --accumulate-grads --minibatch-size 2048
    python tutorials/rl8_vectorized.py --quick              # a few seconds, to see that it runs

Figures, history and a checkpoint are written to ``--out``; ``--resume`` goes on from there.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import time
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "SDL_VIDEODRIVER", "dummy"
)  # draw pictures where there is no screen

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import (
    EnvBase,
    ExplorationType,
    InitTracker,
    set_exploration_type,
)
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from tqdm import tqdm

import ppokit
from ppokit.plotting import PANELS, plot_frames, plot_run
from ppokit.scripts import begin_run, catch_interrupt, count, from_zero

# %%
# What a task is learned with here, and what rl8 learns it with. ``minibatch_size`` counts frames;
# None is the whole batch at once.
SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {
        "num_envs": 256,
        "horizon": 64,
        "minibatch_size": 256,
        "epochs": 1,
        "lr": 2e-3,
    },
    "pendulum": {
        "num_envs": 256,
        "horizon": 128,
        "minibatch_size": 512,
        "epochs": 2,
        "lr": 1e-3,
    },
}
ORIGINAL: dict[str, dict[str, Any]] = {
    "cartpole": {"num_envs": 8_192, "horizon": 64},
    "pendulum": {
        "num_envs": 8_192,
        "horizon": 128,
        "horizons_per_env_reset": 4,
    },
}


def points(text: str) -> list[tuple[float, float]]:
    """Return the points of a schedule written as ``0:1e-3,8192:1e-4``."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return [(float(count), float(value)) for count, value in pairs]


parser = argparse.ArgumentParser(description="rl8's PPO, on ppokit's blocks.")
parser.add_argument(
    "--task", choices=["cartpole", "pendulum"], default="cartpole"
)
parser.add_argument(
    "--original",
    action="store_true",
    help="rl8's settings where none are given",
)
parser.add_argument(
    "--horizon", type=count, help="steps of each environment in a batch"
)
parser.add_argument(
    "--horizons-per-env-reset", type=int, default=1, help="-1: never reset"
)
parser.add_argument("--num-envs", type=count)
parser.add_argument(
    "--minibatch-size",
    type=count,
    help="in frames; the task's unless --original",
)
parser.add_argument(
    "--epochs", type=count, default=4, help="rl8's num_sgd_iters"
)
parser.add_argument(
    "--accumulate-grads",
    action="store_true",
    help="one optimizer step an epoch",
)
parser.add_argument(
    "--amp", action="store_true", help="bfloat16 on the CPU, float16 on CUDA"
)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument(
    "--lr-schedule", type=points, help="in rl8's counts: 0:1e-3,25600:1e-4"
)
parser.add_argument(
    "--lr-schedule-kind", choices=["step", "interp"], default="step"
)
parser.add_argument("--entropy-coeff", type=float, default=0.0)
parser.add_argument(
    "--entropy-schedule", type=points, help="in rl8's counts, as --lr-schedule"
)
parser.add_argument(
    "--entropy-schedule-kind", choices=["step", "interp"], default="step"
)
parser.add_argument("--gae-lambda", type=float, default=0.95)
parser.add_argument("--gamma", type=float, default=0.95)
parser.add_argument("--no-shuffle", action="store_true")
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument(
    "--vf-clip",
    type=float,
    default=5.0,
    help="largest loss of the critic a frame",
)
parser.add_argument(
    "--dual-clip", type=float, help="usually 5; unless given, none"
)
parser.add_argument("--vf-coeff", type=float, default=1.0)
parser.add_argument(
    "--target-kl", type=float, help="the update ends at 1.5 times that"
)
parser.add_argument("--max-grad-norm", type=float, default=5.0)
parser.add_argument("--no-normalize-advantages", action="store_true")
parser.add_argument("--no-normalize-rewards", action="store_true")
parser.add_argument(
    "--recurrent", action="store_true", help="an LSTM for actor and critic"
)
parser.add_argument(
    "--seq-len", type=count, default=4, help="steps that a gradient goes back"
)
parser.add_argument(
    "--seqs-per-state-reset", type=int, default=8, help="-1: never reset"
)
parser.add_argument(
    "--compile", action="store_true", help="compile the training step"
)
parser.add_argument("--device", default="cpu")
parser.add_argument(
    "--total-frames", type=count, help="of all environments together"
)
parser.add_argument(
    "--target", type=float, help="end where a horizon's mean return is this"
)
parser.add_argument("--seed", type=from_zero, default=0)
parser.add_argument("--out", type=Path, default=Path("outputs/rl8_vectorized"))
parser.add_argument(
    "--resume", action="store_true", help="go on from the checkpoint in --out"
)
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--task", "pendulum"].
argv = [] if "get_ipython" in globals() else None
given = parser.parse_known_args(argv)[0]
parser.set_defaults(**(ORIGINAL if given.original else SETTINGS)[given.task])
if given.quick:
    parser.set_defaults(num_envs=64, horizon=32, minibatch_size=512)
args = parser.parse_args(argv)
frames_per_batch = args.num_envs * args.horizon
total_frames = args.total_frames or frames_per_batch * (2 if args.quick else 40)
if frames_per_batch < 2:
    parser.error(
        "--num-envs 1 --horizon 1: one frame has no standard deviation; raise either."
    )
if args.horizons_per_env_reset == 0 or args.seqs_per_state_reset == 0:
    parser.error(
        "environments and states are reset after 1 or more, or with -1 never; got 0."
    )
rates = [args.lr, *(rate for _, rate in args.lr_schedule or ())]
if not all(0 <= rate <= 1 for rate in rates):
    parser.error(f"learning rates must be from 0 to 1, got {rates}.")
if args.recurrent and args.compile:
    parser.error("--compile: a loss over recurrent networks is not compiled.")
if args.accumulate_grads and args.target_kl is not None:
    parser.error(
        "--target-kl ends an update between optimizer steps; drop --accumulate-grads."
    )
try:
    device = torch.device(args.device)
    torch.zeros(1, device=device).item()
except (AssertionError, RuntimeError) as error:
    reason = str(error).splitlines()[0]
    parser.error(
        f"--device {args.device}: {reason}; --device cpu is always there."
    )

# %%
# Environments as a tensor
# ------------------------
# A torchrl environment of batch size ``[num_envs]``. Its state is ``[num_envs, 4]`` or
# ``[num_envs, 2]``, and a step is some thirty tensor operations, whatever the number of
# environments. Nothing terminates. After ``horizons_per_env_reset`` horizons all are truncated, and
# reset; in between they go on where they were, also from one batch to the next.
#
# The equations are those of gymnasium's ``CartPole-v1`` and ``Pendulum-v1``. As in rl8's examples
# the cart has three forces to choose from, the observation has the angle as cosine and sine, and
# the reward is minus the distance from rest.


def move_cart(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[N, 4]`` after an Euler step of 0.02 s, and rewards ``[N, 1]``."""
    gravity, half_length, pole, total, force, tau = (
        9.8,
        0.5,
        0.1,
        1.1,
        5.0,
        0.02,
    )
    x, speed, angle, spin = state.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    push = ((action - 1) * force + pole * half_length * spin**2 * sin) / total
    turn = (gravity * sin - cos * push) / (
        half_length * (4 / 3 - pole * cos**2 / total)
    )
    pull = push - pole * half_length * turn * cos / total
    x, speed = x + tau * speed, speed + tau * pull
    angle, spin = angle + tau * spin, spin + tau * turn
    cost = (
        (angle.cos() - 1).abs()
        + angle.sin().abs()
        + x.abs()
        + speed.abs()
        + spin.abs()
    )
    return torch.stack([x, speed, angle, spin], -1), -cost.unsqueeze(-1)


def move_pendulum(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[N, 2]`` after a step of 0.05 s, and rewards ``[N, 1]``."""
    gravity, tau = 10.0, 0.05
    angle, spin = state.unbind(-1)
    torque = action.squeeze(-1).clamp(-2.0, 2.0)
    upright = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = upright**2 + 0.1 * spin**2 + 0.001 * torque**2
    spin = (spin + (1.5 * gravity * angle.sin() + 3.0 * torque) * tau).clamp(
        -8.0, 8.0
    )
    return torch.stack([angle + spin * tau, spin], -1), -cost.unsqueeze(-1)


class VectorizedEnv(EnvBase):
    """All environments of a task in one tensor, on any device.

    Args:
        task: ``"cartpole"`` or ``"pendulum"``.
        num_envs: how many.
        max_steps: after so many steps all are truncated; None for never.
        device: of the tensors.
    """

    state: Tensor

    def __init__(
        self,
        task: str,
        num_envs: int,
        max_steps: int | None,
        device: Any = None,
    ) -> None:
        super().__init__(device=device, batch_size=[num_envs])
        self.task, self.max_steps = task, max_steps
        size = 5 if task == "cartpole" else 3
        observed = {
            "observation": Unbounded((num_envs, size)),
            "step": Unbounded((num_envs, 1)),
        }
        self.observation_spec = Composite(observed, shape=(num_envs,))
        self.action_spec = (
            Categorical(3, (num_envs,))
            if task == "cartpole"
            else Unbounded((num_envs, 1))
        )
        self.reward_spec = Unbounded((num_envs, 1))
        flags = {
            x: Binary(1, (num_envs, 1), dtype=torch.bool)
            for x in ("done", "truncated")
        }
        flags["terminated"] = flags["done"].clone()
        self.done_spec = Composite(flags, shape=(num_envs,))
        self.now = torch.zeros(num_envs, 1, device=device)
        self.never = torch.zeros(num_envs, 1, dtype=torch.bool, device=device)
        self.generator = torch.Generator(device or "cpu")
        self.state = self.draw_states()

    def draw_states(self) -> Tensor:
        """Return states as they are after a reset: near rest, or anywhere."""
        options: Any = {"generator": self.generator, "device": self.device}
        if self.task == "cartpole":
            return 0.01 * torch.randn(*self.batch_size, 4, **options)
        drawn = 2 * torch.rand(*self.batch_size, 2, **options) - 1
        return drawn * torch.tensor([math.pi, 1.0], device=self.device)

    def observe(self) -> dict[str, Any]:
        """Return what is seen of the states."""
        *others, angle, spin = self.state.unbind(-1)
        seen = torch.stack([*others, angle.cos(), angle.sin(), spin], -1)
        return {"observation": seen, "step": self.now}

    def _reset(
        self, tensordict: TensorDictBase | None = None, **_: Any
    ) -> TensorDictBase:
        fresh, ended = self.draw_states(), None
        if tensordict is not None:
            ended = tensordict.get("_reset", None)
        self.state = (
            fresh if ended is None else torch.where(ended, fresh, self.state)
        )
        self.now = (
            torch.zeros_like(self.now) if ended is None else self.now * ~ended
        )
        return TensorDict(self.observe(), self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        move = move_cart if self.task == "cartpole" else move_pendulum
        self.state, reward = move(self.state, tensordict["action"])
        self.now = self.now + 1
        ended = (
            self.never if self.max_steps is None else self.now >= self.max_steps
        )
        flags = {"done": ended, "truncated": ended, "terminated": self.never}
        out: Any = self.observe() | flags | {"reward": reward}
        return TensorDict(out, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)


# %%
# The networks
# ------------
# rl8's defaults: two hidden layers of 256 for the policy, two for the critic; or an LSTM of 256
# that both share. The loss then takes the value head alone, which reads what the actor wrote. The
# policy's last layer starts near zero, so all actions are as probable. Torques are normally
# distributed, the log standard deviation within -1 and 1. Activations are in place: at 32,768
# frames a layer's output takes 32 MiB, and another 32 MiB otherwise.


class Spread(nn.Module):
    """Splits ``[*B, 2]`` into a mean and a standard deviation between exp(-1) and exp(1)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, ``[*B, 1]``."""
        loc, log_scale = x.chunk(2, -1)
        return loc, log_scale.tanh().exp()


def make_networks(task: str) -> tuple[Any, Any, Any]:
    """Return the actor, the critic for the loss, and the whole critic."""
    inputs, outputs = (5, 3) if task == "cartpole" else (3, 2)
    last = nn.Linear(256, outputs)
    nn.init.uniform_(last.weight, -1e-3, 1e-3)
    nn.init.zeros_(last.bias)
    keys = ["logits"] if task == "cartpole" else ["loc", "scale"]
    head = [last] if task == "cartpole" else [last, Spread()]
    distribution = (
        torch.distributions.Categorical
        if task == "cartpole"
        else IndependentNormal
    )
    if args.recurrent:
        shared = recurrent_body(inputs)
        value_head = ValueOperator(nn.Linear(256, 1), ["hidden"])
        value: Any = TensorDictSequential(*shared, value_head)
        body: Any = TensorDictSequential(
            *shared, TensorDictModule(nn.Sequential(*head), ["hidden"], keys)
        )
    else:
        value = ValueOperator(
            nn.Sequential(*hidden(inputs), nn.Linear(256, 1)), ["observation"]
        )
        value_head = value
        body = TensorDictModule(
            nn.Sequential(*hidden(inputs), *head), ["observation"], keys
        )
    policy = ProbabilisticActor(
        body,
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )
    for network in (policy, value):
        network.to(device)
    return policy, value_head, value


def hidden(inputs: int) -> list[nn.Module]:
    """Return two hidden layers."""
    layers = [
        (nn.Linear(size, 256), nn.ReLU(inplace=True)) for size in (inputs, 256)
    ]
    return [part for layer in layers for part in layer]


# %%
# The recurrent flavour
# ---------------------
# rl8 sets the LSTM's state to zero after ``seqs_per_state_reset`` sequences of ``seq_len`` steps.
# Here a module before the LSTM sets both to what they are where an episode starts: ``is_init`` to
# True and the state to zero. They are stored as the LSTM saw them, and
# :class:`~ppokit.SequenceBatcher` cuts there. (rl8 counts steps from the beginning of training, and
# carries states over a reset of the environment; here steps are counted from that reset, and a
# state starts at zero with it.)


def recurrent_body(inputs: int) -> list[Any]:
    """Return the modules from the observation to what is remembered of all so far."""
    lstm = ppokit.LSTMModule(
        input_size=inputs,
        hidden_size=256,
        in_key="observation",
        out_key="hidden",
        device=device,
    )
    if args.seqs_per_state_reset < 0:
        return [lstm]
    steps = args.seq_len * args.seqs_per_state_reset
    _, *states, is_init = lstm.in_keys

    def forget(
        step: Tensor, is_init: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        is_init = is_init | (step % steps == 0)
        return is_init, *(
            state.masked_fill(is_init.unsqueeze(-1), 0) for state in states
        )

    return [
        TensorDictModule(
            forget, ["step", is_init, *states], [is_init, *states]
        ),
        lstm,
    ]


def make_env(num_envs: int, horizons: int) -> Any:
    """Return environments that are reset after so many horizons, with states if there are any."""
    max_steps = None if horizons < 0 else horizons * args.horizon
    env = VectorizedEnv(args.task, num_envs, max_steps, device)
    if not args.recurrent:
        return env
    lstm = next(x for x in actor.modules() if isinstance(x, ppokit.LSTMModule))
    return env.append_transform(InitTracker()).append_transform(
        lstm.make_tensordict_primer()
    )


# %%
# Schedules
# ---------
# A schedule of rl8's counts ``num_envs * collects``, which it calls environment transitions: the
# horizon is not in it. ppokit counts frames. So ``--lr-schedule`` takes rl8's counts, and each is
# multiplied by the horizon.


def schedule(counts: list[tuple[float, float]], kind: str) -> Any:
    """Return the schedule over frames of points in rl8's counts."""
    in_frames = [(count * args.horizon, value) for count, value in counts]
    return (ppokit.StepSchedule if kind == "step" else ppokit.InterpSchedule)(
        in_frames
    )


# %%
# The update
# ----------
# What rl8's ``Algorithm.step`` does, block by block:
#
# - rewards are divided by the standard deviation of the batch's discounted returns
#   (``statistics="batch"``), and not clipped. rl8 zeroes its buffer after each step, so that its
#   discounted return starts at 0 in every horizon; ``RewardNormalizer`` carries it where the
#   environments were not reset (they are in every horizon unless ``--horizons-per-env-reset``);
# - GAE bootstraps at the end of every horizon: it is a truncation, not the end of anything. rl8
#   evaluates the critic while it collects, ``GAE`` once in the update, on some 4,096 frames at a
#   time, whose activations stay in the cache. Advantages are normalized over the batch
#   (``average_gae``), not over a minibatch;
# - the critic's loss is clamped at ``vf_clip`` (``critic_loss_clip``), and ``dual_clip`` bounds the
#   policy's where an advantage is negative;
# - before each step of the optimizer, an update that has moved too far ends.


def make_update(actor: Any, value_head: Any, critic: Any) -> ppokit.PPOUpdate:
    """Return rl8's step."""
    entropy = args.entropy_coeff
    if args.entropy_schedule:
        entropy = max(value for _, value in args.entropy_schedule)
    loss = ppokit.DualClipPPOLoss(
        actor,
        value_head,
        clip_epsilon=args.clip,
        dual_clip=args.dual_clip,
        critic_loss_clip=args.vf_clip,
        critic_coeff=args.vf_coeff,
        entropy_bonus=entropy > 0,
        entropy_coeff=entropy,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, fused=True)
    schedules = {
        "lr": (args.lr_schedule, args.lr_schedule_kind, optimizer),
        "entropy_coeff": (
            args.entropy_schedule,
            args.entropy_schedule_kind,
            loss,
        ),
    }
    targets = {
        name: (target, schedule(counts, kind))
        for name, (counts, kind, target) in schedules.items()
        if counts
    }
    normalize = ppokit.RewardNormalizer(
        args.gamma, statistics="batch", clip=None
    )
    amp_dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    return ppokit.PPOUpdate(
        ppokit.TrainingStep(
            loss,
            optimizer,
            stopper=None
            if args.target_kl is None
            else ppokit.KLEarlyStopper(args.target_kl),
            amp_dtype=amp_dtype if args.amp else None,
            max_grad_norm=args.max_grad_norm,
            compile=args.compile,
        ),
        reward_normalizer=None if args.no_normalize_rewards else normalize,
        advantage=ppokit.GAE(
            gamma=args.gamma,
            lmbda=args.gae_lambda,
            value_network=critic,
            average_gae=not args.no_normalize_advantages,
            value_chunk_size=max(1, 4_096 // args.horizon),
        ),
        batcher=ppokit.SequenceBatcher(args.seq_len)
        if args.recurrent
        else None,
        scheduler=ppokit.ParameterScheduler(targets) if targets else None,
        epochs=args.epochs,
        minibatch_size=args.minibatch_size,
        shuffle=not args.no_shuffle,
        accumulate_grads=args.accumulate_grads,
        seed=args.seed,
    )


# %%
# Everything together
# -------------------
# torchrl's ``Collector`` steps the environments, with :class:`~ppokit.TensorActor` for the policy:
# at 1,024 environments a step costs a third more than the policy's network, the draw and the
# equations. Unsupported options raise an error here, before anything is written.
torch.set_num_threads(
    1 if frames_per_batch < 100_000 else torch.get_num_threads()
)
torch.manual_seed(args.seed)
try:
    actor, value_head, critic = make_networks(args.task)
    update = make_update(actor, value_head, critic)
    env = make_env(args.num_envs, args.horizons_per_env_reset)
    eval_env = make_env(16 if args.quick else 256, 1)
except (TypeError, ValueError) as error:
    parser.error(str(error))
policy = actor if args.recurrent else ppokit.TensorActor(actor)
collector = Collector(
    env,
    policy,
    frames_per_batch=frames_per_batch,
    total_frames=-1,
    device=device,
    auto_register_policy_transforms=False,
)

# %%
# A run is kept and resumed as in :doc:`coding_ppo`. After a resume, environments start new
# episodes; learning rate and end may change, and the other settings are those of the run.
checkpoint = args.out / "checkpoint.pt"
if args.resume and not checkpoint.exists():
    parser.error(
        f"--resume: there is no {checkpoint}; run without --resume first."
    )
history: list[dict[str, float]] = []
may_change = (
    "lr",
    "lr_schedule",
    "lr_schedule_kind",
    "total_frames",
    "target",
    "original",
)
may_change += "compile", "device", "seed", "out", "resume", "quick"
options = {
    name: value for name, value in vars(args).items() if name not in may_change
}
parts = {"update": update, "history": history, "options": options}
if args.resume:
    try:
        saved = ppokit.load_checkpoint(checkpoint, parts, map_location=device)
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
    for name, value in saved["options"].items():
        if value != options.get(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(
                f"--resume: {checkpoint} is of another run, with {option} {value}."
            )
    if not args.lr_schedule:
        update.step.optimizer.param_groups[0]["lr"] = args.lr
    history += saved["history"]
frames = int(history[-1]["total_frames"]) if history else 0
if frames >= total_frames:
    parser.error(
        f"{checkpoint} has {frames} frames already; raise --total-frames."
    )

try:
    begin_run(args.out, "rl8_vectorized", resume=args.resume)
except OSError as error:
    parser.error(f"--out: {error}")

# %%
# Evaluation
# ----------
# The most probable action, one horizon of new environments. It takes time, so a run towards a
# ``--target`` is evaluated at its end only.
eval_every, save_every = (1 if args.quick else 5), 10  # batches


def evaluate() -> float:
    """Return the mean return of a horizon under the deterministic policy."""
    eval_env.set_seed(10_000)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        rollout = eval_env.rollout(args.horizon, actor)
    return rollout["next", "reward"].sum(1).mean().item()


# %%
# Training
# --------
# Ctrl-C (in a notebook: interrupt the kernel) ends it after the batch at hand, with a checkpoint
# and the figure; a second one at once.
# ``"return"`` is the raw reward of a horizon, summed, as the policy earned it that collected it:
# what rl8 reports as ``returns/mean``; ``"seconds"`` is when it was known.
torch.manual_seed(args.seed + frames)
env.set_seed(args.seed + frames)
spent = history[-1]["seconds"] if history else 0.0
started = time.perf_counter()
with (
    catch_interrupt() as interrupt,
    tqdm(total=total_frames, initial=frames, unit="frame") as progress,
):
    for batch in collector:
        frames += batch.numel()
        row = {
            "total_frames": float(frames),
            "seconds": spent + time.perf_counter() - started,
            "return": batch["next", "reward"].sum(1).mean().item(),
        }
        reached = args.target is not None and row["return"] >= args.target
        if not history:
            update.validate(batch)
        row = update(batch) | row
        is_last = interrupt.pressed or reached or frames >= total_frames
        if is_last or (args.target is None and len(history) % eval_every == 0):
            row["eval_return"] = evaluate()
        history.append(row)
        progress.update(batch.numel())
        progress.set_postfix(
            reward=f"{row['return']:.1f}", kl=f"{row['kl']:.3g}"
        )
        if len(history) % save_every == 0 or is_last:
            ppokit.save_checkpoint(checkpoint, parts)
            (args.out / "history.json").write_text(json.dumps(history))
        if is_last:
            break
collector.shutdown()

# %%
# The figure
# ----------
# In the first panel is the mean return of a horizon: of training, whose actions are drawn, and of
# evaluation.
print(
    f"{args.task}: {history[-1]['eval_return']:.1f} a horizon after {frames} frames"
)
flavour = "LSTM" if args.recurrent else "MLP"
panels = {"mean return of a horizon": ["return", "eval_return"]}
panels |= {
    title: names
    for title, names in PANELS.items()
    if names[0] != "episode_return"
}
plot_run(
    history,
    panels=panels,
    title=f"{args.task}, {args.num_envs} environments, {flavour}, seed {args.seed}",
).savefig(args.out / "figure.png", dpi=120)
print(f"Figures: {args.out}/*.png, checkpoint: {checkpoint}")
for finding in ppokit.diagnose(history):
    print(finding)

# %%
# The policy at work
# ------------------
# Gymnasium's environment of the same name draws the states, from left to right. It needs pygame.
shown_env, shown = make_env(1, -1), []
shown_env.set_seed(10_000)
with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
    seen = shown_env.rollout(100, actor)[0]["observation"].cpu()
try:
    name = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}[args.task]
    drawn: Any = gym.make(name, render_mode="rgb_array").unwrapped
    drawn.reset()
    for *others, cos, sin, spin in seen[::3].tolist():
        drawn.state = np.array([*others, math.atan2(sin, cos), spin])
        shown.append(drawn.render())
    strip = plot_frames(shown, title=f"{args.task} after {frames} frames")
    strip.savefig(args.out / "frames.png", dpi=120)
except gym.error.DependencyNotInstalled as error:
    print(f"No pictures of the policy: {error}")

# %%
# The result
# ----------
# Against rl8 itself, on its own example, on the same machine, each in a process of its own on one
# thread (``python -m tests.benchmarks.rl8``; the page has the curves and more arms):
#
# .. list-table::
#    :header-rows: 1
#
#    * -
#      - rl8
#      - this page
#    * - 256 environments x 64 steps until a horizon's mean return is -50: frames
#      - 147,456
#      - 65,536 to 81,920
#    * - the same: seconds, median of three seeds
#      - 7.9
#      - 1.3
#    * - 1,024 x 32 with rl8's settings (``--original``): frames a second
#      - 12,739
#      - 14,231
#    * - the same, gradients accumulated over 2,048 frames
#      - 19,282
#      - 20,670
#
# The first two rows are each system's own settings: rl8 takes four steps of its optimizer a batch,
# each on the whole batch; here there are 64 on 256 frames each, in one epoch. The others do the
# same work, most of which is the networks' matrix products. On the whole batch every layer's output
# takes 32 MiB, allocated again in each step; activations in place, which rl8's are
# not, halve that, and with ``--accumulate-grads --minibatch-size 2048`` the same step stays in the
# cache. rl8 calls the critic while it collects, this page once in the update.
#
# What you learned
# ----------------
# - Thousands of environments in one tensor are a torchrl environment of that batch size; torchrl's
#   ``Collector`` steps them, and :class:`~ppokit.TensorActor` is the policy without its overhead.
# - Environments that never terminate are truncated, and the last step of a horizon bootstraps.
# - ``RewardNormalizer(statistics="batch")`` and ``critic_loss_clip`` are rl8's rules.
# - With many environments, small minibatches in one epoch learn more per second than a few steps on
#   whole batches; where a whole batch is wanted, ``accumulate_grads`` keeps it in the cache.
# - A schedule of rl8's counts steps of all environments, those of ppokit count frames.
#
# Further reading
# ---------------
# - :doc:`../howto/coming_from`, :doc:`../howto/precision_and_compile`,
#   :doc:`../howto/reward_normalization` and :doc:`../howto/sequences`.
# - Engstrom et al., 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729.
# - Ye et al., 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning",
#   arXiv:1912.09729 (dual clip).
# - Makoviychuk et al., 2021, "Isaac Gym", arXiv:2108.10470 (environments as tensors).
