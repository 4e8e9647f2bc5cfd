r"""
An algorithm of your own
========================

An algorithm is ppokit's blocks with one of them replaced. Here it is the loss: Simple Policy
Optimization (SPO) takes the place of PPO's clipping, in a module of thirty lines. The blocks around
it stay as they are and know nothing of it, and training is two lines:
``for batch in collector: update(batch)``.

.. code-block:: bash

    python tutorials/custom_algorithm.py                # SPO, then PPO: a minute or two
    python tutorials/custom_algorithm.py --loss spo     # one of them
    python tutorials/custom_algorithm.py --quick        # a few seconds, to see that it runs

Both learn ``InvertedDoublePendulum-v5``: two poles on a cart, about 9,350 points for keeping them
up for 1,000 steps. Figures, history and a checkpoint of each run are written to ``--out``. The
tutorial :doc:`coding_ppo` introduces the blocks one by one, with the training loop written out.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import Tensor, nn
from torchrl.envs import ExplorationType
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from tqdm import tqdm

import ppokit
from ppokit.functional import clipped_critic_loss, kl_estimate
from ppokit.plotting import PANELS, plot_frames, plot_run, record_episode
from ppokit.scripts import (
    Interrupt,
    begin_run,
    catch_interrupt,
    count,
    from_zero,
)

parser = argparse.ArgumentParser(
    description="SPO on ppokit's blocks, beside PPO."
)
parser.add_argument(
    "--env", default="InvertedDoublePendulum-v5", help="a Gymnasium id"
)
parser.add_argument(
    "--loss", nargs="+", choices=["spo", "ppo"], default=["spo", "ppo"]
)
parser.add_argument(
    "--total-frames", type=count, help="of each run; 100,000 unless --quick"
)
parser.add_argument("--seed", type=from_zero, default=0)
parser.add_argument(
    "--out", type=Path, default=Path("outputs/custom_algorithm")
)
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--loss", "spo"].
argv = [] if "get_ipython" in globals() else None
args = parser.parse_args(argv)

frames_per_batch, eval_every = (
    (1_000, 2) if args.quick else (2_000, 5)
)  # in frames, in batches
total_frames = args.total_frames
if total_frames is None:
    total_frames = 4_000 if args.quick else 100_000
num_envs, eval_episodes = 8, 5
gamma, learning_rate = 0.99, 1e-3
epsilon = {"spo": 0.4, "ppo": 0.2}  # why they differ is told with the figure

try:
    environment = gym.make(args.env)
except gym.error.Error as error:
    parser.error(f"--env {args.env}: {error}")
spaces = environment.observation_space, environment.action_space
if not all(
    isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    for space in spaces
):
    parser.error(
        f"--env {args.env}: {spaces[0]} and {spaces[1]} are not both a vector (Box)."
    )
observation_size, action_size = map(gym.spaces.flatdim, spaces)
longest = (
    200
    if args.quick
    else (environment.spec and environment.spec.max_episode_steps) or 1_000
)
environment.close()

torch.set_num_threads(1)  # networks this small gain nothing from more

# %%
# A loss of your own
# ------------------
# PPO clips the ratio :math:`\rho` of the new policy's probability of an action to the old one's:
# beyond :math:`1 \pm \epsilon` a frame has no gradient any more, so nothing brings it back when the
# gradients of other frames push it further. SPO has a parabola instead, whose top is at
# :math:`\rho = 1 + \epsilon \, \mathrm{sign}(A)`:
#
# .. math:: \rho A - \frac{|A|}{2 \epsilon} (\rho - 1)^2
#
# (Xie et al., 2025, "Simple Policy Optimization", arXiv:2401.16025, equation 16 and theorem 5.2.)
#
# ``PPOUpdate`` asks three things of a loss:
#
# - ``in_keys`` names the entries that it reads: minibatches hold these, and little else.
# - It returns a TensorDict. The entries ``"loss_..."`` are summed and minimized; all are averaged
#   over the minibatches and reported. The KL stop below reads ``"kl"``.
# - The networks are its submodules, so that optimizer and checkpoint find them. Epsilon is a
#   buffer: it is saved, too, and ``ParameterScheduler`` could drive it.
#
# The rest is the formula. ``ppokit.functional`` has the parts of the other losses as functions of
# plain tensors; SPO takes the critic's loss from there, and the estimate of the KL divergence.


class SPOLoss(TensorDictModuleBase):
    """The objective of SPO, and the critic's loss beside it."""

    epsilon: Tensor

    def __init__(
        self, actor: ProbabilisticActor, critic: ValueOperator, epsilon: float
    ) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.register_buffer("epsilon", torch.tensor(epsilon))
        self.in_keys = [
            "observation",
            "action",
            "action_log_prob",
            "advantage",
            "value_target",
        ]
        self.out_keys = ["loss_objective", "loss_critic", "kl", "max_ratio"]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses and diagnostics of a minibatch ``[N]``."""
        tensordict = tensordict.copy()  # networks write to what they are given
        log_prob = self.actor.get_dist(tensordict).log_prob(
            tensordict["action"]
        )
        # [N, 1] as the advantage is: [N] and [N, 1] would become [N, N] without a word.
        log_ratio = (log_prob - tensordict["action_log_prob"]).unsqueeze(-1)
        ratio, advantage = log_ratio.exp(), tensordict["advantage"]
        objective = (
            ratio * advantage
            - advantage.abs() / (2 * self.epsilon) * (ratio - 1).square()
        )
        value = self.critic(tensordict)["state_value"]
        loss_critic = (
            clipped_critic_loss(value, tensordict["value_target"], kind="l2")
            / 2
        )
        losses = {
            "loss_objective": -objective.mean(),
            "loss_critic": loss_critic.mean(),
        }
        diagnostics = {
            "kl": kl_estimate(log_ratio).mean(),
            "max_ratio": ratio.max(),
        }
        return TensorDict(
            losses | {name: x.detach() for name, x in diagnostics.items()}
        )


# %%
# The networks
# ------------
# Any TensorDict modules will do; a ``ProbabilisticActor`` over plain layers is the fastest.


def make_networks() -> tuple[ProbabilisticActor, ValueOperator]:
    """Return actor and critic, each with two hidden layers of 64."""
    layers = {"num_cells": [64, 64], "activation_class": nn.Tanh}
    policy = MLP(observation_size, 2 * action_size, **layers)
    network = nn.Sequential(policy, NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(
            network, in_keys=["observation"], out_keys=["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={
            x: torch.as_tensor(getattr(spaces[1], x)) for x in ("low", "high")
        },
        return_log_prob=True,
    )
    return actor, ValueOperator(
        MLP(observation_size, 1, **layers), in_keys=["observation"]
    )


# %%
# The blocks around it
# --------------------
# ``PPOUpdate`` calls the blocks in their order. Each is optional and none knows of another, which
# is why one can be replaced:
#
# - ``RewardNormalizer`` divides rewards by the standard deviation of the returns, which brings
#   the critic's targets to about 1.
# - ``GAE`` writes ``"advantage"`` and ``"value_target"``, the advantage with mean 0 and standard
#   deviation 1.
# - ``KLEarlyStopper`` ends the update of a batch when the policy has moved too far.
# - ``ParameterScheduler`` lowers the learning rate to 0, in frames.


def make_update(loss: nn.Module, critic: ValueOperator) -> ppokit.PPOUpdate:
    """Return the update with this loss in it."""
    optimizer = torch.optim.Adam(
        loss.parameters(), lr=learning_rate, fused=True
    )
    schedule = ppokit.InterpSchedule([(0, learning_rate), (total_frames, 0.0)])
    return ppokit.PPOUpdate(
        ppokit.TrainingStep(
            loss,
            optimizer,
            stopper=ppokit.KLEarlyStopper(target_kl=0.05),
            max_grad_norm=0.5,
        ),
        reward_normalizer=ppokit.RewardNormalizer(gamma),
        advantage=ppokit.GAE(
            gamma=gamma, lmbda=0.95, value_network=critic, average_gae=True
        ),
        scheduler=ppokit.ParameterScheduler({"lr": (optimizer, schedule)}),
        epochs=10,
        minibatch_size=100,
        seed=args.seed,
    )


# %%
# Checked before it is trained
# ----------------------------
# ``update.validate(batch)`` runs every block once on the first steps of a batch, and changes
# nothing. It finds what a new block forgets: here, the KL. This prints
#
# .. code-block:: text
#
#     'kl' is not in the batch. DualClipPPOLoss writes 'kl'; for torchrl's ClipPPOLoss make the
#     KLEarlyStopper with kl_key='kl_approx', or pass the KL itself. The batch holds: loss_critic,
#     loss_objective, max_ratio.
actor, critic = make_networks()
forgetful = SPOLoss(actor, critic, epsilon["spo"])
forgetful.register_forward_hook(
    lambda loss, inputs, losses: losses.exclude("kl")
)
norm = ppokit.ObservationNormalizer(observation_size)
with ppokit.GymCollector(
    args.env, actor, frames_per_batch=100, observation_transform=norm
) as collector:
    try:
        make_update(forgetful, critic).validate(collector.rollout())
    except KeyError as error:
        print(error.args[0])

# %%
# Evaluation
# ----------
# ``ObservationNormalizer`` standardizes what the environments show, by the statistics of all that
# was collected. Evaluation looks through the same eyes, but leaves no trace in training: a second
# collector takes the most probable actions, from the same seeds each time, while the statistics are
# frozen. Of each environment the first episode counts, in the environment's own reward.


def evaluate(
    collector: ppokit.GymCollector, norm: ppokit.ObservationNormalizer
) -> float:
    """Return the mean return of one episode in each environment."""
    norm.freeze()
    collector.set_seed(10_000)  # begins new episodes
    batch = collector.rollout()
    norm.unfreeze()
    done = batch["next", "done"].int()
    of_first = done.cumsum(1) == done  # no episode has ended before this step
    return (batch["next", "reward"] * of_first).sum(1).mean().item()


# %%
# The training loop
# -----------------
# It is the two lines, and what one wants to know meanwhile. PPO runs on the same blocks, with the
# same critic loss. A checkpoint is two states: the update's (networks, epsilon, optimizer, reward
# statistics, schedule) and the collector's (observation statistics, frames so far). Ctrl-C (in a
# notebook: interrupt the kernel) ends the loop after the batch at hand, with checkpoint and figure;
# a second one at once.
def train(
    name: str, interrupt: Interrupt
) -> tuple[list[dict[str, float]], ProbabilisticActor, Any]:
    """Train with one of the losses; return the statistics of each batch, actor and norm."""
    torch.manual_seed(args.seed)
    actor, critic = make_networks()
    if name == "spo":
        loss = SPOLoss(actor, critic, epsilon["spo"])
    else:
        same = {
            "critic_coeff": 0.5,
            "loss_critic_type": "l2",
            "entropy_bonus": False,
        }
        loss = ppokit.DualClipPPOLoss(
            actor, critic, clip_epsilon=epsilon["ppo"], **same
        )
    update = make_update(loss, critic)
    norm = ppokit.ObservationNormalizer(observation_size)
    make_collector = partial(
        ppokit.GymCollector, args.env, actor, observation_transform=norm
    )
    training = {"frames_per_batch": frames_per_batch, "num_envs": num_envs}
    evaluation = {
        "frames_per_batch": eval_episodes * longest,
        "num_envs": eval_episodes,
    }
    evaluation["exploration_type"] = ExplorationType.DETERMINISTIC
    rows: list[dict[str, float]] = []
    with (
        make_collector(total_frames=total_frames, **training) as collector,
        make_collector(**evaluation) as evaluator,
        tqdm(total=total_frames, desc=name, unit="frame") as progress,
    ):
        collector.set_seed(args.seed)
        for batch in collector:
            if not rows:
                update.validate(batch)
            statistics = update(batch)
            progress.update(batch.numel())
            row = statistics | {"total_frames": float(progress.n)}
            is_last = interrupt.pressed or progress.n >= total_frames
            if len(rows) % eval_every == eval_every - 1 or is_last:
                row["eval_return"] = evaluate(evaluator, norm)
            rows.append(row)
            progress.set_postfix(
                reward=row["episode_return"], ratio=row["max_ratio"]
            )
            if is_last:
                break
        parts = {"update": update, "collector": collector}
        ppokit.save_checkpoint(args.out / f"{name}.pt", parts)
    return rows, actor, norm.freeze()


# %%
# The result
# ----------
try:
    begin_run(args.out, "custom_algorithm")
except OSError as error:
    parser.error(f"--out: {error}")
history: dict[str, list[dict[str, float]]] = {}
trained: dict[str, Any] = {}
with catch_interrupt() as interrupt:
    for name in args.loss:
        if interrupt.pressed:
            break
        history[name], *trained[name] = train(name, interrupt)
        frames, reached = (
            history[name][-1]["total_frames"],
            history[name][-1]["eval_return"],
        )
        mean = (
            f"mean return of {eval_episodes} episodes after {frames:.0f} frames"
        )
        print(f"{name.upper()}: {mean}: {reached:.1f}")
        (args.out / "history.json").write_text(json.dumps(history))

# %%
# The figure
# ----------
# In the first panel are episodes of training, whose actions are drawn, and evaluation. The last one
# is about the block that was replaced: the largest ratio in a minibatch. After its first batches
# SPO stays where its epsilon says, at :math:`1 + \epsilon`, the dashed line of its colour. PPO,
# clipped at 0.2, goes further than SPO does at 0.4, and the KL stop ends a quarter of its updates.
# So the two epsilons do not compare: at 0.2 SPO takes shorter steps, and most seeds need more than
# 100,000 frames.
largest = "largest ratio in a minibatch"
figure = plot_run(
    {name.upper(): rows for name, rows in history.items()},
    panels={**PANELS, largest: ["max_ratio"]},
    title=f"{args.env}, seed {args.seed}",
)
(axis,) = (axis for axis in figure.axes if axis.get_title() == largest)
for name, line in zip(history, axis.lines, strict=True):
    axis.axhline(1 + epsilon[name], color=line.get_color(), ls="--", lw=1)
figure.savefig(args.out / "figure.png", dpi=120)
for name, rows in history.items():
    for finding in ppokit.diagnose(rows):
        print(f"{name.upper()}: {finding}")
print(f"Figures: {args.out}/*.png, checkpoints: {args.out}/*.pt")

# %%
# The policy at work
# ------------------
# The first 100 steps of an episode of each, from left to right. Where nothing can be drawn, because
# OpenGL or pygame is missing, a warning says so.
camera: dict[str, Any] = {}
if args.env == "InvertedDoublePendulum-v5":  # whose own camera is far away
    camera["default_camera_config"] = {
        "distance": 2.5,
        "lookat": np.array([0.0, 0.0, 0.5]),
    }
picture_env = partial(gym.make, args.env, render_mode="rgb_array", **camera)
for name, (actor, norm) in trained.items():
    pictures = {"steps": 100, "every": 4, "observation_transform": norm}
    if shown := record_episode(picture_env, actor, **pictures):
        strip = plot_frames(shown, title=name.upper())
        strip.savefig(args.out / f"frames_{name}.png", dpi=120)

# %%
# What you learned
# ----------------
# - A loss of your own is a TensorDictModule: ``in_keys``, entries ``"loss_..."`` in what it
#   returns, and the networks as its submodules. :class:`~ppokit.PPOUpdate` asks for nothing else.
# - The other blocks stay as they are: reward normalizer, GAE, KL stop, schedule and collector.
# - ``update.validate(batch)`` finds what a block fails to write before anything is trained.
# - ``ppokit.functional`` has the formulas as functions of plain tensors.
# - Two algorithms are compared on the same blocks, with the same networks and seeds.
#
# Further reading
# ---------------
# - :doc:`../blocks/ppo_update` and :doc:`../blocks/functional`;
#   :doc:`../howto/composite_actions` for actions of several parts.
# - Xie et al., 2025, "Simple Policy Optimization", arXiv:2401.16025.
# - Schulman et al., 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347.
