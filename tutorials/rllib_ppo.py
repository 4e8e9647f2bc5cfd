r"""
RLlib's PPO from ppokit's blocks
================================

RLlib's PPO adds three parts to the clipped loss: a KL penalty with an adaptive
coefficient, a clamped loss of the critic, and schedules in frames. This tutorial
maps its options to ppokit, and trains CartPole with the settings of RLlib's example
``cartpole_ppo.py`` and with settings that learn faster.

.. code-block:: bash

    python tutorials/rllib_ppo.py           # about a minute
    python tutorials/rllib_ppo.py --quick   # a few seconds
"""

# %%
# Settings
# --------
# The names are RLlib's. ``lr`` is a schedule ``[[frames, value], ...]``.
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import PANELS, plot_run

QUICK = "--quick" in sys.argv
ENV = "CartPole-v1"
SEED = 0
TOTAL_FRAMES = 8_000 if QUICK else 80_000
SETTINGS: dict[str, dict[str, Any]] = {
    "RLlib's example": {
        "num_envs": 64,
        "train_batch_size": 4_000,
        "minibatch_size": 128,
        "num_epochs": 6,
        "lr": [(0, 3e-4)],
        "lambda_": 1.0,
        "vf_loss_coeff": 0.01,
        "vf_clip_param": 10.0,
        "fcnet_hiddens": (32,),
        "fcnet_activation": nn.Identity,
        "vf_share_layers": True,
    },
    "ppokit's": {
        "num_envs": 16,
        "train_batch_size": 1_024,
        "minibatch_size": 256,
        "num_epochs": 8,
        "lr": [(0, 3e-3), (TOTAL_FRAMES, 3e-4)],
        "lambda_": 0.95,
        "vf_loss_coeff": 0.5,
        "vf_clip_param": None,
        "fcnet_hiddens": (64,),
        "fcnet_activation": "tanh",
        "vf_share_layers": False,
    },
}
GAMMA, CLIP_PARAM, KL_COEFF, KL_TARGET = 0.99, 0.3, 0.2, 0.01
OUT = Path("outputs") / "rllib_ppo"

torch.set_num_threads(1)  # small networks gain nothing from more

# %%
# Networks
# --------
# With ``vf_share_layers`` policy and critic share the hidden layers. Then the loss
# takes the value head alone, which reads the features of the policy.


def make_networks(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the policy, the critic for the loss, and the whole critic."""
    networks = actor_critic(
        ENV,
        hidden=settings["fcnet_hiddens"],
        activation=settings["fcnet_activation"],
        shared=settings["vf_share_layers"],
    )
    return networks if len(networks) == 3 else (*networks, networks[1])


# %%
# The update
# ----------
# - **KL penalty**: ``kl_coeff`` adds the exact KL divergence of the two distributions
#   to the loss. ``AdaptiveKLCoeff`` multiplies the coefficient by 1.5 above twice the
#   target, and by 0.5 below half of it, once for each batch.
# - **vf_clip_param** clamps the squared error of a frame, and a clamped frame has no
#   gradient. At 10 the critic learns from errors below 3.2; returns are up to 100.
# - **lambda_** of 1 is the discounted return minus the value; RLlib's
#   ``use_gae=False`` is the same.
# - RLlib standardizes the advantage over the batch: ``average_gae=True``.


def make_update(settings: dict[str, Any]) -> tuple[Any, ppokit.PPOUpdate]:
    """Return policy and update."""
    actor, critic_of_loss, critic = make_networks(settings)
    loss = ppokit.DualClipPPOLoss(
        actor,
        critic_of_loss,
        clip_epsilon=CLIP_PARAM,
        kl_coeff=KL_COEFF,
        entropy_bonus=False,
        critic_coeff=settings["vf_loss_coeff"],
        critic_loss_clip=settings["vf_clip_param"],
        loss_critic_type="l2",
    )
    points = settings["lr"]
    adam = torch.optim.Adam(loss.parameters(), lr=points[0][1], fused=True)
    falling = ppokit.InterpSchedule(points)
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, adam),
        advantage=ppokit.GAE(
            gamma=GAMMA,
            lmbda=settings["lambda_"],
            value_network=critic,
            average_gae=True,
        ),
        adaptive_kl=ppokit.AdaptiveKLCoeff(loss, target_kl=KL_TARGET),
        scheduler=ppokit.ParameterScheduler({"lr": (adam, falling)}),
        epochs=settings["num_epochs"],
        minibatch_size=settings["minibatch_size"],
        seed=SEED,
    )
    return actor, update


# %%
# Training
# --------
history: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
OUT.mkdir(parents=True, exist_ok=True)
for name, rows in history.items():
    settings = SETTINGS[name]
    torch.manual_seed(SEED)
    actor, update = make_update(settings)
    steps = -(-settings["train_batch_size"] // settings["num_envs"])
    collector = ppokit.GymCollector(
        ENV,
        actor,
        num_envs=settings["num_envs"],
        frames_per_batch=steps * settings["num_envs"],
        total_frames=TOTAL_FRAMES,
    )
    collector.set_seed(SEED)
    with tqdm(total=TOTAL_FRAMES, unit="frame", desc=name) as progress:
        for batch in collector:
            progress.update(batch.numel())
            row = update(batch) | {"total_frames": float(progress.n)}
            rows.append(row | {"kl_coeff": update.step.loss.kl_coeff.item()})
    returns, _ = ppokit.evaluate(ENV, actor, episodes=20, num_envs=4, seed=1)
    print(f"{name}: {returns.mean():.0f} of 500 after {TOTAL_FRAMES:,} frames")
    path = OUT / f"{name.split()[0]}.pt"
    ppokit.save_checkpoint(path, {"update": update})

# %%
# Result
# ------
# The last panel shows the coefficient of the KL penalty.
panels = {**PANELS, "coefficient of the KL penalty": ["kl_coeff"]}
figure = plot_run(history, panels=panels, title=ENV)
figure.savefig(OUT / "figure.png", dpi=120)
(OUT / "history.json").write_text(json.dumps(history))

# %%
# Next: :doc:`../howto/coming_from`, and the comparison with RLlib itself in
# :doc:`../benchmarks/rllib`.
