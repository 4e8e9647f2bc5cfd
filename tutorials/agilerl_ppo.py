r"""
AgileRL's PPO from ppokit's blocks
==================================

AgileRL's ``PPO`` is one class with thirty arguments. This tutorial maps them to
ppokit: encoders for any observation, action masks, a KL target for each epoch,
clones. It trains ``LunarLanderContinuous-v3``, where a landing gets 200 points.

.. code-block:: bash

    python tutorials/agilerl_ppo.py           # two to three minutes
    python tutorials/agilerl_ppo.py --quick   # a few seconds

For the population of AgileRL see :doc:`population`.
"""

# %%
# Settings
# --------
from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_run

QUICK = "--quick" in sys.argv
ENV = "LunarLanderContinuous-v3"
SEED = 0
TOTAL_FRAMES = 4_096 if QUICK else 300_000
NUM_ENVS, LEARN_STEP, BATCH_SIZE = 16, 2_048, 128
UPDATE_EPOCHS, TARGET_KL = 4, 0.03
LEARNING_RATE, GAMMA, GAE_LAMBDA = 1e-3, 0.999, 0.98
ACTION_STD_INIT, CLIP_COEF, ENT_COEF, VF_COEF = 0.6, 0.2, 0.01, 0.5
OUT = Path("outputs") / "agilerl_ppo"

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# Encoders
# --------
# ``actor_critic`` makes an encoder for each part of an observation: vectors, images,
# choices, or a dictionary of these. A mask in the observation restricts a Discrete
# action. ``shared=True`` is AgileRL's ``share_encoders``.
spaces = gym.spaces.Dict(
    image=gym.spaces.Box(0, 255, (84, 84, 3), "uint8"),
    speed=gym.spaces.Box(-1.0, 1.0, (2,)),
    action_mask=gym.spaces.MultiBinary(4),
)
policy, _ = actor_critic((spaces, gym.spaces.Discrete(4)))
print(f"reads {policy.in_keys}, writes {policy.out_keys}")

# %%
# The agent
# ---------
# - ``action_std_init``: ``log_scale`` of ``actor_critic``. The standard deviation does
#   not depend on the observation. ``ClipAction`` brings actions into their bounds.
# - ``target_kl``: AgileRL stops after an epoch whose KL exceeds the target:
#   ``tolerance=1.0``, ``when="epoch"``.


def make_env() -> gym.Env:
    """Return the environment."""
    return gym.wrappers.ClipAction(gym.make(ENV))


def make_agent() -> dict[str, Any]:
    """Return policy and update."""
    scale = torch.tensor(ACTION_STD_INIT).log().item()
    actor, critic = actor_critic(ENV, hidden=(64, 64), log_scale=scale)
    loss = ppokit.DualClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP_COEF,
        entropy_coeff=ENT_COEF,
        critic_coeff=VF_COEF,
    )
    adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
    falling = ppokit.InterpSchedule([(0, LEARNING_RATE), (TOTAL_FRAMES, 0.0)])
    stopper = ppokit.KLEarlyStopper(TARGET_KL, tolerance=1.0, when="epoch")
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, adam, stopper=stopper, max_grad_norm=0.5),
        advantage=ppokit.GAE(
            gamma=GAMMA,
            lmbda=GAE_LAMBDA,
            value_network=critic,
            average_gae=True,
        ),
        reward_normalizer=ppokit.RewardNormalizer(GAMMA),
        scheduler=ppokit.ParameterScheduler({"lr": (adam, falling)}),
        epochs=UPDATE_EPOCHS,
        minibatch_size=BATCH_SIZE,
        seed=SEED,
    )
    return {"policy": actor, "update": update}


agent = make_agent()

# %%
# Training
# --------
# The statistics of the observations belong to the collector.
normalizer = ppokit.ObservationNormalizer(8)
collector = ppokit.GymCollector(
    make_env,
    agent["policy"],
    num_envs=NUM_ENVS,
    frames_per_batch=LEARN_STEP,
    total_frames=TOTAL_FRAMES,
    observation_transform=normalizer,
)
collector.set_seed(SEED)
history: list[dict[str, float]] = []
for batch in tqdm(collector, total=TOTAL_FRAMES // LEARN_STEP, unit="batch"):
    history.append(agent["update"](batch))
stops = sum(row["stopped"] for row in history)
print(f"the KL target ended {stops:.0f} of {len(history)} updates")

# %%
# Clones and checkpoints
# ----------------------
# A clone is a deep copy: networks, optimizer and update together, so that the copies
# share what the originals share. A checkpoint holds the same. Both act like the
# agent.
OUT.mkdir(parents=True, exist_ok=True)
ppokit.save_checkpoint(OUT / "checkpoint.pt", agent)
loaded = make_agent()
ppokit.load_checkpoint(OUT / "checkpoint.pt", loaded)
agents = {"agent": agent, "clone": copy.deepcopy(agent), "loaded": loaded}
scores: dict[str, float] = {}
for name, each in agents.items():
    returns, _ = ppokit.evaluate(
        make_env,
        each["policy"],
        episodes=16,
        num_envs=8,
        observation_transform=normalizer,
        seed=1,
    )
    scores[name] = returns.mean().item()
    print(f"{name}: return {scores[name]:.1f} after {TOTAL_FRAMES:,} frames")

# %%
# Result
# ------
figure = plot_run(history, title=ENV)
figure.savefig(OUT / "figure.png", dpi=120)
(OUT / "history.json").write_text(json.dumps(history))

# %%
# Next: :doc:`../howto/coming_from`, and the comparison with AgileRL itself in
# :doc:`../benchmarks/agilerl`.
