r"""
PPO on images
=============

This tutorial trains PPO on the images of MinAtar, small versions of Atari games (Young and Tian,
2019, arXiv:1903.03176), or on Atari itself. The page :doc:`../howto/pixels` explains each part.

.. code-block:: bash

    pip install -e ".[tutorials,atari]"
    python tutorials/atari_ppo.py           # MinAtar: two minutes on one core
    python tutorials/atari_ppo.py --quick   # a few seconds, to see that it runs

For Atari set ``ATARI = True`` at the top. Results are written to ``OUT``.
"""

# %%
# Settings
# --------
# Those of Atari are of Schulman et al., 2017, arXiv:1707.06347, Table 5, as CleanRL's
# ``ppo_atari.py`` has them.
from __future__ import annotations

import json
import sys
from pathlib import Path

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torchrl.envs import ExplorationType
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_frames, plot_run, record_episode

QUICK = "--quick" in sys.argv
ATARI = False  # instead of MinAtar
GAME = "Pong" if ATARI else "Breakout"
SEED = 0
RESUME = False  # continue the run in OUT
NUM_ENVS, STEPS = 8, 128
TOTAL_FRAMES = (
    2 * NUM_ENVS * STEPS if QUICK else 10_000_000 if ATARI else 500_000
)
EPOCHS = 1 if QUICK else 4
MINIBATCH_SIZE = 256
LEARNING_RATE, CLIP_EPSILON = (2.5e-4, 0.1) if ATARI else (1e-3, 0.2)
EVALUATE_EVERY = 2 if QUICK else 50  # batches
EPISODES = 2 if QUICK else 20
OUT = Path("outputs") / "atari_ppo" / GAME

torch.set_num_threads(1)
torch.manual_seed(SEED)

# %%
# Environments
# ------------
# ALE's vector environment steps all games in C++. It makes the usual observation: four grey frames
# of 84 x 84 pixels. In training the reward is the sign of the score. A game of MinAtar has 10 x 10
# pixels with one channel for each kind of object; the environments are stepped one after the other.


def make_env(*, training: bool = False) -> gym.Env | VectorEnv:
    """Return one game, or all games in a vector environment."""
    if not ATARI:
        from minatar.gym import register_envs

        if (name := f"MinAtar/{GAME}-v1") not in gym.registry:
            register_envs()
        # its checker warns that drawing has no frames per second
        return gym.make(name, render_mode="rgb_array", disable_env_checker=True)
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        GAME.lower(),
        num_envs=NUM_ENVS if training else EPISODES,
        num_threads=1,
        autoreset_mode=AutoresetMode.SAME_STEP,
        reward_clipping=training,
    )


# %%
# Networks and collector
# ----------------------
# Policy and critic share one convolutional network. The collector stores the critic's values, so
# that GAE evaluates no network, and it stores each image once.
encoder = "nature" if ATARI else "small"
env = make_env(training=True)
actor, value_head, critic = actor_critic(env, (), encoder=encoder, shared=True)
env.close()
collector = ppokit.GymCollector(
    lambda: make_env(training=True),
    actor,
    num_envs=NUM_ENVS,
    frames_per_batch=NUM_ENVS * STEPS,
    total_frames=TOTAL_FRAMES,
    compile_policy=not QUICK,
    value_network=critic,
    compact_obs=True,
)
collector.set_seed(SEED)

# %%
# The update
# ----------
# The learning rate falls linearly to 0. The training step is one compiled graph.
loss = ppokit.DualClipPPOLoss(
    actor,
    value_head,
    clip_epsilon=CLIP_EPSILON,
    entropy_coeff=0.01,
    critic_coeff=0.5,
    loss_critic_type="l2",
    normalize_advantage=True,
)
optimizer = torch.optim.Adam(
    loss.parameters(), LEARNING_RATE, eps=1e-5, fused=True
)
falling = ppokit.InterpSchedule([(0, LEARNING_RATE), (TOTAL_FRAMES, 0.0)])
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=not QUICK),
    advantage=ppokit.GAE(gamma=0.99, lmbda=0.95, value_network=None),
    scheduler=ppokit.ParameterScheduler({"lr": (optimizer, falling)}),
    epochs=EPOCHS,
    minibatch_size=MINIBATCH_SIZE,
    seed=SEED,
)

# %%
# Training
# --------
# ``del batch`` releases a batch of images before the next one is collected. Evaluation draws
# actions as training does: the most probable actions may repeat without end. After an evaluation a
# checkpoint is written. After Ctrl-C, run the script again with ``RESUME = True``.
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
        history.append(row)
        del batch
        if len(history) % EVALUATE_EVERY == 0:
            returns, _ = ppokit.evaluate(
                make_env,
                actor,
                episodes=EPISODES,
                num_envs=EPISODES,
                exploration_type=ExplorationType.RANDOM,
                seed=SEED + 1,
            )
            row["eval_return"] = returns.mean().item()
            progress.set_postfix(evaluation=f"{row['eval_return']:.1f}")
            ppokit.save_checkpoint(checkpoint, parts | {"history": history})
        progress.update(NUM_ENVS * STEPS)
(OUT / "history.json").write_text(json.dumps(history))
collector.shutdown()

# %%
# The result
# ----------
# The figure shows returns in training and in evaluation, and the numbers of the update.
evaluations = [row["eval_return"] for row in history if "eval_return" in row]
print(f"{GAME}, mean return of {EPISODES} episodes:")
print(" -> ".join(f"{x:.1f}" for x in evaluations))
for finding in ppokit.diagnose(history):
    print(finding)
figure = plot_run(history, title=f"{GAME}, seed {SEED}")
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# Frames of a game of MinAtar, from left to right. ALE's vector environment draws none.
if not ATARI:
    pictures = record_episode(make_env, actor, steps=100, every=10)
    plot_frames(pictures, title=GAME).savefig(OUT / "frames.png", dpi=120)
print(f"Figures and checkpoint: {OUT}")

# %%
# Summary
# -------
# - ``actor_critic(encoder=...)`` builds convolutional networks; ``shared=True`` shares them.
# - ``GymCollector(value_network=..., compact_obs=True)`` evaluates and stores each image once.
#
# Further reading
# ---------------
# - Young and Tian, 2019, "MinAtar", arXiv:1903.03176.
# - Machado et al., 2018, "Revisiting the Arcade Learning Environment", arXiv:1709.06009.
