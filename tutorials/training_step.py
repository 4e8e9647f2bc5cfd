r"""
One training step, for any loss
===============================

This tutorial replaces the five lines of an optimization step by one call,
compiles it, and measures the difference. The same call serves every TorchRL
loss. At the end a loop of your own trains CartPole with it.

.. code-block:: bash

    python tutorials/training_step.py           # about a minute
    python tutorials/training_step.py --quick   # a few seconds
"""

# %%
# Settings
# --------
from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torchrl.objectives import A2CLoss, ClipPPOLoss
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic

QUICK = "--quick" in sys.argv
ENV = "CartPole-v1"
SEED = 0
TOTAL_FRAMES = 2_048 if QUICK else 40_960
FRAMES_PER_BATCH, MINIBATCH, EPOCHS = 1_024, 256, 10  # frames, frames
LEARNING_RATE = 3e-3
REPEATS = 5 if QUICK else 300
OUT = Path("outputs") / "training_step"

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# A minibatch
# -----------
# Policy, critic, and 256 frames with their advantages.
actor, critic = actor_critic(ENV)
gae = ppokit.GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
collector = ppokit.GymCollector(
    ENV,
    actor,
    num_envs=8,
    frames_per_batch=FRAMES_PER_BATCH,
    total_frames=TOTAL_FRAMES,
)
collector.set_seed(SEED)
batches = iter(collector)
minibatch = gae(next(batches)).reshape(-1)[:MINIBATCH].exclude("next")

# %%
# The step by hand, and in one call
# ---------------------------------
# ``TrainingStep`` makes the step that the function writes out: sum of the losses,
# gradients, clipping of their norm, optimizer. Parameters are equal afterwards.


def step_by_hand(loss: Any, optimizer: Any, minibatch: Any) -> None:
    """Make an optimization step."""
    losses = loss(minibatch)
    terms = [x for name, x in losses.items() if name.startswith("loss_")]
    torch.stack(terms).sum().backward()
    torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def make_parts(kind: Any) -> tuple[Any, Any]:
    """Return a loss on copies of the networks, and an optimizer."""
    networks = copy.deepcopy(actor), copy.deepcopy(critic)
    loss = kind(*networks, functional=False)
    return loss, torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE)


by_hand, optimizer = make_parts(ClipPPOLoss)
step_by_hand(by_hand, optimizer, minibatch)
loss, optimizer = make_parts(ClipPPOLoss)
ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5)(minibatch)
pairs = zip(by_hand.parameters(), loss.parameters(), strict=True)
difference = max((x - y).abs().max().item() for x, y in pairs)
print(f"largest difference between the parameters: {difference:.1e}")

# %%
# Compiled, with any loss
# -----------------------
# ``compile=True`` makes one graph of the whole step, Adam included. The first call
# runs eagerly and creates the state of Adam. The second captures the graph, which
# takes some seconds. ``repr`` shows which path the step takes.
#
# The loss may be torchrl's or your own: a module that returns ``"loss_*"``.
# torchrl's losses are compiled with ``functional=False``: otherwise they keep the
# parameters apart from the networks.
LOSSES: dict[str, Any] = {
    "A2CLoss": A2CLoss,
    "ClipPPOLoss": ClipPPOLoss,
    "DualClipPPOLoss": ppokit.DualClipPPOLoss,
}


def milliseconds(step: Any) -> float:
    """Return the time of a call, after three others."""
    for _ in range(3):
        step(minibatch)
    started = time.perf_counter()
    for _ in range(REPEATS):
        step(minibatch)
    return 1e3 * (time.perf_counter() - started) / REPEATS


figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for row, (name, kind) in enumerate(LOSSES.items()):
    loss, adam = make_parts(kind)
    eager = milliseconds(ppokit.TrainingStep(loss, adam, max_grad_norm=0.5))
    loss, adam = make_parts(kind)
    step = ppokit.TrainingStep(loss, adam, max_grad_norm=0.5, compile=not QUICK)
    compiled = milliseconds(step)
    print(f"{name}: {eager:.2f} ms eager, {compiled:.2f} ms compiled")
    axes.barh([row - 0.2, row + 0.2], [eager, compiled], color=["C7", "C0"])
    print(step)
axes.set_yticks(range(len(LOSSES)), list(LOSSES))
axes.set(xlabel="milliseconds a step (grey: eager, blue: compiled)")

# %%
# Steps that do not happen
# ------------------------
# With a ``KLEarlyStopper`` the step asks for the KL divergence from the policy that
# collected the data. Above 1.5 times the target nothing steps until ``reset()``. A
# loss or gradient that is not finite raises FloatingPointError, and parameters do
# not change. ``nonfinite="skip"`` skips the step.
loss, adam = make_parts(ppokit.DualClipPPOLoss)
strict = ppokit.KLEarlyStopper(0.002)
step = ppokit.TrainingStep(
    loss, adam, max_grad_norm=0.5, stopper=strict, nonfinite="skip"
)
stepped = [bool(step(minibatch)["stepped"]) for _ in range(60)]
print(f"{sum(stepped)} of {len(stepped)} steps before the stop")
step.reset()
spoiled = minibatch.clone()
spoiled["advantage"][0] = torch.nan
print(f"with a NaN advantage: stepped = {bool(step(spoiled)['stepped'])}")

# %%
# A loop of your own
# ------------------
# Everything but the step is plain PyTorch here: epochs, permutation, minibatches.
# ``PPOUpdate`` is this loop with checks, statistics and more.
loss = ppokit.DualClipPPOLoss(actor, critic)
adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE)
stopper = ppokit.KLEarlyStopper(0.02)
step = ppokit.TrainingStep(
    loss, adam, max_grad_norm=0.5, stopper=stopper, compile=not QUICK
)
total = TOTAL_FRAMES // FRAMES_PER_BATCH - 1
for batch in tqdm(batches, total=total, unit="batch"):
    frames = gae(batch).reshape(-1).exclude("next")
    for _ in range(EPOCHS):
        for index in torch.randperm(len(frames)).split(MINIBATCH):
            step(frames[index])
    step.reset()
collector.shutdown()
returns, _ = ppokit.evaluate(ENV, actor, episodes=20, num_envs=4, seed=1)
print(f"return after {TOTAL_FRAMES:,} frames: {returns.mean():.0f} of 500")

# %%
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# Next: :doc:`coding_ppo`, :doc:`custom_algorithm`,
# :doc:`../blocks/training_step`.
