r"""
Checkpoints and resume
======================

This tutorial saves a run, continues it in new objects, and shows that the result equals an
uninterrupted run bit for bit. It also loads the policy alone, as another program would.

.. code-block:: bash

    python tutorials/checkpoints_and_resume.py           # about half a minute
    python tutorials/checkpoints_and_resume.py --quick   # a few seconds

Stop it with Ctrl-C, or kill it, and start it again with ``RESUME = True``.
"""

# %%
# Settings
# --------
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic

QUICK = "--quick" in sys.argv
ENV = "CartPole-v1"
SEED = 0
RESUME = False  # True continues the runs in OUT
TOTAL_FRAMES = 4_096 if QUICK else 40_960
FRAMES_PER_BATCH, SAVE_EVERY = 512, 2  # frames, batches
OUT = Path("outputs") / "checkpoints_and_resume"

torch.set_num_threads(1)  # small networks gain nothing from more

# %%
# The parts of a run
# ------------------
# ``PPOUpdate`` has the state of all its blocks: networks, optimizer, statistics of rewards, the
# schedule, and the random numbers that shuffle frames. ``GymCollector`` has the frames so far, the
# policy and the statistics of observations. The function seeds the initial weights.


def build() -> dict[str, Any]:
    """Return update and collector, at the start of a run."""
    torch.manual_seed(SEED)
    actor, critic = actor_critic(ENV)
    loss = ppokit.DualClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3, fused=True)
    falling = ppokit.InterpSchedule([(0, 3e-3), (TOTAL_FRAMES, 0.0)])
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5),
        advantage=ppokit.GAE(
            gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True
        ),
        reward_normalizer=ppokit.RewardNormalizer(0.99),
        scheduler=ppokit.ParameterScheduler({"lr": (optimizer, falling)}),
        epochs=4,
        minibatch_size=128,
        seed=SEED,
    )
    collector = ppokit.GymCollector(
        ENV,
        actor,
        num_envs=4,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=TOTAL_FRAMES,
        observation_transform=ppokit.ObservationNormalizer((4,)),
    )
    return {"update": update, "collector": collector}


# %%
# Random numbers and episodes
# ---------------------------
# A checkpoint cannot hold the state of a simulator. After each checkpoint, and after loading one,
# the run begins new episodes. They are drawn from the seed and the number of frames. So a run that
# is interrupted meets the same episodes as one that is not.


def begin_episodes(parts: dict[str, Any], frames: int) -> None:
    """Seed all random numbers, and reset every environment."""
    drawn = (
        int(np.random.SeedSequence([SEED, frames]).generate_state(1)[0]) // 2
    )
    torch.manual_seed(drawn)
    parts["collector"].set_seed(drawn)
    parts["update"].reset_returns()  # of the episodes that end here


# %%
# A run that continues from its checkpoint
# ----------------------------------------
# ``save_checkpoint`` replaces the file at once: a process that is killed while it saves leaves the
# last good one. ``load_checkpoint`` loads all parts, or none. Plain data such as ``history`` is
# saved beside them.


def train(
    name: str, until: int
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Train to so many frames, from the checkpoint if there is one; return parts and history."""
    file, parts = OUT / f"{name}.pt", build()
    history: list[dict[str, float]] = []
    if file.exists():
        history = ppokit.load_checkpoint(file, parts | {"history": None})[
            "history"
        ]
    frames = len(history) * FRAMES_PER_BATCH
    begin_episodes(parts, frames)
    batches = range(frames, until, FRAMES_PER_BATCH)
    for _, batch in zip(
        tqdm(batches, desc=name, unit="batch"), parts["collector"], strict=False
    ):
        history.append(parts["update"](batch))
        frames += batch.numel()
        if len(history) % SAVE_EVERY == 0:
            ppokit.save_checkpoint(file, parts | {"history": history})
            begin_episodes(parts, frames)
    return parts, history


# %%
# One run in one piece, and one in two
# ------------------------------------
# The second run stops after half of the frames. The next call makes new objects, as a new process
# does, and loads the checkpoint. Parameters and optimizer states of both runs are equal.
OUT.mkdir(parents=True, exist_ok=True)
if not RESUME:
    for file in OUT.glob("*.pt"):
        file.unlink()
whole, whole_history = train("whole", TOTAL_FRAMES)
half, half_history = train("two_pieces", TOTAL_FRAMES // 2)
pieces, history = train("two_pieces", TOTAL_FRAMES)


def numbers(parts: dict[str, Any]) -> torch.Tensor:
    """Return parameters and optimizer state as one vector."""
    step = parts["update"].step
    state = [x for each in step.optimizer.state.values() for x in each.values()]
    return torch.cat(
        [x.detach().flatten() for x in [*step.loss.parameters(), *state]]
    )


is_equal = torch.equal(numbers(whole), numbers(pieces))
print(
    f"{numbers(whole).numel():,} numbers of the two runs, bitwise equal: {is_equal}"
)

# %%
# The figure shows both runs: the second one covers the first.
figure, axis = plt.subplots(figsize=(7, 3.5))
runs = (
    ("one piece", whole_history, "-"),
    ("two pieces", history, "--"),
    ("half", half_history, ":"),
)
for label, rows, style in runs:
    frames = [FRAMES_PER_BATCH * n for n in range(1, len(rows) + 1)]
    axis.plot(
        frames, [row["episode_return"] for row in rows], style, label=label
    )
axis.set(xlabel="frames", ylabel="mean return of ended episodes", title=ENV)
axis.legend()
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# The policy alone
# ----------------
# Another program needs neither the optimizer nor the collector. It makes the same networks and the
# same transform, and loads their weights from the checkpoint.
policy, _ = actor_critic(ENV)
standardize = ppokit.ObservationNormalizer((4,))
ppokit.load_policy(OUT / "two_pieces.pt", policy, standardize)
evaluation: Any = {"episodes": 20, "num_envs": 4, "seed": 1}
returns, _ = ppokit.evaluate(
    ENV, policy, observation_transform=standardize, **evaluation
)
print(
    f"return of the loaded policy: {returns.mean():.0f} ± {returns.std():.0f}"
)

# %%
# Summary
# -------
# - ``{"update": update, "collector": collector}`` is the whole state of a run.
# - A run that begins new episodes at each checkpoint can be resumed bit for bit.
# - :func:`~ppokit.load_policy` needs the file, the networks and the transform.
#
# More on the file: :doc:`../howto/checkpoints`.
