r"""
Several processes
=================

This tutorial trains one policy in several processes, here called ranks. Each rank
has its own environments. The blocks find the process group. All ranks share the
gradients, the statistics and the decision of the KL stop. On one process the same
script runs without a group.

.. code-block:: bash

    torchrun --nproc-per-node=2 tutorials/distributed_ppo.py  # one minute
    python tutorials/distributed_ppo.py                       # one process
    python tutorials/distributed_ppo.py --quick               # a few seconds
"""

# %%
# Settings
# --------
# Numbers of frames count all ranks together.
from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_run

QUICK = "--quick" in sys.argv
ENV = "CartPole-v1"
SEED = 0
RESUME = False  # True continues the run in OUT, also on another number of ranks
TOTAL_FRAMES = 4_096 if QUICK else 98_304
FRAMES_PER_BATCH, MINIBATCH, EPOCHS = 2_048, 256, 10
NUM_ENVS = 8  # of each rank
LEARNING_RATE, GAMMA = 1e-3, 0.98
OUT = Path("outputs") / "distributed_ppo"

# %%
# The process group
# -----------------
# ``torchrun`` starts the script once for each rank, and sets these variables. A rank
# that dies makes the others raise after the timeout.
rank = int(os.environ.get("RANK", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)  # small networks gain nothing from more
if ranks > 1:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))

# %%
# The update
# ----------
# All ranks seed the networks alike, so that they start with the same parameters; the
# update checks that. A minibatch is as large as on one process, and each rank has its
# share. ``TrainingStep`` averages the gradients over ranks, weighted by frames:
# ``DistributedDataParallel`` is not needed. The loss standardizes the advantage by
# mean and standard deviation of all ranks.
torch.manual_seed(SEED)
actor, critic = actor_critic(ENV)
loss = ppokit.DualClipPPOLoss(actor, critic, normalize_advantage=True)
adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
falling = ppokit.InterpSchedule([(0, LEARNING_RATE), (TOTAL_FRAMES, 0.0)])
stopper = ppokit.KLEarlyStopper(0.05)
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, adam, stopper=stopper, max_grad_norm=0.5),
    reward_normalizer=ppokit.RewardNormalizer(GAMMA),
    advantage=ppokit.GAE(gamma=GAMMA, lmbda=0.95, value_network=critic),
    scheduler=ppokit.ParameterScheduler({"lr": (adam, falling)}),
    epochs=2 if QUICK else EPOCHS,
    minibatch_size=MINIBATCH // ranks,
    seed=SEED + rank,
)

# %%
# The collector
# -------------
# Each rank has environments with a seed of its own. The normalizer merges the
# observations of all ranks after each batch.
normalizer = ppokit.ObservationNormalizer(4)
collector = ppokit.GymCollector(
    ENV,
    actor,
    num_envs=NUM_ENVS,
    frames_per_batch=FRAMES_PER_BATCH // ranks,
    observation_transform=normalizer,
)

# %%
# Checkpoints
# -----------
# The first rank writes them, and all ranks load them. The states of update and
# normalizer do not depend on the number of ranks.
checkpoint = OUT / "checkpoint.pt"
history: list[dict[str, float]] = []
parts: dict[str, Any] = {"update": update, "normalizer": normalizer}
parts |= {"history": history}
if RESUME:
    history += ppokit.load_checkpoint(checkpoint, parts)["history"]
frames = int(history[-1]["total_frames"]) if history else 0

# %%
# Training
# --------
# The statistics are means over all ranks, and ``"frames"`` is their sum. So all ranks
# leave the loop after the same batch.
seed = SEED + frames + 1_000 * rank
torch.manual_seed(seed)  # of actions, which differ between ranks
collector.set_seed(seed)
OUT.mkdir(parents=True, exist_ok=True)
bar: Any = {"total": TOTAL_FRAMES, "initial": frames, "unit": "frame"}
with tqdm(**bar, disable=rank > 0) as progress:
    for batch in collector:
        row = update(batch)
        frames += int(row["frames"])
        history.append(row | {"total_frames": float(frames)})
        progress.update(int(row["frames"]))
        if rank == 0:
            ppokit.save_checkpoint(checkpoint, parts)
        if frames >= TOTAL_FRAMES:
            break

# %%
# Result
# ------
# The first rank evaluates and draws.
if rank == 0:
    options: Any = {"episodes": 20, "num_envs": 4, "seed": 1}
    options |= {"observation_transform": normalizer}
    returns, _ = ppokit.evaluate(ENV, actor, **options)
    print(f"{ranks} rank(s): {returns.mean():.0f} of 500 after {frames} frames")
    (OUT / "history.json").write_text(json.dumps(history))
    figure = plot_run(history, title=f"{ENV}, {ranks} rank(s)")
    figure.savefig(OUT / "figure.png", dpi=120)

# %%
# No rank may leave while another one waits for a message. The first rank is still
# drawing here, and the others wait for it.
if ranks > 1:
    dist.barrier()
    dist.destroy_process_group()

# %%
# Workers on other machines collect for one process or for several ranks with
# torchrl's ``RayCollector``: see :doc:`../howto/distributed`.
#
# Next: :doc:`../howto/scale`, :doc:`../howto/reliability`.
