r"""
An algorithm of your own
========================

This tutorial replaces one block: Simple Policy Optimization (SPO) takes the
place of PPO's loss, in a module of thirty lines. All other blocks stay. It
trains ``InvertedDoublePendulum-v5`` with SPO and with PPO and compares them.

.. code-block:: bash

    python tutorials/custom_algorithm.py           # one to two minutes
    python tutorials/custom_algorithm.py --quick   # a few seconds
"""

# %%
# Settings
# --------
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from tqdm import tqdm

import ppokit
from ppokit.functional import clipped_critic_loss, kl_estimate
from ppokit.networks import actor_critic
from ppokit.plotting import PANELS, plot_run

QUICK = "--quick" in sys.argv
ENV = "InvertedDoublePendulum-v5"
SEED = 0
TOTAL_FRAMES = 4_000 if QUICK else 100_000
FRAMES_PER_BATCH = 2_000
GAMMA, LEARNING_RATE = 0.99, 1e-3
EPSILON = {"SPO": 0.4, "PPO": 0.2}
OUT = Path("outputs") / "custom_algorithm"

torch.set_num_threads(1)  # small networks gain nothing from more

# %%
# A loss of your own
# ------------------
# PPO clips the probability ratio :math:`\rho`. A frame beyond
# :math:`1 \pm \epsilon` has no gradient, so nothing brings its ratio back. SPO has
# a parabola with its maximum at :math:`\rho = 1 + \epsilon \, \mathrm{sign}(A)`:
#
# .. math:: \rho A - \frac{|A|}{2 \epsilon} (\rho - 1)^2
#
# (Xie et al., 2025, "Simple Policy Optimization", arXiv:2401.16025, equation 16.)
#
# ``PPOUpdate`` needs three things of a loss:
#
# - ``in_keys`` names the entries that it reads. Minibatches hold these alone.
# - It returns a TensorDict. Entries ``"loss_*"`` are summed and minimized. All
#   entries are averaged and reported. The KL stop reads ``"kl"``.
# - The networks are submodules, for the optimizer and the checkpoint.
#
# ``ppokit.functional`` has the formulas of the other losses for plain tensors.


class SPOLoss(TensorDictModuleBase):
    """The objective of SPO and the loss of the critic."""

    epsilon: Tensor

    def __init__(self, actor: Any, critic: Any, epsilon: float) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.register_buffer("epsilon", torch.tensor(epsilon))
        given = ["observation", "action", "action_log_prob"]
        self.in_keys = [*given, "advantage", "value_target"]
        self.out_keys = ["loss_objective", "loss_critic", "kl", "max_ratio"]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return losses and diagnostics of a minibatch ``[N]``."""
        tensordict = tensordict.copy()  # networks write to their input
        distribution = self.actor.get_dist(tensordict)
        log_prob = distribution.log_prob(tensordict["action"])
        # [N, 1] like the advantage; [N] and [N, 1] would broadcast to [N, N].
        log_ratio = (log_prob - tensordict["action_log_prob"]).unsqueeze(-1)
        ratio, advantage = log_ratio.exp(), tensordict["advantage"]
        penalty = advantage.abs() / (2 * self.epsilon) * (ratio - 1).square()
        value = self.critic(tensordict)["state_value"]
        target = tensordict["value_target"]
        losses = {
            "loss_objective": (penalty - ratio * advantage).mean(),
            "loss_critic": clipped_critic_loss(value, target).mean(),
        }
        kl = kl_estimate(log_ratio.detach()).mean()
        found = {"kl": kl, "max_ratio": ratio.detach().max()}
        return TensorDict(losses | found)


# %%
# The blocks around it
# --------------------
# Each block is optional and knows no other block, so you can replace any of them.


def make_update(loss: nn.Module, critic: Any) -> ppokit.PPOUpdate:
    """Return an update with this loss."""
    adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
    falling = ppokit.InterpSchedule([(0, LEARNING_RATE), (TOTAL_FRAMES, 0.0)])
    stopper = ppokit.KLEarlyStopper(target_kl=0.05)
    options: Any = {"max_grad_norm": 0.5, "compile": not QUICK}
    step = ppokit.TrainingStep(loss, adam, stopper=stopper, **options)
    return ppokit.PPOUpdate(
        step,
        reward_normalizer=ppokit.RewardNormalizer(GAMMA),
        advantage=ppokit.GAE(
            gamma=GAMMA, lmbda=0.95, value_network=critic, average_gae=True
        ),
        scheduler=ppokit.ParameterScheduler({"lr": (adam, falling)}),
        epochs=10,
        minibatch_size=100,
        seed=SEED,
    )


def make_collector(actor: Any, frames_per_batch: int, **options: Any) -> Any:
    """Return a collector that standardizes observations."""
    options["observation_transform"] = ppokit.ObservationNormalizer(9)
    return ppokit.GymCollector(
        ENV, actor, frames_per_batch=frames_per_batch, **options
    )


# %%
# Checks before training
# ----------------------
# ``update.validate(batch)`` runs each block once on the first steps of a batch and
# changes nothing. It finds what a new block forgets. Here the loss writes no KL.
actor, critic = actor_critic(ENV, squash=True)
forgetful = SPOLoss(actor, critic, EPSILON["SPO"])
forgetful.register_forward_hook(
    lambda loss, inputs, losses: losses.exclude("kl")
)
with make_collector(actor, 100) as collector:
    try:
        make_update(forgetful, critic).validate(collector.rollout())
    except KeyError as error:
        print(error.args[0])

# %%
# Training
# --------
# PPO runs on the same blocks, with the same loss of the critic, networks and seed.


def make_loss(name: str, actor: Any, critic: Any) -> nn.Module:
    """Return a loss by its name."""
    if name == "SPO":
        return SPOLoss(actor, critic, EPSILON[name])
    options: Any = {"clip_epsilon": EPSILON[name], "entropy_bonus": False}
    return ppokit.DualClipPPOLoss(actor, critic, **options)


OUT.mkdir(parents=True, exist_ok=True)
history: dict[str, list[dict[str, float]]] = {name: [] for name in EPSILON}
for name, rows in history.items():
    torch.manual_seed(SEED)
    actor, critic = actor_critic(ENV, squash=True)
    update = make_update(make_loss(name, actor, critic), critic)
    collector = make_collector(
        actor, FRAMES_PER_BATCH, num_envs=8, total_frames=TOTAL_FRAMES
    )
    collector.set_seed(SEED)
    total = TOTAL_FRAMES // FRAMES_PER_BATCH
    for batch in tqdm(collector, total=total, desc=name, unit="batch"):
        rows.append(update(batch))
    norm = collector.observation_transform
    evaluation: Any = {"episodes": 5, "observation_transform": norm}
    returns, _ = ppokit.evaluate(ENV, actor, **evaluation, seed=1)
    print(f"{name}: return {returns.mean():.0f} after {TOTAL_FRAMES:,} frames")
    parts = {"update": update, "collector": collector}
    ppokit.save_checkpoint(OUT / f"{name}.pt", parts)
(OUT / "history.json").write_text(json.dumps(history))

# %%
# Result
# ------
# The last panel shows the largest ratio in a minibatch. SPO stays near
# :math:`1 + \epsilon`, the dashed line of its colour. PPO exceeds its own line.
LARGEST = "largest ratio in a minibatch"
figure = plot_run(history, panels={**PANELS, LARGEST: ["max_ratio"]}, title=ENV)
(axis,) = (x for x in figure.axes if x.get_title() == LARGEST)
for epsilon, line in zip(EPSILON.values(), axis.lines, strict=True):
    axis.axhline(1 + epsilon, color=line.get_color(), ls="--", lw=1)
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# Next: :doc:`../blocks/ppo_update`, :doc:`../blocks/functional`.
