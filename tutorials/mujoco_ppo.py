r"""
PPO on MuJoCo
=============

This tutorial trains PPO on any MuJoCo task of Gymnasium with one setting. The page
:doc:`../benchmarks/mujoco` has its scores on nine tasks, beside those of other libraries.

.. code-block:: bash

    python tutorials/mujoco_ppo.py           # 1,000,000 frames: 5 to 20 minutes on one core
    python tutorials/mujoco_ppo.py --quick   # a few seconds, to see that it runs

Edit the variables at the top to change the task or the setting. Results are written to ``OUT``.
"""

# %%
# Settings
# --------
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_frames, plot_run, record_episode

QUICK = "--quick" in sys.argv
ENV = "Hopper-v5"
SEED = 0
RESUME = False  # continue the run in OUT
TOTAL_FRAMES = 4_096 if QUICK else 1_000_000
FRAMES_PER_BATCH = 1_024 if QUICK else 2_048
EPOCHS, MINIBATCH_SIZE = 2 if QUICK else 10, 64
LEARNING_RATE = 3e-4  # at most
TARGET_KL = ppokit.InterpSchedule([(0, 0.02), (TOTAL_FRAMES, 0.001)])
GAMMA, LMBDA = 0.99, 0.95
EVALUATE_EVERY, EPISODES = (2, 2) if QUICK else (20, 10)  # batches, episodes
OUT = Path("outputs") / "mujoco_ppo" / ENV

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# The environment
# ---------------
# The policy draws actions from a normal distribution, which has no bounds. A wrapper clips them.


def make_env(**options: Any) -> gym.Env:
    """Return the task, with actions clipped to their bounds."""
    return gym.wrappers.ClipAction(gym.make(ENV, **options))


env = make_env()

# %%
# Networks and collector
# ----------------------
# Policy and critic are separate networks with two layers of 64 units and tanh. The scale of the
# policy does not depend on the observation. The collector standardizes observations by their mean
# and standard deviation so far. It compiles the policy.
actor, critic = actor_critic(env)
standardize = ppokit.ObservationNormalizer(env.observation_space.shape or ())
collector = ppokit.GymCollector(
    make_env,
    actor,
    frames_per_batch=FRAMES_PER_BATCH,
    total_frames=TOTAL_FRAMES,
    observation_transform=standardize,
    compile_policy=not QUICK,
)
collector.set_seed(SEED)

# %%
# The update
# ----------
# Rewards are divided by the standard deviation of their discounted return. The critic has a squared
# loss with coefficient 0.25; there is no entropy bonus. After an epoch the learning rate falls if
# the policy's KL to the policy that collected the batch is above twice a target, and rises if it is
# below half of it. The target falls linearly, so that steps are small at the end. The advantages
# are computed again before each epoch. :doc:`../benchmarks/mujoco_search` has the reasons for both.
# The training step is one compiled graph.
loss = ppokit.DualClipPPOLoss(
    actor,
    critic,
    clip_epsilon=0.2,
    entropy_bonus=False,
    critic_coeff=0.25,
    loss_critic_type="l2",
    normalize_advantage=True,
)
optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
adaptive = ppokit.AdaptiveLearningRate(optimizer, bounds=(1e-5, LEARNING_RATE))
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=not QUICK),
    advantage=ppokit.GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic),
    reward_normalizer=ppokit.RewardNormalizer(GAMMA),
    adaptive_kl=adaptive,
    scheduler=ppokit.ParameterScheduler({"target_kl": (adaptive, TARGET_KL)}),
    epochs=EPOCHS,
    minibatch_size=MINIBATCH_SIZE,
    recompute_advantage=True,
    seed=SEED,
)

# %%
# Training
# --------
# Every 20 batches the policy plays ten episodes with its most probable actions. Then a checkpoint
# is written. After Ctrl-C, run the script again with ``RESUME = True``.
OUT.mkdir(parents=True, exist_ok=True)
checkpoint = OUT / "checkpoint.pt"
parts = {"update": update, "collector": collector}
history: list[dict[str, float]] = []
if RESUME:
    history = ppokit.load_checkpoint(checkpoint, parts | {"history": None})[
        "history"
    ]
frames = int(sum(row["frames"] for row in history))
torch.manual_seed(SEED + frames)
with tqdm(total=TOTAL_FRAMES, initial=frames, unit="frame") as progress:
    for batch in collector:
        row = update(batch)
        frames += batch.numel()
        history.append(row)
        if len(history) % EVALUATE_EVERY == 0 or frames >= TOTAL_FRAMES:
            returns, _ = ppokit.evaluate(
                make_env,
                actor,
                episodes=EPISODES,
                num_envs=EPISODES,
                observation_transform=standardize,
                seed=SEED + 1,
            )
            row["eval_return"] = returns.mean().item()
            progress.set_postfix(evaluation=f"{row['eval_return']:.0f}")
            ppokit.save_checkpoint(checkpoint, parts | {"history": history})
        progress.update(batch.numel())
(OUT / "history.json").write_text(json.dumps(history))

# %%
# The result
# ----------
# Another program loads the policy from the checkpoint in the same way.
actor, _ = actor_critic(env)
standardize = ppokit.ObservationNormalizer(env.observation_space.shape or ())
ppokit.load_policy(checkpoint, actor, standardize)
returns, lengths = ppokit.evaluate(
    make_env,
    actor,
    episodes=20,
    num_envs=20,
    observation_transform=standardize,
    seed=SEED + 2,
)
print(
    f"{ENV} after {frames:,} frames: return {returns.mean():.0f} ± {returns.std():.0f},"
)
print(f"length {lengths.double().mean():.0f} steps, in 20 episodes")
for finding in ppokit.diagnose(history):
    print(finding)

# %%
# The figure shows returns in training and in evaluation, and the numbers of the update.
figure = plot_run(history, title=f"{ENV}, seed {SEED}")
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# The first steps of an episode, from left to right. Without OpenGL there is a warning instead.
pictures = record_episode(
    lambda: make_env(render_mode="rgb_array"),
    actor,
    steps=100,
    every=10,
    observation_transform=standardize,
)
if pictures:
    plot_frames(pictures, title=ENV).savefig(OUT / "frames.png", dpi=120)
print(f"Figures and checkpoint: {OUT}")

# %%
# Summary
# -------
# - :func:`~ppokit.networks.actor_critic` builds policy and critic for the spaces of an environment.
# - :func:`~ppokit.evaluate` plays whole episodes and leaves the state of training as it was.
# - :func:`~ppokit.load_policy` reads the policy alone from a checkpoint.
#
# Further reading
# ---------------
# - Engstrom et al., 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729.
# - Andrychowicz et al., 2021, "What Matters In On-Policy Reinforcement Learning?",
#   arXiv:2006.05990.
