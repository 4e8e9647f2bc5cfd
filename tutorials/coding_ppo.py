r"""
PPO with ppokit, one exchange at a time
=======================================

This tutorial starts from PPO on TorchRL's classes. It exchanges five lines for
blocks of ppokit, and prints a number that each exchange changes. Then it trains
``InvertedDoublePendulum-v5`` with these blocks: two poles on a cart, about
9,350 points for 1,000 steps.

.. code-block:: bash

    python tutorials/coding_ppo.py           # two to three minutes
    python tutorials/coding_ppo.py --quick   # a few seconds

Edit the variables to change the task or the settings.
"""

# %%
# Settings
# --------
from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchrl import collectors, data, envs, objectives
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_run

QUICK = "--quick" in sys.argv
ENV = "InvertedDoublePendulum-v5"
SEED = 0
TOTAL_FRAMES = 3_000 if QUICK else 100_000
BATCH, MINIBATCH = 1_000, 64  # frames
EPOCHS = 2 if QUICK else 10
LEARNING_RATE, GAMMA, LMBDA = 3e-4, 0.99, 0.95
OUT = Path("outputs") / "coding_ppo"
logging.basicConfig(format="%(message)s")
logging.getLogger("ppokit").setLevel(logging.INFO)  # reports captures

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# The loop on TorchRL's classes
# -----------------------------
# Policy and critic with three layers of 256 units, a collector, GAE, the clipped
# loss, and a replay buffer of one batch. The function makes one PPO update.
env = envs.TransformedEnv(envs.GymEnv(ENV), envs.DoubleToFloat())
env.set_seed(SEED)
actor, critic = actor_critic(env, hidden=(256, 256, 256), squash=True)
options: Any = {"frames_per_batch": BATCH, "total_frames": BATCH}
options |= {"auto_register_policy_transforms": True}
(batch,) = collectors.Collector(env, actor, **options)
of_gae: Any = {"gamma": GAMMA, "lmbda": LMBDA, "average_gae": True}
torchrl_gae = TorchRLGAE(value_network=critic, **of_gae)
torchrl_loss = objectives.ClipPPOLoss(actor, critic)
adam = torch.optim.Adam(torchrl_loss.parameters(), lr=LEARNING_RATE)
buffer = data.ReplayBuffer(
    storage=data.LazyTensorStorage(BATCH),
    sampler=data.SamplerWithoutReplacement(),
    batch_size=MINIBATCH,
)


def torchrl_update(batch: Any) -> None:
    """Make one PPO update."""
    for _ in range(EPOCHS):
        torchrl_gae(batch)
        buffer.extend(batch.reshape(-1))
        for minibatch in buffer:
            losses = torchrl_loss(minibatch)
            loss = losses["loss_objective"] + losses["loss_critic"]
            (loss + losses["loss_entropy"]).backward()
            parameters = torchrl_loss.parameters()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
            adam.zero_grad()


# %%
# Exchange 1: GAE
# ---------------
# ``ppokit.GAE`` has torchrl's arguments and keys. It evaluates the critic once
# on each observation, and has no Python loop over time.
gae = ppokit.GAE(value_network=critic, **of_gae)
for name, module in (("torchrl", torchrl_gae), ("ppokit", gae)):
    module(batch)
    started = time.perf_counter()
    advantage = module(batch)["advantage"]
    milliseconds = 1e3 * (time.perf_counter() - started)
    print(f"GAE of {name}: {milliseconds:.1f} ms, {advantage[0].item():.5f}")

# %%
# Exchange 2: scaled rewards
# --------------------------
# TorchRL has no such transform. ``RewardNormalizer`` divides the reward by the
# standard deviation of the discounted return so far, and subtracts no mean. The
# loss of the critic then has the scale of the other losses. The raw reward stays
# at ``("next", "raw_reward")``.
normalizer = ppokit.RewardNormalizer(GAMMA)
raw = gae(batch)["value_target"].mean()
scaled = gae(normalizer(batch))["value_target"].mean()
print(f"mean value target: {raw:.2f} of raw rewards, {scaled:.2f} of scaled")

# %%
# Exchange 3: the loss
# --------------------
# ``DualClipPPOLoss`` has the arguments of ``ClipPPOLoss``. With a negative
# advantage the clipped loss grows with the probability ratio, without bound. Dual
# clip bounds it. Here the ratio of one frame is 20.
loss = ppokit.DualClipPPOLoss(actor, critic, dual_clip=5.0)
frame = batch.reshape(-1)[:1].clone()
frame["advantage"] = -torch.ones(1, 1)
frame["action_log_prob"] -= torch.tensor(20.0).log()
for name, module in (("torchrl", torchrl_loss), ("ppokit", loss)):
    objective = module(frame)["loss_objective"].item()
    print(f"loss at a ratio of 20: {objective:.1f} with {name}")

# %%
# Exchange 4: a KL stop
# ---------------------
# Ten epochs are right for most batches, and too many for some. The stopper ends
# the update of a batch when the KL divergence from the policy that collected it
# exceeds 1.5 times the target. ``TrainingStep`` makes one step: loss, stop,
# gradients, clipping, optimizer. Compiled, it is one graph.
stopper = ppokit.KLEarlyStopper(0.1)
adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
step = ppokit.TrainingStep(
    loss, adam, max_grad_norm=1.0, stopper=stopper, compile=not QUICK
)
buffer.extend(batch.reshape(-1))
stepped = [step(x)["stepped"] for _ in range(EPOCHS) for x in buffer]
step.reset()
print(f"{sum(stepped)} of {len(stepped)} steps before the stop")

# %%
# Exchange 5: schedules in frames
# -------------------------------
# A schedule of ``torch.optim`` counts its own calls. ``ParameterScheduler``
# counts frames, and also drives coefficients of the loss.
falling = ppokit.InterpSchedule([(0, LEARNING_RATE), (TOTAL_FRAMES, 0.0)])
scheduler = ppokit.ParameterScheduler({"lr": (adam, falling)})
print(
    f"learning rate after half of the frames: {falling(TOTAL_FRAMES / 2):.1e}"
)

# %%
# All blocks together
# -------------------
# ``PPOUpdate`` is the loop over epochs and minibatches, made of these blocks.
# ``GymCollector`` steps the environment without TensorDicts, and standardizes
# observations by their running statistics.
update = ppokit.PPOUpdate(
    step,
    advantage=gae,
    reward_normalizer=normalizer,
    scheduler=scheduler,
    epochs=EPOCHS,
    minibatch_size=MINIBATCH,
    seed=SEED,
)
standardize = ppokit.ObservationNormalizer((9,))
collector = ppokit.GymCollector(
    ENV,
    actor,
    frames_per_batch=BATCH,
    total_frames=TOTAL_FRAMES,
    observation_transform=standardize,
    compile_policy=not QUICK,
)
collector.set_seed(SEED)
history: list[dict[str, float]] = []
for batch in tqdm(collector, total=TOTAL_FRAMES // BATCH, unit="batch"):
    history.append(update(batch))

# %%
# The result: episodes with the most probable actions, checkpoint and figure.
returns, _ = ppokit.evaluate(
    ENV, actor, episodes=10, observation_transform=standardize, seed=1
)
print(f"return after {TOTAL_FRAMES:,} frames: {returns.mean():.0f}")
OUT.mkdir(parents=True, exist_ok=True)
parts = {"update": update, "collector": collector}
ppokit.save_checkpoint(OUT / "checkpoint.pt", parts)
(OUT / "history.json").write_text(json.dumps(history))
plot_run(history, title=ENV).savefig(OUT / "figure.png", dpi=120)

# %%
# Next: :doc:`mujoco_ppo`, :doc:`checkpoints_and_resume`, :doc:`../blocks/index`.
